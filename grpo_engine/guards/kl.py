"""The weight of the KL from step to step: fixed, decaying, or held to a target."""

from math import isfinite
from typing import Any

from ..errors import UserError
from .config import KlConfig

# The error of a step is clipped to this share of the target (Ziegler et al. 2019, section 2.2).
MOST_ERROR = 0.2


class KlController:
    """Says the beta of each step.

    What the mode says is multiplied by a factor that adaptation and `raise_beta` move, kept within
    `kl.least` and `kl.most`. From Python: `loss = ... + control.beta(step) * kl`, then
    `control.observe(kl)`; with TRL set `trainer.beta` in a callback.
    """

    def __init__(self, config: KlConfig, beta: float) -> None:
        if beta == 0 and config.mode != "fixed":
            raise UserError(
                f"kl.mode {config.mode} moves the weight of the KL, and loss.beta is 0: set "
                "loss.beta above 0, or kl.mode fixed"
            )
        self.config, self._beta = config, beta
        self._factor = 1.0

    def beta(self, step: int) -> float:
        """The weight in step `step`; 1 is the first step, which has loss.beta itself."""
        config = self.config
        if config.mode != "decay":
            return self._beta * self._factor
        gone = min(1.0, max(0, step - 1) / config.over)
        return (self._beta + (config.final - self._beta) * gone) * self._factor

    def observe(self, kl: float) -> None:
        """Takes the mean KL of a step, nats a token; one that is not finite teaches nothing.

        adaptive: the proportional controller of Ziegler et al. 2019, "Fine-Tuning Language Models
        from Human Preferences", section 2.2.
        """
        if self.config.mode == "adaptive" and isfinite(kl):
            error = kl / self.config.target - 1
            self._scale(1 + self.config.rate * min(MOST_ERROR, max(-MOST_ERROR, error)))

    def raise_beta(self) -> None:
        """What a guard asks for when the KL runs away: beta times `kl.raise_by`, up to the bound.

        In mode adaptive the target still holds, and brings beta down again when the KL is below it.
        """
        self._scale(self.config.raise_by)

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"factor": self._factor}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._factor = state["factor"]

    def _scale(self, by: float) -> None:
        self._factor = min(self.config.most, max(self.config.least, self._factor * by))
