"""Tasks: rows with a prompt and whatever columns the rewards want, from files or built in."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from .config import GYM
from .errors import UserError, require
from .rewards.builtin.gym import reasoning_gym_tasks
from .rewards.protocol import RESERVED

Messages = list[dict[str, str]]

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
    source = Path(path).expanduser()
    if not source.exists():
        raise UserError(f"no such data: {path}; give a JSONL or Parquet file, or a folder")
    tasks = [_task(row, number, path, prompt_column) for number, row in enumerate(_rows(source))]
    if not tasks:
        raise UserError(f"{path} is empty: it needs at least one row with a {prompt_column!r}")
    return tasks


def fingerprint(tasks: Sequence[Task]) -> str:
    """Hash of the tasks: a resumed run must go on with the same ones, in the same order."""
    digest = sha256()
    for task in tasks:
        digest.update(json.dumps([task.prompt, task.columns], default=str).encode())
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


def _rows(source: Path) -> Iterator[dict]:
    if source.is_dir():
        return _dataset_folder_rows(source)
    if source.suffix == ".parquet":
        return _parquet_rows(source)
    if source.suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl_rows(source)
    raise UserError(f"{source}: expected .jsonl, .parquet or a folder saved by `datasets`")


def _jsonl_rows(source: Path) -> Iterator[dict]:
    try:
        with source.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"{source} line {number}: expected an object with columns")
                yield row
    except json.JSONDecodeError as error:
        raise UserError(f"{source} line {number} is no JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"can't read {source}: {error}") from error


def _parquet_rows(source: Path) -> Iterator[dict]:
    parquet = require("pyarrow.parquet", "train", "reading Parquet")
    try:
        yield from parquet.read_table(source).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"can't read {source}: {error}") from error


def _dataset_folder_rows(source: Path) -> Iterator[dict]:
    datasets = require("datasets", "tasks", "reading a folder saved by `datasets`")
    try:
        dataset = datasets.load_from_disk(str(source))
    except Exception as error:  # an empty data set is an IndexError in there
        raise UserError(f"{source} is no folder with rows saved by `datasets`: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        names = ", ".join(f"{source}/{split}" for split in dataset)
        raise UserError(f"{source} holds several splits; give the path of one: {names}")
    yield from dataset


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
    prompt = row[prompt_column]
    if isinstance(prompt, str) and prompt:
        return Task(number, prompt, columns)
    if _is_chat(prompt):
        if prompt[-1]["role"] == "assistant":
            raise UserError(f"{where}: the prompt ends with an assistant message; drop it")
        return Task(number, prompt, columns)
    raise UserError(
        f"{where}: {prompt_column!r} must be a string that is not empty, or chat messages "
        f"[{{role, content}}, ...]; given {str(prompt)[:60]!r}"
    )


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    )


def _builtin(name: str) -> list[Task]:
    if name not in ("arithmetic", "arithmetic-eval"):
        raise UserError(f"no built-in tasks {name!r}; there are arithmetic and arithmetic-eval")
    rows = [Task(i, f"{a}+{b}=", {"answer": str(a + b)}) for i, (a, b) in enumerate(_addends())]
    return rows[:BUILTIN_EVAL_ROWS] if name == "arithmetic-eval" else rows[BUILTIN_EVAL_ROWS:]


def _addends() -> list[tuple[int, int]]:
    """All pairs of 2-digit numbers in a fixed shuffled order, so that a head is held out."""
    order = torch.randperm(90 * 90, generator=torch.Generator().manual_seed(0)).tolist()
    return [(10 + k // 90, 10 + k % 90) for k in order]
