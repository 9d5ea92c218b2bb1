"""Causes that a guard may name: what in a run shows each of them, and what to try first."""

from collections.abc import Callable
from dataclasses import dataclass

from .history import History

LOW_TEMPERATURE, HIGH_TEMPERATURE = 0.5, 1.5
STRONG_PULL = 0.5
NORM_JUMP = 10.0
LENGTH_PAYS = 0.8
CONSTANT_FROM = 3  # steps of one and the same reward
MOST = 0.5  # of groups without signal, of completions
SOME = 0.2  # of samples without a reward, of repeated n-grams


@dataclass(frozen=True)
class Cause:
    """One row of the table."""

    name: str
    """as it stands in a line behind likelier ones"""
    remedy: str
    """what to try; {names} are filled in by `try_first`"""
    seen: Callable[[History], str | None] = lambda h: None
    """a sentence if the run's figures show this cause, else None"""

    def try_first(self, h: History) -> str:
        """The remedy, with the run's own settings in it where they are known."""
        lr, beta, tokens = h.context.lr, h.setting("beta"), h.setting("max_tokens")
        temperature = h.setting("temperature") or 1.0
        return self.remedy.format(
            lr="a tenth of it" if lr is None else f"{lr / 10:g}",
            less_beta="a tenth of it" if beta is None else f"{beta / 10:g}",
            more_beta="twice as much" if not beta else f"{2 * beta:g}",
            warmer=f"{temperature + 0.2 if temperature >= 1 else 1:.1f}",
            cooler=f"{1 if temperature > 1 else 0.8 * temperature:.1f}",
            max_tokens="twice as many" if tokens is None else f"{2 * tokens:g}",
        )


def _one_reward(h: History) -> str | None:
    reward = h.never_differed()
    if reward is None or h.steps() < CONSTANT_FROM:
        return None
    return f"the reward was {reward:.3g} for every sample so far"


def _groups(cause: str, words: str) -> Callable[[History], str | None]:
    def seen(h: History) -> str | None:
        share = h.cause_share(cause)
        return f"{share:.0%} of the groups without signal {words}" if share >= MOST else None

    return seen


def _cold(h: History) -> str | None:
    value = h.setting("temperature")
    return f"temperature {value:g} is low" if value and value < LOW_TEMPERATURE else None


def _hot(h: History) -> str | None:
    value = h.setting("temperature")
    return f"temperature {value:g} is high" if value and value > HIGH_TEMPERATURE else None


def _pulled(h: History) -> str | None:
    pull = h.pull()
    if pull is None or pull < STRONG_PULL:
        return None
    return f"KL coefficient {h.setting('beta'):g} pulls {pull:.2g} times as hard as the advantages"


def _crashed(h: History) -> str | None:
    if (crash := h.crash()) is None:
        return None
    before, after, steps = crash
    lr, default = h.context.lr, h.context.default_lr
    which = "learning rate" + (f" {lr:g}" if lr else "")
    if lr and default:
        which += f" (default {default:g})"
    took = f"{steps} step{'s' if steps > 1 else ''}"
    return f"{which}: the reward fell from {before:.2g} to {after:.2g} in {took}"


def _norm_jumped(h: History) -> str | None:
    times = h.norm_over_median()
    if times is None or times < NORM_JUMP or h.crash():  # after a crash it only follows
        return None
    return f"gradient norm {h.get('grad_norm'):.3g} is {times:.0f} times its median"


def _length_pays(h: History) -> str | None:
    r = h.get("reward_length")
    if r is None or r < LENGTH_PAYS:
        return None
    return f"the reward pays for length (correlation {r:.2f} inside groups)"


def _shortness_pays(h: History) -> str | None:
    r = h.get("reward_length")
    if r is None or r > -LENGTH_PAYS:
        return None
    return f"the reward pays for shortness (correlation {r:.2f} inside groups)"


def _share(figure: str, least: float, words: str) -> Callable[[History], str | None]:
    def seen(h: History) -> str | None:
        share = h.get(figure)
        return f"{share:.0%} of {words}" if share is not None and share > least else None

    return seen


def _follows(h: History) -> str | None:
    if not h.kl_zeros():
        return None
    return "the reference follows the policy, or every update is rounded away"


CAUSES = {
    "reward": Cause(
        "a reward that tells nothing apart",
        "grpo doctor, and the reward function on two answers of which one is right",
        _one_reward,
    ),
    "environment": Cause(
        "a failing environment",
        "the environment alone: it must answer before training can",
        _groups("environment", "had a failing environment"),
    ),
    "malformed": Cause(
        "malformed answers",
        "going back to a supervised cold start on the format",
        _groups("all_malformed", "are all malformed"),
    ),
    "hard": Cause(
        "tasks too hard",
        "easier prompts, or a larger sampling.group_size",
        _groups("all_wrong", "are all wrong"),
    ),
    "solved": Cause("tasks solved", "harder prompts", _groups("all_correct", "are all correct")),
    "narrow": Cause(
        "rewards nearly equal",
        "a reward with partial credit, or a lower loss.min_std",
        _groups("low_variance", "have rewards that are nearly equal"),
    ),
    "cold": Cause("temperature", "sampling.temperature {warmer}", _cold),
    "hot": Cause("temperature", "sampling.temperature {cooler}", _hot),
    "pull": Cause("KL coefficient", "loss.beta {less_beta}", _pulled),
    "loose": Cause("KL coefficient", "loss.beta {more_beta}, or kl.mode adaptive"),
    "lr": Cause("learning rate", "train.lr {lr}", _crashed),
    "norm": Cause("gradient norm", "a lower train.max_grad_norm, then train.lr {lr}", _norm_jumped),
    "length": Cause(
        "a reward that pays for length",
        "a length penalty, or a length-normalised reward",
        _length_pays,
    ),
    "short": Cause("a reward that pays for shortness", "a weaker length penalty", _shortness_pays),
    "cut": Cause(
        "completions cut by max_tokens",
        "sampling.max_tokens {max_tokens}",
        _share("truncated", MOST, "the completions are cut by max_tokens"),
    ),
    "invalid": Cause(
        "samples without a reward",
        "the states and causes in the rollouts: time-outs, errors, NaN",
        _share("invalid", SOME, "the samples got no reward"),
    ),
    "loops": Cause(
        "repetition",
        "sampling.repetition_penalty 1.1",
        _share("repetition", SOME, "the 4-grams are repetitions"),
    ),
    "gamed": Cause("a reward that can be gamed", "reading the audit's highest-rewarded samples"),
    "shift": Cause("a harder mix of prompts", "comparing reward_by_band with the mix drawn"),
    "stale": Cause("samples reused too often", "train.num_iterations 1"),
    "routes": Cause(
        "sampler and trainer that compute differently",
        "model.dtype float32 for a few steps: the gap must vanish",
    ),
    "reference": Cause(
        "a reference that follows the policy",
        "a reference that is a frozen copy, model.dtype float32, or a larger train.lr",
        _follows,
    ),
}
