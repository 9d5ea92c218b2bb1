"""Tasks with their prompts as they are sent and as token ids, checked when they are loaded."""

from collections.abc import Sequence
from typing import Any

from .config import DataConfig
from .curriculum.variants import Variants
from .data import Messages, Task, load_tasks
from .errors import UserError
from .forward import context_length, head_of
from .model import Policy
from .prompts import check_room, decode_all, encode_prompt, prompt_tail, to_messages
from .rewards.score import Scorer, Scores
from .rollout import Rollout


class TaskSet:
    """The tasks of one source; `variants` are the wordings that their prompts may have."""

    def __init__(
        self,
        path: str,
        data: DataConfig,
        policy: Policy,
        variants: Variants | None = None,
        *,
        heldout: bool = False,
    ) -> None:
        self.path, self.data, self.policy = path, data, policy
        self.variants = variants or Variants()
        gym = data.eval_gym if heldout else data.gym
        self.tasks = load_tasks(path, data.prompt_column, gym)
        raw = [task.row for task in self.tasks if isinstance(task.prompt, str)]
        if raw and data.system is not None and not data.as_chat:
            raise UserError(
                f"data.system is for chat messages, and the prompt of {path} row {raw[0]} is a "
                "string: set data.as_chat, or leave out data.system"
            )
        self.column_names = sorted({name for task in self.tasks for name in task.columns})
        self._check_all()

    def prompt(self, task: int, variant: int = 0) -> str | Messages:
        """The prompt of a task as it is sent, in one of its wordings."""
        found = self.tasks[task]
        worded = self.variants.apply(found.prompt, found.columns, variant)
        return to_messages(worded, self.data.as_chat, self.data.system)

    def ids(self, task: int, variant: int = 0) -> list[int]:
        """Its token ids."""
        return encode_prompt(self.policy.tokenizer, self.prompt(task, variant), self.data.now)

    def columns(self, task: int) -> dict[str, Any]:
        """All columns of the data, None where this task has none."""
        own = self.tasks[task].columns
        return {name: own.get(name) for name in self.column_names}

    def column(self, name: str) -> list[Any]:
        """One value a task."""
        return [task.columns.get(name) for task in self.tasks]

    def _check_all(self) -> None:
        """Every wording of every prompt has room in the context."""
        self.longest = 0
        context = context_length(self.policy.model)
        vocab = len(head_of(self.policy.model).weight)
        for number, task in enumerate(self.tasks):
            for variant in range(self.variants.count(task.columns)):
                ids = self.ids(number, variant)
                check_room([ids], context, vocab, self.path, task.row)
                self.longest = max(self.longest, len(ids))


def score_answers(
    scorer: Scorer,
    source: TaskSet,
    chosen: Sequence[int],
    prompts: Sequence[str | Messages],
    groups: Sequence[Sequence[Rollout]],
    step: int,
) -> tuple[list[str], Scores]:
    """The texts [S] of the completions without special tokens, and what the rewards say of them.

    chosen: [P] tasks of `source`. prompts: [P] as they were sent. groups: [P] their rollouts.
    """
    tokenizer: Any = source.policy.tokenizer
    group = [g for g, rollouts in enumerate(groups) for _ in rollouts]
    ids = [r.completion_ids for rollouts in groups for r in rollouts]
    texts = decode_all(tokenizer, ids, skip_special_tokens=True)
    extras = {
        "finish_reasons": lambda: [r.finish_reason for rollouts in groups for r in rollouts],
        "raw_completions": lambda: decode_all(tokenizer, ids, skip_special_tokens=False),
        "prompt_tail": lambda: [
            tail
            for rollouts in groups
            for tail in [prompt_tail(tokenizer, rollouts[0].prompt_ids)] * len(rollouts)
        ],
        "groups": lambda: group,
        "step": lambda: step,
    }
    arguments = {
        "prompts": [prompts[g] for g in group],
        "completions": [
            text if isinstance(prompts[g], str) else [{"role": "assistant", "content": text}]
            for g, text in zip(group, texts, strict=True)
        ],
        "completion_ids": ids,
        # Decoding takes a while: only what a function asks for.
        **{name: make() for name, make in extras.items() if name in scorer.named},
    }
    tasks: list[Task] = [source.tasks[chosen[g]] for g in group]
    columns = {name: [task.columns.get(name) for task in tasks] for name in source.column_names}
    return texts, scorer.score(arguments, columns)
