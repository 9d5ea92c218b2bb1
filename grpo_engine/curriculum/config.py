"""The sections curriculum, variants, anchors and replay of a run; all are off by default."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..errors import UserError
from .presets import PRESETS, Setting
from .schedules import (
    LARGEST_GROUP,
    SMALLEST_GROUP,
    are_shares,
    check_schedule,
    hold,
    interpolate,
    interpolate_all,
    is_group_size,
    is_positive,
    is_share,
)
from .variants import check_templates

MOST_ANCHORS = 0.1
SOLVED_SHARE = 0.25

Numbers = dict[int, float]
Names = dict[int, str]
Sizes = dict[int, int]
Shares = dict[int, list[float]]


@dataclass(frozen=True)
class CurriculumConfig:
    """What changes over the steps, given as {step: value} from step 0 on, and which tasks come."""

    temperature: Numbers | None = None
    """in straight lines between the given steps, as in {0: 1.2, 100: 1.0}; wins over the preset's
    and over sampling.temperature; null: theirs"""
    preset: Names | None = None
    """early, mid, late or mixed, each until the next given step; wins over sampling.temperature and
    sampling.top_p; null: those"""
    mixture: list[Setting] | None = None
    """settings of the preset mixed and their shares of a group; null: 60 % at temperature 1.0, 40 %
    at 1.3"""
    group_size: Sizes | None = None
    """2 to 64 samples a group, each until the next given step; wins over sampling.group_size.
    Practice is 4 to 32: {0: 16, 100: 8}"""
    shares: Shares | None = None
    """shares of easy, medium and hard tasks among the prompts of a step, in straight lines between
    the given steps, as in {0: [0, 0.8, 0.2], 100: [0.2, 0.3, 0.5]}; null: tasks come in shuffled
    epochs whatever their band"""
    easy_at: float = 0.8
    """running pass rate from which on a task is easy"""
    hard_at: float = 0.2
    """running pass rate down to which a task is hard; one not seen yet is medium"""
    newest_weight: float = 0.5
    """of a task's newest group in its running pass rate; ours: about the last two or three groups
    count, and the policy moves on"""
    solved_after: int = 3
    """groups in a row whose samples are all right make a task count as always solved"""
    solved_share: float | None = None
    """share of its turns at which such a task is drawn all the same; null: 0.25 with shares, and
    without them every turn, so that an epoch is an epoch"""

    def __post_init__(self) -> None:
        self._check_schedules()
        self._check_mixture()
        for name in ("easy_at", "hard_at"):
            value = getattr(self, name)
            _check(f"curriculum.{name}", is_share(value), "from 0 to 1", value)
        if self.hard_at >= self.easy_at:
            raise UserError(
                "curriculum.hard_at must be below curriculum.easy_at; given "
                f"{self.hard_at} and {self.easy_at}"
            )
        weight = self.newest_weight
        holds = is_share(weight) and weight > 0
        _check("curriculum.newest_weight", holds, "above 0 and at most 1", weight)
        share = self.solved_share
        holds = share is None or is_share(share)
        _check("curriculum.solved_share", holds, "from 0 to 1, or null", share)
        after = self.solved_after
        _check("curriculum.solved_after", after >= 1, "at least 1", after)

    def settings_at(self, step: int, base: Sequence[Setting]) -> list[Setting]:
        """The settings of a step's samples; more than one: see `draw_settings`.

        `base`: what holds where the curriculum says nothing, that is sampling.*.
        """
        if self.preset is None:
            settings = list(base)
        else:
            name = hold(self.preset, step)
            settings = list(PRESETS[name])
            if name == "mixed" and self.mixture is not None:
                settings = list(self.mixture)
        if self.temperature is not None:
            settings = [replace(settings[0], temperature=interpolate(self.temperature, step))]
        return settings

    def group_size_at(self, step: int, base: int) -> int:
        """Samples of a group at a step; `base` where the curriculum says nothing."""
        return base if self.group_size is None else hold(self.group_size, step)

    def shares_at(self, step: int) -> list[float] | None:
        """Shares of easy, medium and hard tasks at a step; None: the bands don't matter."""
        return None if self.shares is None else interpolate_all(self.shares, step)

    @property
    def solved_drawn(self) -> float:
        """`solved_share` with its default resolved."""
        if self.solved_share is not None:
            return self.solved_share
        return 1.0 if self.shares is None else SOLVED_SHARE

    def _check_schedules(self) -> None:
        names = ", ".join(PRESETS)
        sizes = f"a whole number from {SMALLEST_GROUP} to {LARGEST_GROUP}"
        three = "three shares, of easy, medium and hard, none negative, with the sum 1"
        for name, wanted, holds in (
            ("temperature", "finite and above 0", is_positive),
            ("preset", f"one of {names}", PRESETS.__contains__),
            ("group_size", sizes, is_group_size),
            ("shares", three, lambda v: are_shares(v, 3)),
        ):
            schedule = getattr(self, name)
            if schedule is not None:
                check_schedule(f"curriculum.{name}", schedule, wanted, holds)

    def _check_mixture(self) -> None:
        mixed = self.preset is not None and "mixed" in self.preset.values()
        if mixed and self.temperature is not None:
            raise UserError(
                "curriculum.temperature and the preset mixed both say the temperature: leave out "
                "one, or give curriculum.mixture the temperatures"
            )
        if self.mixture is None:
            return
        if not mixed:
            raise UserError(
                "curriculum.mixture is for the preset mixed: add curriculum.preset: {0: mixed}, or "
                "leave out the mixture"
            )
        for setting in self.mixture:
            holds = is_positive(setting.temperature)
            _check("curriculum.mixture: temperature", holds, "above 0", setting.temperature)
            holds = is_share(setting.top_p) and setting.top_p > 0
            _check("curriculum.mixture: top_p", holds, "above 0 and at most 1", setting.top_p)
        shares = [setting.share for setting in self.mixture]
        holds = are_shares(shares, len(shares))
        _check("curriculum.mixture: the shares", holds, "at least 0, with the sum 1", shares)


