"""Tasks: rows with a prompt and whatever columns the rewards want, from files or built in."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from .config import GYM
from .errors import UserError
from .rewards.builtin.gym import reasoning_gym_tasks
from .rewards.protocol import RESERVED
from .rows import check_plain, read_rows

Messages = list[dict[str, Any]]

BUILTIN_EVAL_ROWS = 200
GYM_ROWS = 1000


@dataclass(frozen=True)
class Task:
    """One row of the data."""

    row: int
    """its number in the source, from 0"""
    prompt: str | Messages
    columns: dict[str, Any]
    """the other columns, handed to the reward functions"""


def load_tasks(
    path: str, prompt_column: str = "prompt", gym: dict[str, Any] | None = None
) -> list[Task]:
    """Tasks from a JSONL or Parquet file, a folder saved by `datasets`, builtin:arithmetic or
    reasoning_gym:NAME, whose options are `gym`: size, seed, and those of the data set.

    Raises UserError, naming the row, for anything that could not be trained on.
    """
    if path.startswith("builtin:"):
        return _builtin(path.removeprefix("builtin:"))
    if path.startswith(GYM):
        options = {"size": GYM_ROWS, "seed": 0} | (gym or {})
        rows = reasoning_gym_tasks(path.removeprefix(GYM), **options)
        return [_task(row, number, path, "prompt") for number, row in enumerate(rows)]
    tasks = [_task(row, number, path, prompt_column) for number, row in enumerate(read_rows(path))]
    if not tasks:
        raise UserError(f"{path} is empty: it needs at least one row with a {prompt_column!r}")
    return tasks


def fingerprint(tasks: Sequence[Task]) -> str:
    """Hash of the tasks: a resumed run must go on with the same ones, in the same order."""
    digest = sha256()
    for task in tasks:
        digest.update(json.dumps([task.prompt, task.columns]).encode())
    return digest.hexdigest()


class TaskStream:
    """An endless shuffled sequence of task numbers; position k is a function of the seed alone."""

    def __init__(self, tasks: int, seed: int) -> None:
        self.tasks, self.seed = tasks, seed
        self._epoch, self._order = -1, torch.empty(0)

    def take(self, position: int, count: int) -> list[int]:
        """The tasks at `position` to `position + count`; every epoch has its own order."""
        return [self._at(k) for k in range(position, position + count)]

    def _at(self, k: int) -> int:
        epoch, offset = divmod(k, self.tasks)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.tasks, generator=generator)
            self._epoch = epoch
        return int(self._order[offset])


def _task(row: dict, number: int, path: str, prompt_column: str) -> Task:
    where = f"{path} row {number}"
    if prompt_column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise UserError(
            f"{where} has no column {prompt_column!r} (it has: {columns}); set data.prompt_column"
        )
    columns = {name: value for name, value in row.items() if name != prompt_column}
    for name in columns:
        if name in RESERVED:
            raise UserError(
                f"{path} has a column {name!r}, the name of an argument that reward functions get; "
                "rename the column"
            )
    check_plain(row, where)
    prompt = row[prompt_column]
    if isinstance(prompt, str) and prompt:
        return Task(number, prompt, columns)
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
        return Task(number, _chat(prompt, where), columns)
    raise UserError(
        f"{where}: {prompt_column!r} must be a string that is not empty, or chat messages "
        f"[{{role, content}}, ...]; given {str(prompt)[:60]!r}"
    )


def _chat(messages: Messages, where: str) -> Messages:
    """Messages whose content is text, without the keys that are null: columns of Parquet and
    `datasets` have every key in every message, and templates ask whether a key is there."""
    chat = []
    for number, message in enumerate(messages):
        place = f"{where}, message {number} of the prompt"
        kept = {key: value for key, value in message.items() if value is not None}
        if not isinstance(role := kept.get("role"), str) or not role:
            raise UserError(f"{place}: its role must be a text like user; given {role!r}")
        chat.append(kept | {"content": _text(kept, place)})
    if chat[-1]["role"] == "assistant":
        raise UserError(f"{where}: the prompt ends with an assistant message; drop it")
    return chat


def _text(message: dict[str, Any], place: str) -> str:
    """The content, its parts joined; a call of tools may do without."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise UserError(f"{place}: its content must be text or parts of text; given {content!r}")
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{place}: it holds a part of type {kind!r}; only parts {{type: text, text: ...}} "
                "can be trained on: drop the row"
            )
    return "".join(part["text"] for part in content)


def _builtin(name: str) -> list[Task]:
    if name not in ("arithmetic", "arithmetic-eval"):
        raise UserError(f"no built-in tasks {name!r}; there are arithmetic and arithmetic-eval")
    rows = [Task(i, f"{a}+{b}=", {"answer": str(a + b)}) for i, (a, b) in enumerate(_addends())]
    return rows[:BUILTIN_EVAL_ROWS] if name == "arithmetic-eval" else rows[BUILTIN_EVAL_ROWS:]


def _addends() -> list[tuple[int, int]]:
    """All pairs of 2-digit numbers in a fixed shuffled order, so that a head is held out."""
    order = torch.randperm(90 * 90, generator=torch.Generator().manual_seed(0)).tolist()
    return [(10 + k // 90, 10 + k % 90) for k in order]
