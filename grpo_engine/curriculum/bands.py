"""How hard a task is for the policy as it is now: the running pass rate of its groups."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

Band = Literal["easy", "medium", "hard"]
BANDS: tuple[Band, ...] = get_args(Band)


@dataclass(frozen=True)
class TaskRecord:
    """What the groups of one task have shown."""

    rate: float | None = None
    """running mean of the share of right samples; None before the first valid one"""
    groups: int = 0
    """groups with a valid sample"""
    solved: int = 0
    """groups in a row, up to the last, whose valid samples were all right"""
    cause: str | None = None
    """why the last group failed that did: all_wrong, truncated, ..."""


class PassRates:
    """Running pass rates; only tasks that have been seen take room.

    `easy_at`, `hard_at`: pass rates from which on, and down to which, a task is easy or hard.
    `newest_weight`: of the newest group in the running mean; the first group sets it.
    """

    def __init__(
        self, easy_at: float = 0.8, hard_at: float = 0.2, newest_weight: float = 0.5
    ) -> None:
        self.easy_at, self.hard_at, self.newest_weight = easy_at, hard_at, newest_weight
        self._records: dict[int, TaskRecord] = {}
        self._outside: dict[Band, set[int]] = {"easy": set(), "hard": set()}

    def update(
        self,
        task: int,
        rewards: Sequence[float | None],
        correct_at: float,
        cause: str | None = None,
    ) -> None:
        """Adds a group of `task`.

        `rewards`: of its samples, by what decides whether an answer is right and not by a sum that
        other rewards lift; one that is None or not finite is no sign of difficulty and is
        left out. A group without any other leaves the rate alone. `correct_at`: the reward from
        which on a sample is right. `cause`: why the group failed, None if it did not; the last one
        is kept.
        """
        valid = [reward for reward in rewards if reward is not None and isfinite(reward)]
        old = self.record(task)
        rate, groups, solved = old.rate, old.groups, old.solved
        if valid:
            passed = sum(reward >= correct_at for reward in valid) / len(valid)
            rate = passed if rate is None else rate + self.newest_weight * (passed - rate)
            groups, solved = groups + 1, solved + 1 if passed == 1 else 0
        self._set(task, TaskRecord(rate, groups, solved, old.cause if cause is None else cause))

    def record(self, task: int) -> TaskRecord:
        """What is known of a task."""
        return self._records.get(task, TaskRecord())

    def band(self, task: int) -> Band:
        """Its band now; a task that has not been seen is medium."""
        rate = self.record(task).rate
        if rate is None:
            return "medium"
        if rate >= self.easy_at:
            return "easy"
        return "hard" if rate <= self.hard_at else "medium"

    def outside(self, band: Literal["easy", "hard"]) -> Collection[int]:
        """The tasks of a band other than medium."""
        return self._outside[band]

    def counts(self, tasks: int) -> dict[Band, int]:
        """Tasks per band, of so many in all."""
        easy, hard = len(self._outside["easy"]), len(self._outside["hard"])
        return {"easy": easy, "medium": tasks - easy - hard, "hard": hard}

    def causes(self) -> dict[str, int]:
        """Tasks per last cause of failure."""
        found = Counter(record.cause for record in self._records.values())
        return {cause: count for cause, count in found.items() if cause is not None}

    def state(self) -> dict[str, Any]:
        """Plain values for `load`: a row [task, rate, groups, solved, cause] for each task seen."""
        return {"tasks": [[task, *vars(r).values()] for task, r in self._records.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; the bands follow the thresholds as they are now."""
        self._records.clear()
        for tasks in self._outside.values():
            tasks.clear()
        for task, *record in state["tasks"]:
            self._set(task, TaskRecord(*record))

    def _set(self, task: int, record: TaskRecord) -> None:
        self._records[task] = record
        for tasks in self._outside.values():
            tasks.discard(task)
        band = self.band(task)
        if band != "medium":
            self._outside[band].add(task)
