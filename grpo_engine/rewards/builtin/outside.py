"""A built-in for a trainer that passes all it has, such as TRL."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..protocol import accepted


def for_trl(function: Callable, *, answer_column: str = "answer", **options: Any) -> Callable:
    """A built-in as one of TRL's `reward_funcs`: `for_trl(math, near=0.3)`.

    Called with every argument and column by keyword, it gets those that it names, `answers` from
    `answer_column`, and its options; its name is the function's. UserError in a call that lacks
    what it needs.
    """
    signature = inspect.signature(function)
    signature.bind_partial(**options)
    free = [p for name, p in signature.parameters.items() if name not in options]

    @functools.wraps(function)
    def called(**arguments: Any) -> list[float | None]:
        if answer_column in arguments:
            arguments["answers"] = arguments[answer_column]
        given = accepted(signature.replace(parameters=free), arguments, function.__name__)
        return function(**given, **options)

    return called
