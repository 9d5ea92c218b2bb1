"""Several rewards of one thing, such as reward models, as one."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from ...errors import UserError
from .options import is_number, require_choice, require_option

Rule = Literal["mean", "min", "agree"]


def ensemble(
    members: Sequence[Callable], rule: Rule = "mean", tolerance: float = 0.0
) -> Callable[..., list[float | None]]:
    """A reward function in TRL's form that combines those of `members` by combine_members.

    A member gets the arguments it names, or all if it takes **kwargs. One that returns components
    or another number of values is a UserError.
    """
    if not members:
        raise UserError("rewards: ensemble: members must name at least one function; given none")
    check_rule(rule, tolerance)

    def combined(completions: list, **arguments: list) -> list[float | None]:
        arguments = {"completions": completions, **arguments}
        values = [list(m(**_named(m, arguments))) for m in members]
        return combine_members(values, rule, tolerance)

    return combined


def combine_members(
    values: Sequence[Sequence[float | None]], rule: Rule = "mean", tolerance: float = 0.0
) -> list[float | None]:
    """One reward per sample from the [members][samples] of an ensemble.

    mean, min: over the members that have a reward; None if none has. agree: their mean if all have
    one and these lie within `tolerance` of each other, else None. NaN or infinity of a member
    makes the sample NaN, whatever the rule.
    """
    check_rule(rule, tolerance)
    if len({len(v) for v in values}) > 1:
        counts = ", ".join(str(len(v)) for v in values)
        raise UserError(f"rewards: ensemble: the members returned {counts} values; all must be one")
    return [_combined(sample, rule, tolerance) for sample in zip(*values, strict=True)]


def check_rule(rule: Rule, tolerance: float) -> None:
    """UserError for a rule or a tolerance that is none."""
    require_choice("ensemble", "rule", rule, get_args(Rule))
    ok = is_number(tolerance) and tolerance >= 0
    require_option("ensemble", "tolerance", tolerance, ok, "a number of at least 0")
    if rule != "agree":
        meaning = "0 unless rule is agree"
        require_option("ensemble", "tolerance", tolerance, tolerance == 0, meaning)


def _named(member: Callable, arguments: dict[str, list]) -> dict[str, list]:
    parameters = inspect.signature(member).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _combined(sample: Sequence[float | None], rule: Rule, tolerance: float) -> float | None:
    if any(isinstance(v, dict) for v in sample):
        raise UserError("rewards: ensemble: a member returned components; it must return numbers")
    found = [float(v) for v in sample if v is not None]
    if not all(math.isfinite(v) for v in found):
        return math.nan
    if not found:
        return None
    if rule == "agree":
        agreed = len(found) == len(sample) and max(found) - min(found) <= tolerance
        return sum(found) / len(found) if agreed else None
    return min(found) if rule == "min" else sum(found) / len(found)