@dataclass(frozen=True)
class VariantsConfig:
    """Other wordings of the prompts; all samples of a group share one, and it is recorded."""

    templates: list[str] = field(default_factory=list)
    """texts with {prompt} in them, one drawn for each group; for chat prompts they wrap the last
    user message. They replace the plain prompt: add "{prompt}" to keep it among them"""
    column: str | None = None
    """column of the data with rewordings of the prompt, a string or a list, drawn beside it"""

    def __post_init__(self) -> None:
        check_templates(self.templates)


@dataclass(frozen=True)
class AnchorsConfig:
    """Deliberately wrong samples: they enter a group's statistics, never the loss."""

    share: float = 0.0
    """of a step's samples, at most 0.1 and at most one sample a group; practice is 0.05 to 0.1;
    0: off"""
    column: str | None = None
    """column of the data with wrong answers, a string or a list; null: the answer of another task
    that differs"""

    def __post_init__(self) -> None:
        holds = is_share(self.share) and self.share <= MOST_ANCHORS
        _check("anchors.share", holds, f"from 0 to {MOST_ANCHORS}", self.share)


@dataclass(frozen=True)
class ReplayConfig:
    """Old samples: they never join a current group and get no advantage."""

    mode: Literal["none", "kl", "clone"] = "none"
    """kl: hold the policy to the reference on them; clone: raise the log-probs of the right ones
    (behaviour cloning)"""
    share: float = 0.25
    """old samples of a step as a share of its new ones; ours"""
    weight: float = 0.1
    """factor of their term in the loss; ours: small beside the policy's gradient"""
    steps: int = 8
    """generations that are kept"""
    most_age: int = 16
    """updates of the policy after which a sample is too old"""

    def __post_init__(self) -> None:
        _check("replay.share", is_positive(self.share), "finite and above 0", self.share)
        _check("replay.weight", is_positive(self.weight), "finite and above 0", self.weight)
        for name in ("steps", "most_age"):
            value = getattr(self, name)
            _check(f"replay.{name}", value >= 1, "at least 1", value)


def _check(key: str, holds: bool, wanted: str, value: object) -> None:
    if not holds:
        raise UserError(f"{key} must be {wanted}; given {value}")
