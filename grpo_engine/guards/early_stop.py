"""Stops a run whose held-out reward has stopped rising, and knows the step that was best."""

from math import isfinite
from typing import Any

from ..errors import UserError
from .config import StopConfig


class EarlyStop:
    """Counts evaluations without gain; usable beside any loop that evaluates."""

    def __init__(self, config: StopConfig) -> None:
        self.config = config
        self.best_step: int | None = None
        """the step whose checkpoint is worth keeping; None before the first evaluation"""
        self.best: float | None = None
        """the mean held-out reward there"""
        self.without_gain = 0
        """evaluations since then"""

    def observe(self, step: int, eval_reward: float) -> bool:
        """Takes one evaluation; says whether to stop: `early_stop.evaluations` brought no gain.

        A gain is above the best so far by more than `early_stop.min_gain`, so that the best is
        the first of equals. Raises UserError for a reward that is not finite.
        """
        if not isfinite(eval_reward):
            raise UserError(
                f"the held-out reward of step {step} is {eval_reward}: no held-out task got a "
                "reward; look at the reward function and at data.eval_path"
            )
        if self.best is None or eval_reward > self.best + self.config.min_gain:
            self.best_step, self.best, self.without_gain = step, eval_reward, 0
        else:
            self.without_gain += 1
        return self.exhausted

    @property
    def exhausted(self) -> bool:
        """Whether it is time to stop."""
        return self.config.evaluations is not None and self.without_gain >= self.config.evaluations

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"best_step": self.best_step, "best": self.best, "without_gain": self.without_gain}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self.best_step, self.best = state["best_step"], state["best"]
        self.without_gain = state["without_gain"]
