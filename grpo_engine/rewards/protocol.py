"""What a reward function gets and may return. Imports no torch: reward workers are light."""

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .process import StepReward

# Lists over the samples that every function gets, beside one list for each column of the data.
ALWAYS_PASSED = ("prompts", "completions", "completion_ids")
# Passed to functions that name them. groups: the number of each sample's group; step is a number.
PASSED_WHEN_NAMED = ("finish_reasons", "raw_completions", "prompt_tail", "groups", "step")
RESERVED = ALWAYS_PASSED + PASSED_WHEN_NAMED


@dataclass(frozen=True)
class EnvFailed:
    """Returned for a sample whose environment failed: it is no evidence about the policy."""

    cause: str


Plain = float | None | dict[str, float | None] | list[StepReward] | EnvFailed
"""What a function may return for a sample: a number, None (not applicable), components, rewards of
steps of the completion, or that the environment failed."""


def accepted(signature: inspect.Signature, arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """TRL's rule: the core arguments and all columns by keyword; extras only where named.

    A function without **kwargs gets only what it names. Raises UserError if the function `name`
    needs what is not there.
    """
    parameters = signature.parameters
    for parameter in parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and parameter.name not in arguments:
            raise UserError(
                f"the reward {name} needs the argument {parameter.name!r}, which is neither a "
                f"column of the data nor one of {', '.join(RESERVED)}"
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: v for n, v in arguments.items() if n in parameters}
    if not takes_all:
        return named
    extras = set(PASSED_WHEN_NAMED) - set(named)
    return {n: v for n, v in arguments.items() if n not in extras}


def plain_values(values: Any, name: str, count: int) -> list[Plain]:
    """What the function `name` returned for `count` completions, as plain values.

    Raises UserError if that is no list of this length, or holds anything else.
    """
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        values = values.tolist()  # an array or a tensor
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(
            f"the reward {name} returned {type(values).__name__}; it must return a list "
            f"with one number, None or dict of components for each of the {count} completions"
        )
    if len(values) != count:
        raise UserError(
            f"the reward {name} returned {len(values)} values for {count} completions: return a "
            "list as long as completions"
        )
    return [_plain(value, name) for value in values]


def _plain(value: Any, name: str) -> Plain:
    if value is None:
        return None
    if isinstance(value, EnvFailed):
        return EnvFailed(str(value.cause))
    if isinstance(value, dict):
        return {str(part): _number(number, name) for part, number in value.items()}
    if isinstance(value, list) and all(isinstance(step, StepReward) for step in value):
        return [_plain_step(step, name) for step in value]
    return _number(value, name)


def _plain_step(step: StepReward, name: str) -> StepReward:
    try:
        start, end = operator.index(step.start), operator.index(step.end)
    except TypeError as error:
        raise UserError(
            f"the reward {name} returned a step from {step.start!r} to {step.end!r}: give the "
            "numbers of tokens"
        ) from error
    reward = _number(step.reward, name)
    if reward is None:
        raise UserError(
            f"the reward {name} returned None for the step [{start}, {end}): leave such a step "
            "out, or return None for the whole sample"
        )
    return StepReward(start, end, reward)


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text is no number, whatever it says")
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the reward {name} returned {str(value)[:40]!r} for a completion; expected a number, "
            "None, a dict of components, a list of StepReward or EnvFailed"
        ) from error
