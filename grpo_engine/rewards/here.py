"""Reward functions that run in this process."""

import copy
import inspect
from typing import Any

from ..errors import UserError
from . import builtin
from .jobs import Outcome
from .load import Reward
from .load_function import raised
from .loop import LoopThread
from .protocol import Plain, accepted, plain_values


def call_here(
    reward: Reward, arguments: dict[str, Any], count: int, loop: LoopThread, most_failures: int
) -> Outcome:
    """All samples at once; one by one, to find the culprits, if that raises.

    When more than `most_failures` have failed, the rest fails untried.
    """
    try:
        return Outcome(_run(reward, arguments, count, loop), [None] * count)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if reward.config.compares or count == 1:
            return Outcome([None] * count, [raised(error)] * count)
    outcome, failed = Outcome([None] * count, [None] * count), 0
    for i in range(count):
        if failed > most_failures:
            outcome.failures[i] = f"given up after {failed} of {count} failed"
            continue
        alone = {name: v[i : i + 1] if isinstance(v, list) else v for name, v in arguments.items()}
        single = call_here(reward, alone, 1, loop, most_failures)
        outcome.values[i], outcome.failures[i] = single.values[0], single.failures[0]
        failed += single.failures[0] is not None
    return outcome


def _run(reward: Reward, arguments: dict[str, Any], count: int, loop: LoopThread) -> list[Plain]:
    renamed = {name: arguments[column] for name, column in reward.renames.items()}
    signature = inspect.signature(reward.function)
    given = accepted(signature, arguments | renamed, reward.name)
    if not getattr(reward.function, "__module__", "").startswith(builtin.__name__):
        # A function that edits its arguments must not edit the data or the samples.
        given = copy.deepcopy(given)
    values = reward.function(**given)
    if inspect.isawaitable(values):
        values = loop.run(values, reward.config.timeout_s)
    return plain_values(values, reward.name, count)
