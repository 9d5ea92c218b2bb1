"""Values over the steps of a run, given as {step: value}.

A schedule begins at step 0; the steps are those of the optimiser, the first of which is 1, so a
value for 0 is that of the beginning. Numbers and shares go in straight lines from one given step
to the next and stay at the last value; what has nothing in between holds until the next step.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

from ..errors import UserError

T = TypeVar("T")
SMALLEST_GROUP, LARGEST_GROUP = 2, 64


def hold(schedule: Mapping[int, T], step: int) -> T:
    """The value of the last given step that is not after `step`."""
    return schedule[_around(schedule, step)[0]]


def interpolate(schedule: Mapping[int, float], step: int) -> float:
    """The value at `step` on the straight line between the given steps around it."""
    return interpolate_all({at: [value] for at, value in schedule.items()}, step)[0]


def interpolate_all(schedule: Mapping[int, Sequence[float]], step: int) -> list[float]:
    """The same for several numbers at once, shares for one."""
    before, after = _around(schedule, step)
    if before == after:
        return list(schedule[before])
    way = (step - before) / (after - before)
    pairs = zip(schedule[before], schedule[after], strict=True)
    return [a + (b - a) * way for a, b in pairs]


def check_schedule(
    key: str, schedule: Mapping[int, Any], wanted: str, holds: Callable[[Any], bool]
) -> None:
    """UserError naming `key` if its steps are no schedule or a value is not what is `wanted`."""
    for step, value in schedule.items():
        if type(step) is not int or step < 0:
            raise UserError(
                f"{key} has a value for step {step!r}: steps are whole numbers from 0 on, as in "
                f"{key}: {{0: ..., 100: ...}}"
            )
        if not holds(value):
            raise UserError(f"{key} must be {wanted}; given {value!r} for step {step}")
    if 0 not in schedule:
        first = f"at {min(schedule)}" if schedule else "nowhere"
        raise UserError(f"{key} begins {first}: give the value for step 0 too")


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    return _is_number(value) and value > 0


def is_share(value: Any) -> bool:
    """A number between 0 and 1."""
    return _is_number(value) and 0 <= value <= 1


def are_shares(values: Any, count: int) -> bool:
    """So many numbers, none negative, with the sum 1."""
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(map(is_share, values))
        and abs(sum(values) - 1) < 1e-6
    )


def is_group_size(value: Any) -> bool:
    """A whole number that a group may have of samples."""
    return type(value) is int and SMALLEST_GROUP <= value <= LARGEST_GROUP


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _around(schedule: Mapping[int, Any], step: int) -> tuple[int, int]:
    """The given steps between which `step` lies; twice the same where nothing changes."""
    steps = sorted(schedule)
    after = bisect_right(steps, step)
    if after == 0:
        raise ValueError(f"step {step} is before the schedule, which begins at {steps[0]}")
    return steps[after - 1], steps[min(after, len(steps) - 1)]
