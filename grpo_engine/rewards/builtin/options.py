"""Checks that the built-in rewards make of their options, and the text of a completion."""

import math
from collections.abc import Collection
from typing import Any

from ...errors import UserError


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion or prompt; of chat messages, that of the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def require_option(function: str, option: str, value: Any, ok: bool, meaning: str) -> None:
    """UserError that names the option unless `ok`."""
    if not ok:
        raise UserError(f"rewards: {function}: {option} must be {meaning}; given {value!r}")


def is_number(value: Any) -> bool:
    """A finite int or float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_int(value: Any) -> bool:
    """An int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_share(function: str, option: str, value: Any) -> None:
    """UserError unless it is a number from 0 to 1."""
    ok = is_number(value) and 0 <= value <= 1
    require_option(function, option, value, ok, "between 0 and 1")


def require_int(function: str, option: str, value: Any, least: int) -> None:
    """UserError unless it is an integer of at least `least`."""
    ok = is_int(value) and value >= least
    require_option(function, option, value, ok, f"an integer of at least {least}")


def require_bool(function: str, option: str, value: Any) -> None:
    """UserError unless it is true or false."""
    require_option(function, option, value, isinstance(value, bool), "true or false")


def require_choice(function: str, option: str, value: Any, choices: Collection[str]) -> None:
    """UserError unless it is one of `choices`."""
    require_option(function, option, value, value in choices, f"one of {', '.join(choices)}")
