"""Rewards that fell from their best, beyond what the noise of a step explains."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any

BEST_OF = 5  # steps whose mean may become the best
NOW = 3  # steps whose mean stands for now
REMEMBERED = 10  # steps, enough to know their noise
CERTAIN = 3  # standard errors that make a fall


class Falls:
    """Follows rewards by name: the whole's, and each difficulty band's."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}

    def follow(self, rewards: Mapping[str, float]) -> None:
        """Takes a step's rewards. The first counts as a best: it is what was there before."""
        for name, value in rewards.items():
            kept = self._kept.setdefault(name, {"last": [], "best": value})
            kept["last"] = [*kept["last"], value][-REMEMBERED:]
            if len(kept["last"]) >= BEST_OF:
                kept["best"] = max(kept["best"], fmean(kept["last"][-BEST_OF:]))

    def fall(self, name: str) -> float | None:
        """From the best to the mean of the last steps; 0 if noise alone may have made it."""
        kept = self._kept.get(name)
        if kept is None or len(kept["last"]) < NOW:
            return None
        fall = kept["best"] - self.now(name)
        error = noise(kept["last"]) * sqrt(1 / NOW + 1 / BEST_OF)
        return fall if fall > CERTAIN * error else 0.0

    def best(self, name: str) -> float:
        """The best mean so far."""
        return self._kept[name]["best"]

    def now(self, name: str) -> float:
        """Mean of the last steps."""
        return fmean(self._kept[name]["last"][-NOW:])

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return self._kept

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._kept = state


def noise(x: Sequence[float]) -> float:
    """Standard deviation of a step, from the differences of neighbours: a trend hardly moves it."""
    return sqrt(sum((b - a) ** 2 for a, b in pairwise(x)) / (2 * len(x) - 2))
