"""Watches the figures of every step, and says in one line what is wrong and what to try first.

Plain Python on a dict of figures, so any loop can use it:

    guards = Guards(GuardsConfig(), Context(temperature=1.0, beta=0.04, lr=1e-5))
    for alarm in guards.observe({"step": 1, "reward": 0.3, "kl": 0.01, "unique": 0.9}):
        print(alarm)

With TRL, call `observe` from a callback's `on_log`, its names put into ours: `frac_reward_zero_std`
is `no_signal`, `completions/mean_length` is `completion_length`. A guard whose figure is missing
is silent.
"""

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import GuardsConfig
from .history import Context, History
from .rules import GUARDS, Action, Guard

NAMED = 4  # causes in a line
CROSSED = {"<": operator.lt, ">": operator.gt, ">=": operator.ge}
SAYS = {
    None: "",
    "raise_beta": " Beta is raised.",
    "stop": " The run stops.",
}


@dataclass(frozen=True)
class Alarm:
    """What a guard says; `str` is the line."""

    step: int
    guard: str
    """its name, which is its key in the config"""
    figure: str
    value: float
    side: str
    threshold: float
    causes: tuple[tuple[str, str], ...]
    """(cause, what to try): first those that the run's figures show, then in a practitioner's
    order"""
    shown: bool
    """whether the figures show the first cause"""
    action: Action | None
    """raise_beta, stop (the run should end), or None: it only speaks"""

    def __str__(self) -> str:
        (cause, remedy), *others = self.causes[:NAMED]
        return (
            f"step {self.step}: guard {self.guard}: {self.figure} {self.value:.3g} {self.side} "
            f"{self.threshold:g}. {'Likely' if self.shown else 'Look first at'}: {cause} -> try "
            f"{remedy}{''.join(f'; then {name}' for name, _ in others)}.{SAYS[self.action]}"
        )


class Guards:
    """All guards of a run."""

    def __init__(self, config: GuardsConfig, context: Context) -> None:
        self.config = config
        self.history = History(context, config.window)
        self._streaks: dict[str, int] = {}
        self._quiet_until: dict[str, int] = {}

    def observe(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Takes a step's figures; returns the alarms of this step, most often none.

        `metrics`: numbers by the names of `metrics.jsonl`; None, NaN and absent are alike. Without
        a `step` the calls are counted.
        """
        self.history.add(metrics)
        return [alarm for guard in GUARDS if (alarm := self._judge(guard)) is not None]

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "history": self.history.state(),
            "streaks": dict(self._streaks),
            "quiet_until": dict(self._quiet_until),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: the same figures give the same alarms."""
        self.history.load(state["history"])
        self._streaks = copy.copy(state["streaks"])
        self._quiet_until = copy.copy(state["quiet_until"])

    def _judge(self, guard: Guard) -> Alarm | None:
        config, h = self.config, self.history
        threshold, (value, part) = getattr(config, guard.name), guard.read(h)
        if threshold is None or value is None:
            return None
        crossed = CROSSED[guard.side](value, threshold) and guard.when(h, config)
        streak = self._streaks[guard.name] = self._streaks.get(guard.name, 0) + 1 if crossed else 0
        if streak < (config.patience if guard.patient else 1):
            return None
        if h.step <= self._quiet_until.get(guard.name, h.step - 1):
            return None
        self._quiet_until[guard.name] = h.step + config.quiet
        causes = guard.causes(h)
        return Alarm(
            step=h.step,
            guard=guard.name,
            figure=guard.figure.format(part=part),
            value=value,
            side=guard.side,
            threshold=threshold,
            causes=tuple((seen or cause.name, cause.try_first(h)) for cause, seen in causes),
            shown=causes[0][1] is not None,
            action=guard.action,
        )
