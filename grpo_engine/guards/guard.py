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
from dataclasses import dataclass, replace
from typing import Any

from .causes import CAUSES
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
    action: Action | None = None
    """raise_beta, stop (the run should end), or None: it only speaks"""
    since: int | None = None
    """the step at which the first cause was said, if this is of the same crash of the reward"""
    also: tuple[tuple[str, float], ...] = ()
    """(guard, value) of others that show the same first cause in this step"""

    @property
    def guards(self) -> tuple[str, ...]:
        """All guards that this line is of."""
        return self.guard, *(name for name, _ in self.also)

    def __str__(self) -> str:
        (cause, remedy), *others = self.causes[:NAMED]
        also = ", ".join(f"{name} {value:.3g}" for name, value in self.also)
        if self.since is not None and self.action is None:
            figures = f"{self.guard} {self.value:.3g}{also and f', {also}'}"
            return f"step {self.step}: also: {figures}. The cause is that of step {self.since}."
        less = ", ".join(name for name, _ in others)
        return (
            f"step {self.step}: guard {self.guard}: {self.figure} {self.value:.3g} {self.side} "
            f"{self.threshold:g}. {'Likely' if self.shown else 'Look first at'}: {cause} -> try "
            f"{remedy}.{less and f' Less likely: {less}.'}{also and f' Also: {also}.'}"
            f"{SAYS[self.action]}"
        )


class Guards:
    """All guards of a run."""

    def __init__(self, config: GuardsConfig, context: Context) -> None:
        self.config = config
        self.history = History(context, config.window)
        self._streaks: dict[str, int] = {}
        self._quiet_until: dict[str, int] = {}
        self._crash: tuple[str, int] | None = None  # the cause first named for one, and when

    def observe(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Takes a step's figures; returns the alarms of this step, most often none.

        Guards that show one and the same cause are one alarm. What was the first cause of a crash
        of the reward remains it until that is over.

        `metrics`: numbers by the names of `metrics.jsonl`; None, NaN and absent are alike. Without
        a `step` the calls are counted.
        """
        self.history.add(metrics)
        if self.history.crash() is None:
            self._crash = None
        found: dict[Any, Alarm] = {}
        for alarm in filter(None, map(self._judge, GUARDS)):
            joins = alarm.shown and alarm.action is None
            same = alarm.causes[0][0] if joins else (alarm.guard,)
            if first := found.get(same):
                alarm = replace(first, also=(*first.also, (alarm.guard, alarm.value)))
            found[same] = alarm
        return list(found.values())

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "history": self.history.state(),
            "streaks": dict(self._streaks),
            "quiet_until": dict(self._quiet_until),
            "crash": self._crash,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: the same figures give the same alarms."""
        self.history.load(state["history"])
        self._streaks = copy.copy(state["streaks"])
        self._quiet_until = copy.copy(state["quiet_until"])
        self._crash = state["crash"]

    def _judge(self, guard: Guard) -> Alarm | None:
        config, h = self.config, self.history
        threshold, (value, part) = getattr(config, guard.name), guard.read(h)
        if threshold is None or value is None:
            return None
        crossed = CROSSED[guard.side](value, threshold) and guard.when(h, config)
        streak = self._streaks[guard.key] = self._streaks.get(guard.key, 0) + 1 if crossed else 0
        if streak < (config.patience if guard.patient else 1):
            return None
        if h.step <= self._quiet_until.get(guard.key, h.step - 1):
            return None
        self._quiet_until[guard.key] = h.step + config.quiet
        causes, since = self._causes(guard)
        return Alarm(
            step=h.step,
            guard=guard.name,
            figure=guard.figure.format(part=part),
            value=value,
            side=guard.side,
            threshold=threshold,
            causes=tuple((s or CAUSES[key].name, CAUSES[key].try_first(h)) for key, s in causes),
            shown=causes[0][1] is not None,
            action=guard.action,
            since=since,
        )

    def _causes(self, guard: Guard) -> tuple[list[tuple[str, str | None]], int | None]:
        """As `guard` orders them; of a crash that has its cause, that one and when it was said."""
        h, tried = self.history, guard.tried.split()
        if self._crash is not None and self._crash[0] in tried:
            cause, said = self._crash
            seen = CAUSES[cause].seen(h) or CAUSES[cause].name
            return [(cause, seen)], said if said < h.step else None
        causes = guard.causes(h)
        if h.crash() is not None and self._crash is None and "lr" in tried:
            self._crash = causes[0][0], h.step
        return causes, None
