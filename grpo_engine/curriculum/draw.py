"""Which tasks a step gets: shuffled epochs, or shares of easy, medium and hard ones."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from .bands import BANDS, Band, PassRates
from .config import CurriculumConfig
from .randomness import apportion, generator

# Who fills the places of a band that has too few tasks: the nearest, and for medium the hard ones.
LENDERS: tuple[Band, ...] = ("medium", "hard", "easy")
NEVER = -1


class Stream(Protocol):
    """An endless sequence of task numbers, epoch after epoch, such as data.TaskStream."""

    def take(self, position: int, count: int) -> list[int]:
        """The tasks at `position` to `position + count`."""


@dataclass(frozen=True)
class Drawn:
    """A task for one group, and its band when it was drawn."""

    task: int
    band: Band


@dataclass(frozen=True)
class Draw:
    """What one round of a step draws; it has not happened before it is committed."""

    prompts: list[Drawn]
    passed: list[int] = field(default_factory=list)
    """tasks passed over in this step up to now, as always solved: they had their turn"""
    positions: int = 0
    """of the stream that were used up"""


class PromptDraw:
    """Draws the prompts of each step, as a function of the seed, the step and what was committed.

    Without `config.shares` they are the stream's, in its order. With shares the places of a step
    are split over the bands of `rates`, and within a band who waits longest comes first. A task
    that is always solved may be passed over when its turn comes (`config.solved_drawn`), unless
    nothing else is left.
    """

    def __init__(
        self,
        tasks: int,
        seed: int,
        config: CurriculumConfig,
        rates: PassRates,
        stream: Stream | None = None,
    ) -> None:
        """`stream`: needed without shares. Raises ValueError if it is missing or `tasks` is 0."""
        if tasks < 1 or (config.shares is None and stream is None):
            raise ValueError("PromptDraw needs at least one task, and without shares a stream")
        self.tasks, self.seed, self.config = tasks, seed, config
        self.rates, self.stream = rates, stream
        self.position = 0
        self._turn = np.full(tasks, NEVER)  # [tasks] step of the last turn

    def draw(self, step: int, count: int, earlier: Sequence[Draw] = ()) -> Draw:
        """`count` prompts for `step`; changes nothing, see `commit`.

        `earlier`: the draws made for this step before, where more prompts are wanted. None of
        their tasks comes again, so there may be fewer than `count`. In the first draw a task comes
        twice only if there are fewer than `count`, or where an epoch of the plain stream ends.
        """
        if self.config.shares is None and self.config.solved_drawn == 1 and not earlier:
            return Draw(self._drawn(self.stream.take(self.position, count)), [], count)
        chance = generator("prompts", self.seed, step, len(earlier))
        round_ = _Round(earlier, lambda task: self._passes_over(task, chance))
        looked_at = 0
        if self.config.shares is None:
            start = self.position + sum(draw.positions for draw in earlier)
            looked_at = round_.take(self._two_epochs(start), count)
        else:
            queues = self._queues(chance)
            quotas = apportion(self.config.shares_at(step), count, chance)
            for band, quota in zip(BANDS, quotas, strict=True):
                round_.take(queues[band], quota)
            for band in LENDERS:
                round_.take(queues[band], count - len(round_.tasks))
        tasks, passed = round_.fill_up(count)
        if not earlier:
            tasks = list(islice(cycle(tasks), count))  # more places than tasks
        return Draw(self._drawn(tasks), passed, looked_at)

    def commit(self, step: int, draws: Sequence[Draw]) -> None:
        """The draws of a step have been used: their tasks had their turn."""
        self.position += sum(draw.positions for draw in draws)
        for draw in draws if self.config.shares is not None else []:
            self._turn[[*(prompt.task for prompt in draw.prompts), *draw.passed]] = step

    def state(self) -> dict[str, Any]:
        """Plain values for `load`.

        `position` in the stream; with shares, `turns`: [task, step of its last turn] for each.
        """
        had = np.flatnonzero(self._turn != NEVER)
        turns = np.stack([had, self._turn[had]], axis=1)
        return {"position": self.position, "turns": turns.tolist()}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self.position = state["position"]
        self._turn[:] = NEVER
        for task, step in state["turns"]:
            self._turn[task] = step

    def _drawn(self, tasks: Iterable[int]) -> list[Drawn]:
        return [Drawn(task, self.rates.band(task)) for task in tasks]

    def _passes_over(self, task: int, chance: np.random.Generator) -> bool:
        solved = self.rates.record(task).solved >= self.config.solved_after
        return solved and chance.random() >= self.config.solved_drawn

    def _two_epochs(self, start: int) -> Iterator[int]:
        """From `start` on in the stream: so many that each task is among them."""
        for position in range(start, start + 2 * self.tasks):
            yield self.stream.take(position, 1)[0]

    def _queues(self, chance: np.random.Generator) -> dict[Band, Iterator[int]]:
        """The tasks of each band, who waits longest first; ties in shuffled order."""
        order = np.lexsort((chance.permutation(self.tasks), self._turn))
        band_of = np.full(self.tasks, BANDS.index("medium"))
        for band in ("easy", "hard"):
            members = self.rates.outside(band)
            band_of[np.fromiter(members, dtype=int, count=len(members))] = BANDS.index(band)
        bands = band_of[order]
        return {band: map(int, order[bands == i]) for i, band in enumerate(BANDS)}


class _Round:
    """A draw in the making. No task is looked at twice in a step."""

    def __init__(self, earlier: Sequence[Draw], passes_over: Callable[[int], bool]) -> None:
        self.tasks: list[int] = []
        self.passed = list(earlier[-1].passed) if earlier else []
        self._seen = {prompt.task for draw in earlier for prompt in draw.prompts} | {*self.passed}
        self._passes_over = passes_over

    def take(self, queue: Iterator[int], count: int) -> int:
        """Draws `count` tasks from the queue, or all it has; returns how far it went in it."""
        wanted, looked_at = len(self.tasks) + count, 0
        while len(self.tasks) < wanted:
            task = next(queue, None)
            if task is None:
                break
            looked_at += 1
            if task not in self._seen:
                self._seen.add(task)
                (self.passed if self._passes_over(task) else self.tasks).append(task)
        return looked_at

    def fill_up(self, count: int) -> tuple[list[int], list[int]]:
        """Tasks drawn, and passed over: of these the first are drawn where places are left."""
        left = count - len(self.tasks)
        return self.tasks + self.passed[:left], self.passed[left:]
