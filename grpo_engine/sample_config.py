"""How samples are drawn, paid and counted, as frozen dataclasses: what `groups` and `rewards` take.

They check themselves when they are made, so they serve without a run config as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from types import NoneType
from typing import Any, Literal, get_args

from .curriculum.presets import PRESETS, Setting
from .errors import UserError
from .paths import expand_home
from .rollout import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """What is made of one number of a reward function, in this order, before it is summed."""

    weight: float = 1.0
    """its factor in the sum"""
    bounds: list[float] | None = None
    """[least, most]: scaled so that these are 0 and 1, and cut there"""
    per_tokens: int | None = None
    """divided by length / per_tokens where the completion is longer: a length-normalised reward"""
    scale: Literal["none", "batch", "group"] = "none"
    """z-score over the valid samples of the step, or of the group"""
    gate: float | None = None
    """a hard gate: below this the total is scoring.floor, whatever else was earned"""
    valid_from: float | None = None
    """below this the sample is invalid: a format that it must have to count at all"""
    decides: bool = False
    """it says whether an answer is right: groups.correct_at and low_at are in its units, after
    bounds and before weight and length, and a failed gate makes it scoring.floor. With none named
    the only reward decides, or the only one of math, exact, fuzzy, python_tests, reasoning_gym"""

    def __post_init__(self) -> None:
        for key in fields(self):
            if getattr(self, key.name) is None and NoneType not in get_args(key.type):
                raise UserError(f"rewards: {key.name} can't be null; leave it out for its default")
        for name in ("weight", "gate", "valid_from"):
            check_finite("rewards: " + name, getattr(self, name))
        check_pair(self.bounds, "rewards: bounds", float("-inf"), float("inf"))
        if self.per_tokens is not None and self.per_tokens < 1:
            raise UserError(f"rewards: per_tokens must be at least 1; given {self.per_tokens}")


@dataclass(frozen=True)
class RewardConfig(ComponentConfig):
    """One reward function of the weighted sum; its keys hold for each of its components."""

    function: str
    """a built-in (grpo train --rewards.help), file.py:name or package.module:name"""
    name: str | None = None
    """in the record; null: the function's"""
    options: dict[str, Any] = field(default_factory=dict)
    """keyword arguments of the function"""
    components: dict[str, ComponentConfig] = field(default_factory=dict)
    """other keys for single components of a function that returns a dict"""
    timeout_s: float = 10.0
    """of a call in a worker; afterwards the samples are tried one by one, each with this time"""
    isolate: bool | None = None
    """run in a killable process; null: all but reward models and built-ins that can't hang"""
    compares: bool = False
    """it compares samples of a step, so that a call that failed can't be split"""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_home(self, "rewards", "function")
        if not 0 < self.timeout_s < float("inf"):
            raise UserError(
                f"rewards: timeout_s must be finite and above 0; given {self.timeout_s}"
            )

    def component(self, name: str | None) -> ComponentConfig:
        """The keys of a component; None: of a function that returns plain numbers."""
        return self if name is None else self.components.get(name, self)


