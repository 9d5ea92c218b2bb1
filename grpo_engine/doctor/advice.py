"""First guesses at group size and temperature from a pilot: plain rules on its figures."""

from collections.abc import Iterator, Sequence
from math import isnan

from .pilot import Pilot

SIZES = (4, 8, 16, 32)
ENOUGH = 0.9  # of the best price: the smaller group is then taken, for it is the quicker step
STEP = 0.2  # of a temperature: presets are about so far apart
TEMPERATURES = (0.6, 1.4)  # beyond these training is rarely sound
# Shares at which guards.diversity, .truncated and .invalid speak.
FEW_UNIQUE, MANY_TRUNCATED, MANY_INVALID = 0.3, 0.5, 0.2


def signal_chance(rate: float, size: int) -> float:
    """The chance that a group has both right and wrong answers: 1 - p^G - (1 - p)^G."""
    return 1.0 - rate**size - (1.0 - rate) ** size


def prices(
    rates: Sequence[float], prompt: float, completion: float, sizes: Sequence[int] = SIZES
) -> dict[int, float]:
    """Tokens for a group with signal, by group size; empty if no prompt has mixed answers.

    rates: pass rate of each prompt. prompt, completion: mean tokens; a group pays for its prompt
    once. Without the prompt, the smallest size would always win: chance / G falls with G.
    """
    found = {}
    for size in sizes:
        chance = sum(signal_chance(rate, size) for rate in rates) / max(1, len(rates))
        if chance > 0:
            found[size] = (prompt + size * completion) / chance
    return found


def group_size(by_size: dict[int, float]) -> int | None:
    """The smallest size whose price is within ENOUGH of the best; None without prices."""
    if not by_size:
        return None
    best = min(by_size.values())
    return min(size for size, price in by_size.items() if best >= ENOUGH * price)


def temperature(now: float, unique: float, truncated: float, invalid: float) -> float | None:
    """Up where samples are alike, down where many are broken or cut; None where both are so.

    unique, truncated, invalid: shares; NaN: not known.
    """
    alike = unique < FEW_UNIQUE
    broken = truncated > MANY_TRUNCATED or invalid > MANY_INVALID
    if alike and broken:
        return None
    low, high = TEMPERATURES
    if alike:
        return max(now, min(high, now + STEP))
    return min(now, max(low, now - STEP)) if broken else now


def advice_lines(pilot: Pilot, size: int, now: float, correct_at: float) -> Iterator[str]:
    """size, now: group size and temperature of the pilot."""
    yield f"group size  {_size_text(pilot, size, correct_at)}"
    yield f"temperature {_temperature_text(pilot, now)}"


def _size_text(pilot: Pilot, size: int, correct_at: float) -> str:
    by_size = prices(pilot.pass_rates, pilot.prompt_mean, pilot.length_mean)
    best = group_size(by_size)
    if best is None:
        return (
            f"{size}, no other guess: no prompt had both right and wrong answers (right: a reward "
            f"of groups.correct_at {correct_at:g})"
        )
    table = ", ".join(f"{g}: {price:,.0f}" for g, price in by_size.items())
    return f"{best} as a first guess (now {size}); expected tokens for a group with signal {table}"


def _temperature_text(pilot: Pilot, now: float) -> str:
    guess = temperature(now, pilot.unique, pilot.truncated, pilot.invalid)
    unique = "unknown" if isnan(pilot.unique) else f"{pilot.unique:.0%}"
    figures = f"distinct {unique}, truncated {pilot.truncated:.0%}, malformed {pilot.invalid:.0%}"
    if guess is None:
        return f"{now:g}, no other guess: samples are alike and broken at once ({figures})"
    if guess == now:
        return f"{now:g} may stay ({figures})"
    reason = "samples are alike" if guess > now else "too many are broken or cut"
    return f"{guess:.2g} as a first guess (now {now:g}): {reason} ({figures})"
