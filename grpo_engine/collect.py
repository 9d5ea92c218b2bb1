"""From tasks to a batch: prompts are drawn, groups sampled, completions rewarded."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np

from .clock import Clock
from .config import RunConfig
from .data import TaskStream, fingerprint, load_tasks
from .errors import UserError
from .forward import context_length, head_of
from .groups import Batch, make_batch
from .ledger import Ledger
from .model import Policy
from .prompts import check_room, encode_prompt, prompt_tail, to_messages
from .rewards import Scores, load_rewards, score
from .rollout import Rollout, SamplingParams
from .sampler import GroupSampler, Progress


class TaskSet:
    """Tasks with their prompts as they are sent and as token ids, checked when they are loaded."""

    def __init__(self, path: str, config: RunConfig, policy: Policy) -> None:
        self.tasks = load_tasks(path, config.data.prompt_column)
        data = config.data
        if data.system is not None and not data.as_chat and isinstance(self.tasks[0].prompt, str):
            raise UserError(
                f"data.system is for chat messages, and the prompts of {path} are strings: set "
                "data.as_chat, or leave out data.system"
            )
        self.prompts = [to_messages(t.prompt, data.as_chat, data.system) for t in self.tasks]
        self.ids = [encode_prompt(policy.tokenizer, prompt) for prompt in self.prompts]
        vocab = len(head_of(policy.model).weight)
        check_room(self.ids, context_length(policy.model), vocab, path)
        self.column_names = sorted({name for task in self.tasks for name in task.columns})


class Collector:
    """Makes batches and evaluates; knows the data, the rewards and the sampler."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.train = TaskSet(config.data.path, config, policy)
        self.heldout = None
        if config.data.eval_path is not None:
            self.heldout = TaskSet(config.data.eval_path, config, policy)
        every_task = self.train.tasks + (self.heldout.tasks if self.heldout else [])
        self.rewards = load_rewards(config.rewards, config.data.answer_column, every_task)
        self.stream = TaskStream(len(self.train.tasks), config.train.seed)
        self.sampler = GroupSampler(policy.model, policy.tokenizer)
        if not self.sampler.eos_ids and not config.sampling.stop:
            raise UserError(
                f"{config.model.path} names no EOS token and sampling.stop is empty: no answer "
                "would ever end; add eos_token_id to its generation_config.json"
            )
        self.data_hash = fingerprint(self.train.tasks)

    def collect(
        self, step: int, position: int, ledger: Ledger, clock: Clock, progress: Progress
    ) -> Batch:
        """The generation of `step`: the tasks from `position` of the stream on."""
        config = self.config
        drawn = self.stream.take(position, config.train.prompts_per_step)
        params = self._params(seed=step_seed(config.train.seed, step))
        with clock("sample"):
            groups = self.sampler.generate(
                [self.train.ids[i] for i in drawn],
                config.sampling.group_size,
                params,
                progress=progress,
            )
        with clock("reward"):
            scores = self._score(self.train, drawn, groups, step)
            rows = [self.train.tasks[i].row for i in drawn]
            batch = make_batch(rows, groups, scores, config.groups, config.loss)
        with clock("record"):
            decode = self.policy.tokenizer.decode
            prompts = [text for g in groups for text in [decode(g[0].prompt_ids)] * len(g)]
            ledger.samples(step, batch, prompts, [decode(r.completion_ids) for r in batch.rollouts])
        return batch

    def evaluate(self, step: int, progress: Progress) -> float:
        """Mean reward of greedy answers to the held-out tasks, of which there must be some."""
        chosen = range(len(self.heldout.tasks))[: self.config.data.eval_limit]
        ids = [self.heldout.ids[i] for i in chosen]
        groups = self.sampler.generate(ids, 1, self._params(temperature=0.0), progress=progress)
        totals = self._score(self.heldout, chosen, groups, step).total
        rewards = [total for total in totals if total is not None]
        return sum(rewards) / len(rewards)

    def _params(self, **changes: Any) -> SamplingParams:
        params = asdict(self.config.sampling)
        del params["group_size"]  # the rest are the fields of SamplingParams
        return SamplingParams(**(params | changes))

    def _score(
        self, source: TaskSet, chosen: Sequence[int], groups: list[list[Rollout]], step: int
    ) -> Scores:
        tokenizer = self.policy.tokenizer
        index = [i for i, group in zip(chosen, groups, strict=True) for _ in group]
        rollouts = list(chain.from_iterable(groups))
        ids = [r.completion_ids for r in rollouts]
        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in ids]
        arguments = {
            "prompts": [source.prompts[i] for i in index],
            "completions": [
                text if isinstance(source.prompts[i], str) else _assistant(text)
                for i, text in zip(index, texts, strict=True)
            ],
            "completion_ids": ids,
            "finish_reasons": [r.finish_reason for r in rollouts],
            "raw_completions": [tokenizer.decode(c, skip_special_tokens=False) for c in ids],
            "prompt_tail": [
                tail for g in groups for tail in [prompt_tail(tokenizer, g[0].prompt_ids)] * len(g)
            ],
            "step": step,
        }
        columns = {
            name: [source.tasks[i].columns.get(name) for i in index] for name in source.column_names
        }
        return score(self.rewards, arguments, columns)


def step_seed(seed: int, step: int) -> int:
    """63 random bits of a step: what torch takes as a seed and Parquet as an integer."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)


def _assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
