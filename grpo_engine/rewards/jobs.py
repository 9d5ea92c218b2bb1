"""What a pool of workers is asked, what it says, and the samples that are still to be judged."""

import contextlib
import inspect
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .frames import LARGEST, REQUEST
from .load_function import FunctionSpec, describe
from .protocol import Plain, accepted


@dataclass(frozen=True)
class Job:
    """A function to be called for the samples of a step."""

    spec: int
    """number of the function in the pool"""
    name: str
    """of the function, for messages"""
    arguments: dict[str, Any]
    """lists hold one value a sample; anything else is passed as it is"""
    count: int
    """samples"""
    timeout_s: float
    """of a call, be it of all samples or of one"""
    split: bool = True
    """call it sample by sample when a call of all samples failed; not if it compares samples"""
    most_failures: int | None = None
    """when more samples have failed, nothing is gained by trying the others"""


@dataclass
class Outcome:
    """What a function said of each sample."""

    values: list[Plain]
    """None where it failed"""
    failures: list[str | None]
    """why it failed: "timed out after 5 s", "lost its process (signal 9)", "raised ValueError" """
    per_sample: bool = False
    """whether samples were judged one by one"""


@dataclass
class Task:
    """A job under way."""

    job: Job
    lists: dict[str, list]
    others: dict[str, Any]
    outcome: Outcome
    whole: bool
    """the call of all samples is to be made"""
    waiting: deque[int] = field(default_factory=deque)
    """samples to be called one by one"""
    unbegun: int = 0
    """requests that no worker began"""
    probing: bool = False
    """one sample goes first, alone"""
    answered: int = 0
    failed: int = 0
    timed_out: int = 0
    """samples, of those called one by one"""

    @classmethod
    def of(
        cls, job: Job, spec: FunctionSpec, signature: inspect.Signature, one_by_one: bool
    ) -> "Task":
        """Raises UserError if the function can't be called with these arguments."""
        for column in spec.rename.values():
            if column not in job.arguments:
                raise UserError(f"the reward {job.name} needs the column {column!r} of the data")
        renamed = {name: job.arguments[column] for name, column in spec.rename.items()}
        given = accepted(signature, job.arguments | renamed, job.name)
        lists = {name: v for name, v in given.items() if isinstance(v, list)}
        for name, values in lists.items():
            if len(values) != job.count:
                raise UserError(
                    f"the argument {name!r} of the reward {job.name} has {len(values)} values for "
                    f"{job.count} completions"
                )
        others = {name: v for name, v in given.items() if name not in lists}
        outcome = Outcome([None] * job.count, [None] * job.count)
        task = cls(job, lists, others, outcome, whole=job.count > 0 and not one_by_one)
        if one_by_one:
            task.split()
        return task

    @property
    def ready(self) -> bool:
        """Whether something can be asked."""
        return self.whole or bool(self.waiting)

    def split(self) -> None:
        """From now on one by one."""
        self.waiting.extend(range(self.job.count))
        self.outcome.per_sample = True

    def fail(self, request: "Request", sample: int, cause: str) -> None:
        """A sample failed; if it was a call of all, they are tried one by one or fail together."""
        if request.one_by_one:
            self.outcome.failures[sample] = cause
            self.failed += 1
        elif self.job.split and self.job.count > 1:
            self.split()
        else:
            self.outcome.failures = [cause] * self.job.count

    def give_up(self) -> None:
        """The samples that are waiting fail untried."""
        cause = f"given up after {self.failed} of {self.job.count} failed"
        for sample in self.waiting:
            self.outcome.failures[sample] = cause
        self.waiting.clear()


@dataclass(eq=False)
class Request:
    """What a worker is asked."""

    number: int
    task: Task
    samples: Sequence[int]
    one_by_one: bool
    deadline: float
    limit_s: float
    """the time that ends at `deadline`"""
    started: float | None = None
    answered: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to be answered."""
        return self.answered == len(self.samples)

    def packed(self) -> bytes:
        """As a worker reads it. Raises UserError if it can't be sent."""
        task = self.task
        lists = task.lists
        if self.one_by_one:
            lists = {name: [v[i] for i in self.samples] for name, v in lists.items()}
        try:
            data = _pickled(task.job.name) + _pickled((lists, task.others, len(self.samples)))
        except Exception as error:
            name = next(
                (n for n, v in (lists | task.others).items() if not _can_be_pickled(v)), "?"
            )
            raise UserError(
                f"the argument {name!r} of the reward {task.job.name} can't be sent to a worker: "
                f"{describe(error)}"
            ) from error
        if len(data) > LARGEST:
            raise UserError(
                f"the arguments of the reward {task.job.name} take {len(data) >> 20} MiB, and at "
                f"most {LARGEST >> 20} can be sent: let it name what it needs, without **kwargs"
            )
        header = REQUEST.pack(len(data), self.number, task.job.spec, self.one_by_one)
        return header + data


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _can_be_pickled(value: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(_pickled(value))
    return False
