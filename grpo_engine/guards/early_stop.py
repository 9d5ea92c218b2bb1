"""Stops a run whose held-out reward has stopped rising, and knows the step that was best."""

from math import isfinite, sqrt
from statistics import fmean
from typing import Any

from ..errors import UserError
from .config import StopConfig
from .falls import noise

PATIENCE = 3  # in units of `evaluations`; with 2, half the runs that gain slowly would be ended


class EarlyStop:
    """Compares means of evaluations in a row; usable beside any loop that evaluates."""

    def __init__(self, config: StopConfig) -> None:
        self.config = config
        self.best_step: int | None = None
        """the step whose checkpoint is worth keeping; None before the first evaluation"""
        self.best: float | None = None
        """the mean held-out reward there"""
        self.rewards: list[float] = []
        """[evaluations] so far"""

    def observe(self, step: int, eval_reward: float) -> bool:
        """Takes one evaluation; says whether to stop.

        The best is the first of equals, and what is not above it by more than
        `early_stop.min_gain` is equal. Raises UserError for a reward that is not finite.
        """
        if not isfinite(eval_reward):
            raise UserError(
                f"the held-out reward of step {step} is {eval_reward}: no held-out task got a "
                "reward; look at the reward function and at data.eval_path"
            )
        self.rewards.append(eval_reward)
        if self.best is None or eval_reward > self.best + self.config.min_gain:
            self.best_step, self.best = step, eval_reward
        return self.exhausted

    @property
    def without_gain(self) -> int:
        """Evaluations since the mean of the last `evaluations` was the best such mean.

        0 before a first gain, so that a task that is too hard to show anything yet is given time:
        until all of the best are above the first mean, and theirs by more than the standard error
        of the difference.
        """
        window = self.config.evaluations
        if window is None or len(self.rewards) < window:
            return 0
        means = [
            fmean(self.rewards[first : first + window])
            for first in range(len(self.rewards) - window + 1)
        ]
        best = 0
        for i, mean in enumerate(means):
            if mean > means[best] + self.config.min_gain:
                best = i
        if min(self.rewards[best : best + window]) <= means[0]:
            return 0
        gained = means[best] - means[0] > noise(self.rewards) * sqrt(2 / window)
        return len(means) - 1 - best if gained else 0

    @property
    def exhausted(self) -> bool:
        """Whether it is time to stop."""
        window = self.config.evaluations
        return window is not None and self.without_gain >= PATIENCE * window

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"best_step": self.best_step, "best": self.best, "rewards": self.rewards}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self.best_step, self.best = state["best_step"], state["best"]
        self.rewards = list(state["rewards"])
