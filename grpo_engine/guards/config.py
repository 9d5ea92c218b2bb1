"""Options of the guards, of the KL's weight over the steps, and of the early stop."""

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from ..errors import UserError

SHARES = (
    "no_signal diversity agreed clip length_pay effective_group repetition truncated invalid "
    "no_attempt"
).split()
LEAST_WINDOW = 6  # a trend of fewer steps is noise


@dataclass(frozen=True)
class GuardsConfig:
    """What the guards watch for; a threshold of null switches that guard off.

    Defaults that name a run were measured on the quickstart: three healthy runs of 100 steps, and
    each collapse. The others are what the figure means or what practitioners go by.
    """

    patience: int = 3
    """steps in a row beyond a threshold before a guard speaks: k3 and the gradient norm spike for
    single steps in healthy runs as well"""
    quiet: int = 50
    """steps a guard keeps still after it spoke"""
    window: int = 20
    """steps over which medians and trends are taken"""

    no_signal: float | None = 0.9
    """above: share of groups that teach nothing; at 0.9 a gradient costs ten times its tokens"""
    reward_std: float | None = 0.001
    """below: mean standard deviation of the rewards within a group, as a share of the largest mean
    reward so far; noise of a float or of a judge is not a difference"""
    diversity: float | None = 0.25
    """below: share of distinct completions in a group, where groups agree on what is not right; two
    of eight. Quickstart: 0.30 and up over 200 healthy steps, 0.16 to 0.23 at temperature 0.2"""
    agreed: float | None = 0.1
    """share of groups that agree on what is not right from which diversity and entropy_low count;
    null: always, also where the tasks are simply solved"""
    entropy_low: float | None = 0.05
    """below: mean entropy of a token, nats, where groups agree on what is not right; sampling is
    all but greedy"""
    entropy_rise: float | None = 2.0
    """above: entropy as a multiple of its early value; the policy comes apart"""
    reward_fall: float | None = 0.5
    """above: fall of the reward from its best, as a share of that; a curriculum that draws harder
    prompts lowers it too"""
    band_fall: float | None = 0.5
    """above: the same for each difficulty band, as a share of the best band's best"""
    kl: float | None = 1.0
    """above: mean KL, nats a token: sampled tokens are e times likelier than under the reference"""
    kl_part: float | None = 3.0
    """above: the same for one length, task or band; a part is noisier than the whole"""
    kl_zero: int | None = 3
    """steps in a row with a KL of exactly 0 after an update at half the peak learning rate or more;
    the smaller ones of a warm-up may be rounded away"""
    kl_early_raise: float | None = None
    """above: KL as a multiple of its early value (steps 5 to 20, at least 1e-4); beta is raised. 10
    is the practice, and off, for where steps 5 to 20 lie in a warm-up a healthy run crosses it: on
    the quickstart with a warm-up of 600 steps at step 29, and it is 48 to 98-fold at 80 to 150"""
    kl_early_stop: float | None = None
    """above: the same while the held-out reward does not rise; the run stops. 5 is the practice;
    off for the same reason"""
    kl_no_gain: float | None = 0.1
    """above: rise of the KL inside the window, nats a token, while the reward does not rise"""
    pull: float | None = 0.5
    """above: force of the KL beside that of the advantages while the reward does not rise; at 1
    they are in balance and the policy goes no further"""
    clip: float | None = 0.3
    """above: share of tokens clipped; PPO practice is below 0.2"""
    grad_norm: float | None = 10.0
    """above: gradient norm as a multiple of its running median, where train.max_grad_norm clips"""
    length_rise: float | None = 2.0
    """above: completion length as a multiple of its early value"""
    length_fall: float | None = 0.5
    """below: the same"""
    length_pay: float | None = 0.8
    """above: correlation of reward and length, or shortness, inside groups; two thirds of the
    reward's variance is then length"""
    repetition: float | None = 0.4
    """above: share of repeated 4-grams in a completion; prose has below 0.1, a loop nearly 1"""
    effective_group: float | None = 0.5
    """below: samples in the statistics as a share of the group"""
    truncated: float | None = 0.5
    """above: share of completions cut by max_tokens"""
    invalid: float | None = 0.2
    """above: share of samples without a reward"""
    no_attempt: float | None = 0.2
    """above: share of completions that are empty, or of those that only repeat a few tokens"""
    logp_gap: float | None = 0.1
    """above: mean difference of the sampler's and the trainer's log-probs, nats; bfloat16 gives
    0.01 to 0.04, and 0.1 moves a ratio half way to the clip range"""
    price: float | None = 20.0
    """above: tokens sampled for a group with signal, in groups' worth of tokens"""
    hacking: float | None = 0.1
    """below: gain of the held-out reward as a share of the gain of the training reward, over the
    last seven evaluations, at least 20 steps; judged where training gained a fifth, and more than
    two standard errors"""
    regression_fall: float | None = 0.1
    """above: fall of the regression set's mean reward below its first evaluation"""

    def __post_init__(self) -> None:
        for name, least in (("patience", 1), ("window", LEAST_WINDOW), ("kl_zero", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"guards.{name} must be at least {least}; given {value}")
        for name in SHARES:
            value = getattr(self, name)
            if value is not None and value > 1:
                raise UserError(f"guards.{name} is a share and can't be above 1; given {value}")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(
                    f"guards.{field.name} must be finite and not negative, or null to switch the "
                    f"guard off; given {value}"
                )


@dataclass(frozen=True)
class KlConfig:
    """The weight of the KL over the steps; loss.beta is where it starts."""

    mode: Literal["fixed", "decay", "adaptive"] = "fixed"
    """loss.beta throughout (DeepSeekMath), a line from it to `final`, or up and down with the KL"""
    final: float | None = None
    """decay: the weight at the end of the line"""
    over: int | None = None
    """decay: steps until then"""
    target: float = 0.1
    """adaptive: KL to hold, nats a token; a healthy quickstart has 0.1 to 0.2"""
    rate: float = 0.1
    """adaptive: gain of the controller (Ziegler et al. 2019); at most 2 % of beta a step"""
    least: float = 0.1
    """beta never falls below so many times what the mode says without the controller"""
    most: float = 10.0
    """nor rises above so many times that, by the controller or a guard"""
    raise_by: float = 2.0
    """factor on beta when a guard raises it"""

    def __post_init__(self) -> None:
        checks = {
            "mode": (self.mode in ("fixed", "decay", "adaptive"), "fixed, decay or adaptive"),
            "final": (self.final is None or 0 <= self.final < float("inf"), "at least 0"),
            "over": (self.over is None or self.over >= 1, "at least 1"),
            "target": (0 < self.target < float("inf"), "finite and above 0"),
            "rate": (0 < self.rate <= 1, "above 0 and at most 1"),
            "least": (0 < self.least <= 1, "above 0 and at most 1"),
            "most": (1 <= self.most < float("inf"), "finite and at least 1"),
            "raise_by": (1 < self.raise_by < float("inf"), "finite and above 1"),
        }
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise UserError(f"kl.{name} must be {wanted}; given {getattr(self, name)!r}")
        for name in ("final", "over"):
            given = getattr(self, name) is not None
            if given != (self.mode == "decay"):
                raise UserError(
                    f"kl.{name} goes with kl.mode decay, which is {self.mode}: leave it out"
                    if given
                    else f"kl.mode decay needs kl.{name}: give kl.final and kl.over"
                )


@dataclass(frozen=True)
class StopConfig:
    """When a run ends before its last step."""

    evaluations: int | None = 3
    """means of so many evaluations in a row are compared: when a run has gained and then three
    times as many bring no mean above the best, it ends, with exit code 3; null: never"""
    min_gain: float = 0.0
    """what counts as a gain over the best"""

    def __post_init__(self) -> None:
        if self.evaluations is not None and self.evaluations < 1:
            raise UserError(
                f"early_stop.evaluations must be at least 1, or null; given {self.evaluations}"
            )
        if not (isfinite(self.min_gain) and self.min_gain >= 0):
            raise UserError(
                f"early_stop.min_gain must be finite and not negative; given {self.min_gain}"
            )
