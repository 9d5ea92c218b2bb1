"""What a run is made of: policy, tasks, rewards, sampler; loaded and checked together."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from .config import RunConfig
from .curriculum.variants import Variants
from .data import fingerprint
from .errors import UserError
from .forward import causal_lm, check_reach, context_length
from .groups.batch import Origin
from .model import Policy, load_policy
from .rewards.load import check_answers, load_rewards
from .rewards.score import Scorer
from .sampler import GroupSampler
from .taskset import TaskSet

NO_DECIDER = (
    "no reward is named as the one that says which are right: set decides: true for it in rewards"
)


@dataclass
class Parts:
    """Used as a context: the reward workers end with it."""

    policy: Policy
    train: TaskSet
    heldout: TaskSet | None
    regression: TaskSet | None
    scorer: Scorer
    sampler: GroupSampler

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()

    @cached_property
    def data_hash(self) -> str:
        """Of the tasks that are trained on."""
        return fingerprint(self.train.tasks)

    def kinds(self, origins: Sequence[Origin], column: str | None) -> list[str] | None:
        """[P] the kind of task of each group, where a column of the data names it."""
        if column is None:
            return None
        return [str(self.train.tasks[origin.task].columns.get(column)) for origin in origins]


def over_context(config: RunConfig, parts: Parts) -> str | None:
    """What a person should know of answers that the model's context ends, not max_tokens."""
    context, prompt = context_length(parts.policy.model), parts.train.longest
    if context is None or prompt + config.sampling.max_tokens <= context:
        return None
    return (
        f"sampling.max_tokens {config.sampling.max_tokens} is more than the model's context of "
        f"{context} has room for: after the longest prompt, of {prompt}, answers end at "
        f"{context - prompt} tokens"
    )


def load_parts(config: RunConfig, resume: Path | None) -> Parts:
    """resume: the folder of trained weights to go on from."""
    data, variants = config.data, config.variants
    # First what fails soonest: a typo in a reward file need not wait for a model.
    scorer = Scorer(load_rewards(config.rewards, data.answer_column), config.scoring)
    try:
        check_decider(config, scorer)
        policy = load_policy(
            config.model, config.lora, needs_reference=_needs_reference(config), resume=resume
        )
        if config.train.gradient_checkpointing:
            causal_lm(policy.model).gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        train = TaskSet(data.path, data, policy, Variants(variants.templates, variants.column))
        _check_columns(config, train)
        others = [
            None if path is None else TaskSet(path, data, policy, heldout=True)
            for path in (data.eval_path, data.regression_path)
        ]
        for source in (train, *others):
            check_answers(scorer.rewards, source.tasks if source is not None else [])
        sampler = GroupSampler(policy.model, policy.tokenizer)
        _check_ends(config, sampler)
        _check_budget(config, train, context_length(policy.model))
        for source in (train, *others):
            _check_reach(config, source, policy.model)
    except BaseException:
        scorer.close()
        raise
    return Parts(policy, train, *others, scorer, sampler)


def check_decider(config: RunConfig, scorer: Scorer) -> None:
    """UserError where a setting goes by right answers and no reward says which are right."""
    if scorer.decider is not None:
        return
    curriculum = config.curriculum
    for key, needs in (
        ("curriculum.shares", curriculum.shares is not None),
        ("curriculum.solved_share", curriculum.solved_share is not None),
        ("replay.mode clone", config.replay.mode == "clone"),
        ("anchors.share", config.anchors.share > 0),
    ):
        if needs:
            raise UserError(f"{key} goes by right answers, and {NO_DECIDER}")


def _needs_reference(config: RunConfig) -> bool:
    return config.loss.beta > 0 or config.replay.mode == "kl"


def _check_columns(config: RunConfig, train: TaskSet) -> None:
    named = {"data.task_column": config.data.task_column, "variants.column": config.variants.column}
    for key, column in named.items():
        if column is not None and column not in train.column_names:
            there = ", ".join(train.column_names) or "none"
            raise UserError(f"{key}: no row of {train.path} has {column!r}; there are: {there}")


def _check_ends(config: RunConfig, sampler: GroupSampler) -> None:
    if not sampler.eos_ids and not config.sampling.stop:
        raise UserError(
            f"{config.model.path} names no EOS token and sampling.stop is empty: no answer "
            "would ever end; add eos_token_id to its generation_config.json"
        )


def _check_reach(config: RunConfig, source: TaskSet | None, model: nn.Module) -> None:
    if source is None:
        return
    room = (context_length(model) or sys.maxsize) - source.longest
    check_reach(model, source.longest, min(config.sampling.max_tokens, room))


def _check_budget(config: RunConfig, train: TaskSet, context: int | None) -> None:
    longest = train.longest + config.sampling.max_tokens
    longest = min(longest, context or longest)
    if longest > config.train.token_budget:
        raise UserError(
            f"train.token_budget {config.train.token_budget} is below the longest prompt "
            f"and sampling.max_tokens together: set it to at least {longest}"
        )