@dataclass(frozen=True)
class ScoringConfig:
    """From components to the reward that the statistics see."""

    aggregate: Literal["sum", "normalize_then_sum"] = "sum"
    """sum: weighted; normalize_then_sum: each component is normalised in its group first (GDPO)"""
    renormalize: Literal["none", "batch", "group"] = "none"
    """normalise once more after normalize_then_sum; GDPO's paper does so over the batch"""
    floor: float = 0.0
    """total of a sample that failed a gate"""
    clip_percentiles: list[float] | None = None
    """[5, 95]: totals are cut to these percentiles of a running window; not for rewards of 0 and 1:
    a right answer that is rarer than the percentile would be cut to a wrong one"""
    clip_window: int = 1024
    """valid samples in that window"""
    rank: bool = False
    """totals are replaced by their rank in the group, from -1 to 1, ties sharing theirs"""
    workers: int = 2
    """processes that run reward functions"""
    calls_per_worker: int | None = 1000
    """calls of functions after which a worker gives way to a new one, so that what they leak or
    keep in globals does not live for the run; null: never"""
    max_failed: float = 0.5
    """a share of failed reward calls in a step above which the run stops"""

    def __post_init__(self) -> None:
        check_pair(self.clip_percentiles, "scoring.clip_percentiles", 0, 100)
        for name, least in (("clip_window", 2), ("workers", 1), ("calls_per_worker", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(
                    f"scoring.{name} must be at least {least}; given {getattr(self, name)}"
                )
        if not 0 <= self.max_failed <= 1:
            raise UserError(f"scoring.max_failed must be between 0 and 1; given {self.max_failed}")
        check_finite("scoring.floor", self.floor)
        if self.renormalize != "none" and self.aggregate == "sum":
            raise UserError(
                "scoring.renormalize is for aggregate normalize_then_sum: a plain sum is "
                "normalised once, by loss.scale_rewards"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """How a group is sampled; vLLM's names."""

    group_size: int = 8
    """TRL's default"""
    temperature: float = 1.0
    """TRL's default; the loss divides the logits by the same temperature"""
    top_p: float = 1.0
    """nucleus sampling; 1.0: off"""
    top_k: int = 0
    """0: off"""
    min_p: float = 0.0
    """0: off"""
    repetition_penalty: float = 1.0
    """1.0: off"""
    max_tokens: int = 256
    """of a completion"""
    stop: list[str] = field(default_factory=list)
    """strings that end a completion"""
    ignore_eos: bool = False
    """every completion is of max_tokens, whatever it says: for measurements"""
    preset: Literal["early", "mid", "late", "mixed"] | None = None
    """temperature and top_p by name (curriculum/presets.py), in place of those here"""

    def __post_init__(self) -> None:
        most = float("inf")
        for name, holds, wanted in (
            ("group_size", self.group_size >= 2, "at least 2: an advantage is relative to it"),
            ("temperature", 0 < self.temperature < most, "finite and above 0: at 0 all are equal"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "not negative"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < most, "finite and above 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "without empty strings, which would end every answer"),
        ):
            if not holds:
                raise UserError(f"sampling.{name} must be {wanted}; given {getattr(self, name)}")
        plain = (self.temperature, self.top_p) == (1.0, 1.0)
        if self.preset is not None and not plain:
            raise UserError(
                f"sampling.preset {self.preset} says temperature and top_p: leave those out, or it"
            )

    def settings(self) -> list[Setting]:
        """The ways in which the samples of a group are drawn; more than one: by their shares."""
        if self.preset is not None:
            return list(PRESETS[self.preset])
        return [Setting(self.temperature, self.top_p)]

    def params(self, setting: Setting, seed: int) -> SamplingParams:
        """What the sampler gets for one of them."""
        return SamplingParams(
            setting.temperature,
            setting.top_p,
            self.top_k,
            self.min_p,
            self.repetition_penalty,
            self.max_tokens,
            tuple(self.stop),
            self.ignore_eos,
            seed,
        )


@dataclass(frozen=True)
class GroupsConfig:
    """Which samples and groups count."""

    truncated: Literal["mask", "drop", "keep", "penalty", "downweight", "resample"] = "mask"
    """samples cut before their end: in the statistics but not in the loss (DAPO); neither; both;
    both, with a lower reward; both, with a smaller advantage; drawn again, then as mask. A held-out
    answer that was cut is right under keep alone"""
    truncated_penalty: float = 0.5
    """taken off the reward under `penalty`"""
    truncated_weight: float = 0.5
    """factor of the advantage under `downweight`"""
    truncated_rounds: int = 2
    """draws in place of a truncated sample under `resample`"""
    invalid: list[Literal["empty", "repetition"]] = field(default_factory=list)
    """completions that leave the statistics and the loss whatever their reward: empty ones, and
    those that repeat a few tokens over and over; by default they keep the reward they were given"""
    invalid_reward: float | None = None
    """a reward with which invalid samples stay; null: they leave"""
    env_failed_reward: float | None = None
    """the same for samples whose environment failed"""
    low_at: float = 0.0
    """up to this number of the reward that decides a sample is called low, and an answer wrong; low
    ones stay: the contrast"""
    correct_at: float = 1.0
    """from this number of the reward that decides on an answer is right"""
    no_signal: Literal["skip", "keep", "resample", "downweight"] = "skip"
    """groups without signal: no advantage, and no forward if loss.beta is 0; keep those whose
    spread is only below loss.min_std; further prompts are drawn in their place; kept with a smaller
    advantage"""
    no_signal_weight: float = 0.5
    """factor of the advantage under `downweight`"""
    most_extra: float = 3.0
    """further prompts under `resample`, at most so many times train.prompts_per_step"""

    @property
    def cut_counts(self) -> bool:
        """Whether a held-out answer that was cut before its end may be right."""
        return self.truncated == "keep"

    def __post_init__(self) -> None:
        for name in ("truncated_weight", "no_signal_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"groups.{name} must be between 0 and 1; given {getattr(self, name)}"
                )
        for name in ("truncated_penalty", "most_extra"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(
                    f"groups.{name} must be finite and not negative; given {getattr(self, name)}"
                )
        if self.truncated_rounds < 1:
            raise UserError(
                f"groups.truncated_rounds must be at least 1; given {self.truncated_rounds}"
            )
        for name in ("invalid_reward", "env_failed_reward"):
            check_finite(f"groups.{name}", getattr(self, name))
        if not self.low_at < self.correct_at:
            raise UserError(
                f"groups.low_at must be below groups.correct_at; given {self.low_at} and "
                f"{self.correct_at}"
            )


def check_finite(name: str, value: float | None) -> None:
    """Raises UserError unless `value` is None or a finite number."""
    if value is not None and not isfinite(value):
        raise UserError(f"{name} must be finite; given {value}")


def check_pair(pair: Sequence[float] | None, name: str, least: float, most: float) -> None:
    """Raises UserError unless `pair` is None or [low, high] in order and in range."""
    if pair is None:
        return
    if len(pair) != 2 or not least <= pair[0] < pair[1] <= most or not all(map(isfinite, pair)):
        raise UserError(f"{name} must be [low, high], finite, low below high; given {pair}")
