"""What the guards remember of a run: a few figures of past steps, and what follows from them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, median
from typing import Any, SupportsFloat

from .audit import Evaluation
from .falls import Falls, noise

START = 5  # steps whose mean is what a figure was at the start
EARLY = range(5, 21)  # steps whose mean KL is its early value
EARLY_FLOOR = 1e-4
TREND_LEAST = 6  # steps from which a trend is judged
CRASH = 0.5  # fall of the reward that, inside a window, is a crash
EVALUATIONS = 7  # the last so many are compared
SERIES = ("reward", "kl", "grad_norm")
AT_START = ("completion_length", "entropy", "reward_std")
KL_BY_PART = ("kl_by_length", "kl_by_task", "kl_by_band")
TOKEN_MEANS = ("kl", "entropy", "logp_gap", "clip_region", "advantage_abs")


@dataclass(frozen=True)
class Context:
    """Settings that a cause may lie in; what a step's metrics say of them holds before this.

    What is left None is unknown: a cause that needs it has no evidence.
    """

    temperature: float | None = None
    beta: float | None = None
    lr: float | None = None
    """the peak"""
    default_lr: float | None = None
    """what this kind of training starts from; said beside a rate that did harm"""
    max_tokens: int | None = None
    group_size: int | None = None
    max_grad_norm: float = 0.0
    """a gradient of up to this norm is not clipped, and no jump of it does harm"""


class History:
    """Takes a step's metrics, and answers what a guard or a cause asks about the run so far."""

    def __init__(self, context: Context, window: int) -> None:
        self.context, self.window = context, window
        self.now: dict[str, Any] = {}
        """figures of this step that are there and finite"""
        self.step = 0
        self.falls = Falls()
        self._kept: dict[str, Any] = {
            "steps": 0,
            "series": {name: [] for name in SERIES},
            "start": {name: [] for name in AT_START},
            "early_kl": [],
            "largest": 0.0,
            "spread_seen": False,
            "moved": False,
            "kl_zeros": 0,
            "high_at": None,
            "crash": None,
            "evaluations": [],
            "regression_first": None,
        }

    def add(self, metrics: Mapping[str, Any]) -> None:
        """The figures of a step, whose samples were drawn before its update."""
        kept = self._kept
        kept["steps"] += 1
        self.step = int(metrics.get("step", kept["steps"]))
        self.now = _present(metrics)
        for name in SERIES:
            kept["series"][name] = [*kept["series"][name], *self._one(name)][-self.window :]
        for name in AT_START:
            kept["start"][name] = [*kept["start"][name], *self._one(name)][:START]
        if self.step in EARLY:
            kept["early_kl"] += self._one("kl")
        kept["largest"] = max(kept["largest"], abs(self.now.get("reward", 0.0)))
        kept["spread_seen"] |= self.now.get("reward_std", 0.0) > 0
        self._count_zeros()
        self._follow_falls()
        self._follow_evaluations()

    def steps(self) -> int:
        """How many were added."""
        return self._kept["steps"]

    def get(self, name: str) -> float | None:
        """This step's figure, or None."""
        return self.now.get(name)

    def setting(self, name: str) -> float | None:
        """A setting as this step had it, else as the run was given it."""
        return self.now.get(name, getattr(self.context, name))

    def since_start(self, name: str) -> float | None:
        """This step's figure as a multiple of its mean over the first steps."""
        start = self._kept["start"][name]
        if name not in self.now or len(start) < START or fmean(start) <= 0:
            return None
        return self.now[name] / fmean(start)

    def over_median(self, name: str) -> float | None:
        """This step's figure as a multiple of its median over the steps before."""
        before = self._kept["series"][name][:-1]
        if name not in self.now or len(before) < START or median(before) <= 0:
            return None
        return self.now[name] / median(before)

    def norm_over_median(self) -> float | None:
        """Of a norm that is clipped; where nearly all is solved the median is almost 0."""
        if self.now.get("grad_norm", 0.0) <= self.context.max_grad_norm:
            return None
        return self.over_median("grad_norm")

    def kl_over_early(self) -> float | None:
        """This step's KL as a multiple of its early value, once that is known."""
        early = self._kept["early_kl"]
        if self.step < EARLY.stop or not early or "kl" not in self.now:
            return None
        return self.now["kl"] / max(EARLY_FLOOR, fmean(early))

    def kl_rise(self) -> float | None:
        """Rise of the KL inside the window, medians of its halves, once all of it is past EARLY."""
        x = self._kept["series"]["kl"]
        if "kl" not in self.now or len(x) < TREND_LEAST or self.step < EARLY.stop + self.window - 1:
            return None
        half = len(x) // 2
        return median(x[-half:]) - median(x[:half])

    def reward_rises(self) -> bool | None:
        """Whether the later half of the window is above the earlier by twice the standard error."""
        x = self._kept["series"]["reward"]
        if len(x) < TREND_LEAST:
            return None
        half = len(x) // 2
        return fmean(x[-half:]) - fmean(x[:half]) > 2 * noise(x) * sqrt(2 / half)

    def spread(self) -> float | None:
        """Mean standard deviation inside the groups, in units of the largest mean reward so far."""
        std = self.now.get("reward_std")
        return None if std is None else std / (self._kept["largest"] or 1.0)

    def never_differed(self) -> float | None:
        """The one reward that every sample of the run got so far, or None."""
        rewards = set(self._kept["series"]["reward"])
        if self._kept["spread_seen"] or "reward_std" not in self.now or len(rewards) != 1:
            return None
        return rewards.pop()

    def pull(self) -> float | None:
        """Force of the KL on a sample beside that of its advantage.

        With advantage A the policy that the loss leads to is reference * exp(A / beta), which is
        sqrt(2 KL) = std(A) / beta away for a small KL of the sequence: so at
        beta * sqrt(2 KL) / |A| = 1 the two forces balance. |A| is that of groups with signal.
        """
        names = ("kl", "advantage_abs", "no_signal", "completion_length")
        beta, given = self.setting("beta"), [self.now.get(name) for name in names]
        if beta is None or None in given:
            return None
        kl, advantage, no_signal, length = given
        if advantage <= 0 or no_signal >= 1:
            return None
        return beta * sqrt(2 * max(0.0, kl) * length) * (1 - no_signal) / advantage

    def cause_share(self, cause: str) -> float:
        """Share of one cause among this step's groups without signal; 0 where nothing is known."""
        causes = self.now.get("no_signal_causes", {})
        return causes.get(cause, 0) / (sum(causes.values()) or 1)

    def agreed_wrong(self) -> float | None:
        """Share of groups without signal that are not simply all correct."""
        no_signal = self.now.get("no_signal")
        return None if no_signal is None else no_signal * (1 - self.cause_share("all_correct"))

    def kl_zeros(self) -> int | None:
        """Steps in a row, up to now, with a KL of exactly 0 after the weights had been moved."""
        return self._kept["kl_zeros"] if "kl" in self.now else None

    def worst_kl(self) -> tuple[float, str] | None:
        """The largest KL of a length, task or band, and its name."""
        parts = [
            (kl, f"{by.removeprefix('kl_by_')} {part}")
            for by in KL_BY_PART
            for part, kl in self.now.get(by, {}).items()
        ]
        return max(parts, default=None)

    def short_pays(self) -> float | None:
        """Correlation of reward and shortness."""
        r = self.now.get("reward_length")
        return None if r is None else -r

    def no_attempts(self) -> tuple[float, str] | None:
        """The larger share of completions that are no attempt, and what they are."""
        words = {"empty": "empty", "loops": "loops of a few tokens"}
        return max(((self.now[k], w) for k, w in words.items() if k in self.now), default=None)

    def reward_fall(self) -> float | None:
        """Fall of the reward from its best, in units of that or of the spread at the start."""
        fall, size = self.falls.fall("reward"), self._reward_size()
        return None if fall is None or size == 0 else fall / size

    def band_fall(self) -> tuple[float, str] | None:
        """The deepest fall of a band's reward, in units of the best band's best, and its name."""
        falls = {b: self.falls.fall(f"band {b}") for b in self.now.get("reward_by_band", {})}
        falls = {b: fall for b, fall in falls.items() if fall is not None}
        size = max((abs(self.falls.best(f"band {b}")) for b in falls), default=0.0)
        return max((fall / size, b) for b, fall in falls.items()) if size > 0 else None

    def crash(self) -> tuple[float, float, int] | None:
        """Reward at its best and now, and the steps it took to halve, if no more than a window."""
        if (crash := self._kept["crash"]) is None:
            return None
        return crash[0], self.falls.now("reward"), crash[1]

    def evaluations(self) -> list[Evaluation]:
        """The last ones, if this step is one; else none."""
        kept = self._kept["evaluations"] if "eval_reward" in self.now else []
        return [Evaluation(*values) for values in kept]

    def reward_noise(self) -> float:
        """Standard deviation of the mean reward of a step; infinite while there is but one."""
        x = self._kept["series"]["reward"]
        return noise(x) if len(x) > 1 else float("inf")

    def heldout_rises(self) -> bool | None:
        """Whether the last evaluation beat those kept before it; None before the second."""
        heldout = [Evaluation(*values).heldout for values in self._kept["evaluations"]]
        return heldout[-1] > max(heldout[:-1]) if len(heldout) > 1 else None

    def regression_fall(self) -> float | None:
        """Fall of the regression set below its first evaluation, if this step is an evaluation."""
        now = self.now.get("eval_regression")
        return None if now is None else self._kept["regression_first"] - now

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return copy.deepcopy({**self._kept, "falls": self.falls.state()})

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._kept = copy.deepcopy(state)
        self.falls.load(self._kept.pop("falls"))

    def _one(self, name: str) -> list[float]:
        return [self.now[name]] if name in self.now else []

    def _count_zeros(self) -> None:
        kept, now = self._kept, self.now
        if kept["moved"] and "kl" in now and (self.setting("beta") or 0) > 0:
            kept["kl_zeros"] = kept["kl_zeros"] + 1 if now["kl"] == 0 else 0
        # Equal rewards at the reference give no gradient: nothing moved, and the KL is rightly 0.
        gradient = now.get("grad_norm", 0.0) > 0 and not now.get("skipped")
        lr, peak = self.setting("lr"), self.context.lr or 0.0
        kept["moved"] |= gradient and (lr is None or (lr > 0 and lr >= peak / 2))

    def _follow_falls(self) -> None:
        bands = {f"band {b}": reward for b, reward in self.now.get("reward_by_band", {}).items()}
        reward = {"reward": self.now["reward"]} if "reward" in self.now else {}
        self.falls.follow(reward | bands)
        fall, kept = self.reward_fall(), self._kept
        if fall is None:  # of too few steps: the first shows what was there before
            kept["high_at"] = kept["high_at"] or self.step
            return
        if self.falls.now("reward") > self.falls.best("reward") - self._reward_size() * CRASH / 2:
            kept["high_at"] = self.step
        if fall < CRASH:
            kept["crash"] = None
        elif kept["crash"] is None:
            took = self.step - kept["high_at"]
            kept["crash"] = [self.falls.best("reward"), took] if took <= self.window else None

    def _reward_size(self) -> float:
        spread = self._kept["start"]["reward_std"]
        best = self.falls.best("reward") if self.falls.fall("reward") is not None else 0.0
        return max(abs(best), fmean(spread) if spread else 0.0)

    def _follow_evaluations(self) -> None:
        kept, rewards = self._kept, self._kept["series"]["reward"]
        if "eval_reward" in self.now and rewards:
            new = Evaluation(self.step, fmean(rewards), len(rewards), self.now["eval_reward"])
            kept["evaluations"] = [*kept["evaluations"], new][-EVALUATIONS:]
        if kept["regression_first"] is None:
            kept["regression_first"] = self.now.get("eval_regression")


def _present(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Finite numbers, and those of dicts, as floats; a mean over no token is no figure."""
    gone = TOKEN_MEANS if metrics.get("tokens") == 0 else ()
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found[name] = {str(k): float(v) for k, v in value.items() if _is_finite(v)}
        elif _is_finite(value) and name not in gone:
            found[name] = float(value)
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and isfinite(float(value))
