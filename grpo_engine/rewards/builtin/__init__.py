"""The built-in rewards: plain functions in TRL's form, usable with any trainer.

`for_trl(math, near=0.3)` is one of TRL's reward_funcs, which are given more than they name.

Each takes lists over the samples under the names TRL uses (`prompts`, `completions`,
`completion_ids`, and columns of the data), options by keyword, and returns a number or None (can't
be judged, which is not 0) per completion. A completion is a string or chat messages. `answers` are
the gold answers: a text, a number, or a list of them, any of which is right; for one that is
nothing of this the reward is None. `groups` is the number of each sample's group. Options are
checked before anything else, so a call with empty lists checks them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .ensemble import combine_members, ensemble
from .golds import golds_of
from .gym import ENTRY_COLUMN, read_entry, reasoning_gym, reasoning_gym_tasks
from .length import length_normalized, length_penalty, repetition, soft_overlong
from .math_answer import math
from .math_gold import read_golds
from .model import reward_model
from .options import text_of
from .outside import for_trl
from .python_tests import python_tests, read_tests
from .text import exact, format, fuzzy

BUILTIN: dict[str, Callable] = {
    f.__name__: f
    for f in (
        exact,
        fuzzy,
        math,
        format,
        length_penalty,
        length_normalized,
        soft_overlong,
        repetition,
        reasoning_gym,
        python_tests,
        reward_model,
    )
}

# Columns that a built-in reads beside the answers, and with what.
OWN_COLUMNS = {"python_tests": ["tests", "test"], "reasoning_gym": [ENTRY_COLUMN]}
OWN_READERS: dict[str, Callable] = {"python_tests": read_tests, "reasoning_gym": read_entry}


def gold_reader(function: str, options: Mapping[str, Any]) -> Callable[[Any], list]:
    """What a built-in reads a row's gold answer with; it raises ValueError, which says why."""
    if function in OWN_READERS:
        return OWN_READERS[function]
    as_math = function == "math" or options.get("compare", "math") == "math"
    return golds_of if function in ("exact", "fuzzy") or not as_math else read_golds


__all__ = [
    "BUILTIN",
    "OWN_COLUMNS",
    "combine_members",
    "ensemble",
    "exact",
    "for_trl",
    "format",
    "fuzzy",
    "gold_reader",
    "length_normalized",
    "length_penalty",
    "math",
    "python_tests",
    "reasoning_gym",
    "reasoning_gym_tasks",
    "repetition",
    "reward_model",
    "soft_overlong",
    "text_of",
]
