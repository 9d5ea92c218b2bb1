"""The table of guards: what each watches, when it counts, and the causes a practitioner tries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .audit import heldout_share
from .causes import CAUSES
from .config import GuardsConfig
from .history import History

Action = Literal["raise_beta", "stop"]


@dataclass(frozen=True)
class Guard:
    """One row of the table; the threshold is the field of GuardsConfig of the same name."""

    name: str
    figure: str
    """what the figure is called in the line; {part} is the part that is worst"""
    value: str | Callable[[History], float | tuple[float, str] | None]
    """a key of the metrics, or what to make of them; None: not known now, the guard is silent"""
    side: Literal["<", ">", ">="]
    """of the threshold on which it alarms"""
    tried: str
    """keys of CAUSES in the order a practitioner goes through them"""
    when: Callable[[History, GuardsConfig], bool] = lambda h, config: True
    """what must hold besides"""
    patient: bool = True
    """False: one crossing is enough, for the figure is an event or counts steps itself"""
    action: Action | None = None
    """what the loop should do about it"""

    @property
    def key(self) -> str:
        """Its own: a threshold may be that of two guards."""
        return f"{self.name}: {self.figure}"

    def read(self, h: History) -> tuple[float | None, str]:
        """The figure, and the part of it that is worst where it is one of parts."""
        found = h.get(self.value) if isinstance(self.value, str) else self.value(h)
        return found if isinstance(found, tuple) else (found, "")

    def causes(self, h: History) -> list[tuple[str, str | None]]:
        """Keys of CAUSES; those that the run's figures show first, with what is seen of them."""
        found = [(key, CAUSES[key].seen(h)) for key in self.tried.split()]
        return sorted(found, key=lambda pair: pair[1] is None)


def _ratio(figure: str, whole: Callable[[History], float | None]):
    def value(h: History) -> float | None:
        part, all_of_it = h.get(figure), whole(h)
        return None if part is None or not all_of_it else part / all_of_it

    return value


def _group_tokens(h: History) -> float | None:
    size, length = h.setting("group_size"), h.get("completion_length")
    return None if size is None or length is None else size * length


def _costs(h: History, config: GuardsConfig) -> bool:
    """Samples that agree do harm only where what they agree on is not right."""
    wrong = h.agreed_wrong()
    return config.agreed is None or (wrong is not None and wrong >= config.agreed)


def _no_gain(h: History, config: GuardsConfig) -> bool:
    return h.reward_rises() is False


def _heldout_stands(h: History, config: GuardsConfig) -> bool:
    return h.heldout_rises() is False


GUARDS = (
    Guard(
        "kl_zero",
        "steps in a row with a KL of exactly 0 after an update",
        History.kl_zeros,
        ">=",
        "reference",
        patient=False,
    ),
    Guard(
        "no_signal",
        "share of groups without signal",
        "no_signal",
        ">",
        "reward environment malformed cold lr length hard solved narrow",
    ),
    Guard(
        "reward_std",
        "reward std in groups",
        History.spread,
        "<",
        "reward environment cold lr solved",
    ),
    Guard("diversity", "unique", "unique", "<", "cold pull norm lr", when=_costs),
    Guard("entropy_low", "entropy", "entropy", "<", "cold pull norm lr", when=_costs),
    Guard(
        "entropy_rise",
        "entropy since the start",
        lambda h: h.since_start("entropy"),
        ">",
        "hot length lr norm loose",
    ),
    Guard("reward_fall", "fall of the reward", History.reward_fall, ">", "lr norm hot shift loose"),
    Guard(
        "band_fall", "fall of the reward of {part}", History.band_fall, ">", "lr norm shift loose"
    ),
    Guard("kl", "KL", "kl", ">", "lr cold length norm loose"),
    Guard("kl_part", "KL of {part}", History.worst_kl, ">", "lr cold length norm loose"),
    Guard(
        "kl_early_raise",
        "KL over its early value",
        History.kl_over_early,
        ">",
        "lr cold length norm loose",
        action="raise_beta",
    ),
    Guard(
        "kl_early_stop",
        "held-out reward flat, KL over its early value",
        History.kl_over_early,
        ">",
        "lr cold length gamed loose",
        when=_heldout_stands,
        action="stop",
    ),
    Guard(
        "kl_no_gain",
        "reward flat, rise of the KL",
        History.kl_rise,
        ">",
        "lr cold length norm loose",
        when=_no_gain,
    ),
    Guard("pull", "reward flat, KL's pull", History.pull, ">", "pull lr", when=_no_gain),
    Guard("clip", "share of tokens clipped", "clip_region", ">", "stale lr routes"),
    Guard(
        "grad_norm",
        "gradient norm over its median",
        History.norm_over_median,
        ">",
        "cold pull length lr norm",
    ),
    Guard(
        "length_rise",
        "length since the start",
        lambda h: h.since_start("completion_length"),
        ">",
        "length loops lr",
    ),
    Guard(
        "length_fall",
        "length since the start",
        lambda h: h.since_start("completion_length"),
        "<",
        "short lr loose",
    ),
    Guard("length_pay", "correlation of reward and length", "reward_length", ">", "length"),
    Guard(
        "length_pay", "correlation of reward and shortness", History.short_pays, ">", "cut short"
    ),
    Guard("repetition", "repetition", "repetition", ">", "cold length lr loops gamed"),
    Guard(
        "effective_group",
        "effective over full group size",
        _ratio("effective_group_size", lambda h: h.setting("group_size")),
        "<",
        "environment invalid cut",
    ),
    Guard("truncated", "share of completions cut", "truncated", ">", "length loops lr cut"),
    Guard("invalid", "share of samples without a reward", "invalid", ">", "environment invalid"),
    Guard(
        "no_attempt",
        "share of completions that are {part}",
        History.no_attempts,
        ">",
        "lr short loops cold hot",
    ),
    Guard("logp_gap", "sampler and trainer apart by", "logp_gap", ">", "routes stale"),
    Guard(
        "price",
        "groups' worth of tokens for one with signal",
        _ratio("tokens_per_signal_group", _group_tokens),
        ">",
        "reward environment malformed cold lr hard solved narrow",
    ),
    Guard(
        "hacking",
        "held-out gain over training gain",
        lambda h: heldout_share(h.evaluations(), h.reward_noise()),
        "<",
        "length loops gamed",
        patient=False,
    ),
    Guard(
        "regression_fall",
        "fall of the regression set",
        History.regression_fall,
        ">",
        "lr loose",
        patient=False,
    ),
)
