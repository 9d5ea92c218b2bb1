"""Named ways to sample, and which sample of a group is drawn in which way."""

from collections.abc import Sequence
from dataclasses import dataclass

from .randomness import apportion, generator


@dataclass(frozen=True)
class Setting:
    """One way to draw a sample; the rest of sampling.* stays as it is."""

    temperature: float
    """above 0; the loss divides the logits of a sample by its own"""
    top_p: float = 1.0
    """nucleus sampling; 1.0: off"""
    share: float = 1.0
    """of the samples of a group; the shares of a mixture sum to 1"""


# Practice: wide at first, narrow late. Usual temperatures: early 1.2 to 1.4, mid 1.0 to 1.1. The
# settings of `mixed` have the top_p of mid and early.
PRESETS: dict[str, tuple[Setting, ...]] = {
    "early": (Setting(1.3, 0.98),),
    "mid": (Setting(1.0, 0.95),),
    "late": (Setting(0.85, 0.9),),
    "mixed": (Setting(1.0, 0.95, 0.6), Setting(1.3, 0.98, 0.4)),
}


def draw_settings(mixture: Sequence[Setting], group_size: int, seed: int, step: int) -> list[int]:
    """The setting of each sample of a group, as its number in `mixture`; [group_size].

    Every group has the shares as nearly as whole numbers allow; what is left over goes to another
    setting from step to step, so that the mean over the steps is that of the shares. All groups of
    a step may have the same list: each is a whole mixture.
    """
    chance = generator("settings", seed, step)
    counts = apportion([setting.share for setting in mixture], group_size, chance)
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    return chance.permutation(numbers).tolist()
