"""The reward for a right answer in mathematics, through math-verify."""

import math as mathlib
import re
import threading
from itertools import product
from types import ModuleType
from typing import Any

from ...errors import require
from .options import is_number, require_option, require_share, text_of

# math-verify's own default. Its clock is an alarm signal, which only the main thread may set.
TIMEOUT_S = 5
BOXED = re.compile(r"\\boxed\s*\{\s*[^\s}]")


def math(
    completions: list,
    answers: list,
    *,
    near: float = 0.0,
    near_tolerance: float = 0.05,
    format_credit: float = 0.0,
) -> list[float | None]:
    """1 where the completion's answer equals the gold one as mathematics (math-verify), else 0.

    "the answer is 42", "42" and "\\boxed{42}" are the same. A gold answer in the form of GSM8K
    counts from its "####" on; one that can't be read gives None, and so does a comparison that
    takes more than 5 s (outside the main thread there is no such limit, and a big power like
    9^9^9^9 can overrun it: call this in a process that can be killed).

    near: what a wrong number earns that lies within `near_tolerance` of the gold one, as a share
    of it (nothing is near to 0); 0.3 is usual. format_credit: what a wrong answer in a \\boxed{}
    earns, beside `near`. Both together stay below 1, the reward of a right answer.
    """
    require_share("math", "near", near)
    ok = is_number(near_tolerance) and 0 < near_tolerance < 1
    require_option("math", "near_tolerance", near_tolerance, ok, "above 0 and below 1")
    require_share("math", "format_credit", format_credit)
    most = near + format_credit
    require_option(
        "math", "near + format_credit", most, most < 1, "below 1, what a right one earns"
    )
    verifier = require("math_verify", "tasks", "the reward math")
    results: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        text = text_of(completion)
        try:
            gold = _parsed(verifier, str(answer).rpartition("####")[2].strip())
            found = _parsed(verifier, text)
            if not gold:
                results.append(None)
            elif _equal(verifier, gold, found):
                results.append(1.0)
            else:
                boxed = BOXED.search(text) is not None
                is_near = near > 0 and _near(gold, found, near_tolerance)
                results.append(near * is_near + format_credit * boxed)
        except verifier.errors.TimeoutException:
            results.append(None)
    return results


def _limit() -> int | None:
    main = threading.current_thread() is threading.main_thread()
    return TIMEOUT_S if main else None


def _parsed(verifier: ModuleType, text: str) -> list:
    try:
        return verifier.parse(text, parsing_timeout=_limit(), raise_on_error=True)
    except Exception:  # whatever a parser says of a text that is no mathematics
        return []


def _equal(verifier: ModuleType, gold: list, found: list) -> bool:
    """As math-verify's own verify, which counts a time-out as "not equal"."""
    late = None
    for pair in product(gold, found):
        try:
            if verifier.verify(*pair, timeout_seconds=_limit(), raise_on_error=True):
                return True
        except verifier.errors.TimeoutException as error:
            late = error
        except Exception:  # sympy can't compare these two
            continue
    if late is not None:
        raise late
    return False


def _near(gold: list, found: list, tolerance: float) -> bool:
    timed = require("math_verify.utils", "tasks", "the reward math").timeout(_limit())(_number)
    target, number = timed(gold), timed(found)
    if target is None or number is None:
        return False
    return abs(number - target) <= tolerance * abs(target)


def _number(parsed: list) -> float | None:
    """The first expression that is a finite real number; of an equation, its right side."""
    for item in parsed:
        value: Any = getattr(item, "rhs", item)
        try:
            number = float(value.evalf())
        except (AttributeError, TypeError, ValueError, OverflowError):
            continue
        if mathlib.isfinite(number):
            return number
    return None
