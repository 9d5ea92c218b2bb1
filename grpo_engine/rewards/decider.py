"""Which reward says whether an answer is right, where there are several."""

from collections.abc import Iterator, Sequence

from ..errors import UserError
from .load import Reward

ANSWER_CHECKS = "math exact fuzzy python_tests reasoning_gym".split()


def find_decider(rewards: Sequence[Reward]) -> str | None:
    """The component that decides: the one that is named, the only reward, or the only built-in that
    checks answers; None where no rule says which. UserError if several are named."""
    named = [name for reward in rewards for name in _named(reward)]
    if len(named) > 1:
        raise UserError(
            f"rewards: {' and '.join(named)} have decides: true; leave it to the one that says "
            "whether an answer is right"
        )
    checks = [reward.name for reward in rewards if reward.config.function in ANSWER_CHECKS]
    for found in (named, [reward.name for reward in rewards], checks):
        if len(found) == 1:
            return found[0]
    return None


def _named(reward: Reward) -> Iterator[str]:
    if reward.config.decides:
        yield reward.name
    for part, config in reward.config.components.items():
        if config.decides:
            yield f"{reward.name}.{part}"
