"""Reward functions: TRL's form, components, the built-ins `exact` and `math`."""

import copy
import importlib.util
import inspect
import math as mathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import RewardConfig
from .data import PASSED_WHEN_NAMED, Task
from .errors import UserError, require


@dataclass(frozen=True)
class Reward:
    """One function of the weighted sum."""

    name: str
    function: Callable
    weight: float


@dataclass
class Scores:
    """Rewards of a step. None: the sample has none, it is invalid, which is not the same as 0."""

    total: list[float | None]
    components: dict[str, list[float | None]]


def load_rewards(
    configs: Sequence[RewardConfig], answer_column: str, tasks: Sequence[Task]
) -> list[Reward]:
    """The functions of the config; UserError for one that is not there or can't run on `tasks`."""
    rewards = [_load(c, answer_column, tasks) for c in configs]
    names = [r.name for r in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two rewards are called {name}; give their functions different names")
    return rewards


def score(rewards: Sequence[Reward], arguments: dict[str, Any], columns: dict[str, list]) -> Scores:
    """Calls every function once for all samples.

    arguments: lists over the samples, under the names of ALWAYS_PASSED and PASSED_WHEN_NAMED
    (`step` is a number). columns: the other columns of the data, one value a sample.
    Raises UserError, naming the function, if it raises or returns no list of the right length, and
    if no sample gets a reward from it or from any other.
    """
    count = len(arguments["completions"])
    total: list[float | None] = [None] * count
    broken = [False] * count
    components: dict[str, list[float | None]] = {}
    for reward in rewards:
        values = _call(reward, arguments, columns, count)
        for i, value in enumerate(values):
            parts = value if isinstance(value, dict) else {None: value}
            for part, number in parts.items():
                name = reward.name if part is None else f"{reward.name}.{part}"
                number = _number(number, reward.name)
                column = components.setdefault(name, [None] * count)
                if number is None:
                    continue
                if not mathlib.isfinite(number):
                    broken[i] = True
                    continue
                column[i] = number
                total[i] = (total[i] or 0.0) + reward.weight * number
    total = [None if bad else value for value, bad in zip(total, broken, strict=True)]
    if count and all(value is None for value in total):
        names = ", ".join(r.name for r in rewards)
        raise UserError(
            f"no sample of this step has a reward: {names} returned None, NaN or infinity for all "
            f"{count}; check the function on one of the rows in rollouts/"
        )
    return Scores(total, components)


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion, also where it is given as chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact(completions: list, answers: list) -> list[float]:
    """1 where the completion is the answer, white space at the ends aside, else 0."""
    return [
        float(text_of(c).strip() == str(a).strip())
        for c, a in zip(completions, answers, strict=True)
    ]


def math(completions: list, answers: list) -> list[float | None]:
    """1 where the completion's answer equals the gold one as mathematics (math-verify).

    "the answer is 42", "42" and "\\boxed{42}" are the same. A gold answer in the form of GSM8K
    counts from its "####" on; one that can't be read gives None.
    """
    verifier = require("math_verify", "tasks", "the reward math")
    results: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        gold = verifier.parse(str(answer).rpartition("####")[2].strip())
        found = verifier.parse(text_of(completion))
        results.append(float(verifier.verify(gold, found)) if gold else None)
    return results


BUILTIN: dict[str, Callable] = {"exact": exact, "math": math}


def _load(config: RewardConfig, answer_column: str, tasks: Sequence[Task]) -> Reward:
    if config.function in BUILTIN:
        for task in tasks:
            if task.columns.get(answer_column) is None:
                raise UserError(
                    f"the reward {config.function} needs the answer in the column "
                    f"{answer_column!r}, which row {task.row} of the data lacks; set "
                    "data.answer_column"
                )
        check = BUILTIN[config.function]

        def function(completions: list, **columns: list) -> list:
            return check(completions, columns[answer_column])

        return Reward(config.function, function, config.weight)
    path, colon, name = config.function.rpartition(":")
    if not colon:
        raise UserError(
            f"no built-in reward {config.function!r}; there are {', '.join(BUILTIN)}, "
            "or give file.py:function"
        )
    return Reward(name, _import(Path(path), name), config.weight)


def _import(path: Path, name: str) -> Callable:
    if not path.is_file():
        raise UserError(f"no such reward file: {path}")
    spec = importlib.util.spec_from_file_location(f"grpo_reward_{path.stem}", path)
    if spec is None:
        raise UserError(f"{path} is no Python file; a reward is given as file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"the reward file {path} raised {_describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} has no function {name}")
    return function


def _call(
    reward: Reward, arguments: dict[str, Any], columns: dict[str, list], count: int
) -> Sequence:
    try:
        values = reward.function(**_accepted(reward.function, arguments, columns))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the reward {reward.name} raised {_describe(error)}") from error
    if not isinstance(values, Sequence) and hasattr(values, "tolist"):
        values = values.tolist()  # an array or a tensor
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(
            f"the reward {reward.name} returned {type(values).__name__}; it must return a list "
            f"with one number, None or dict of components for each of the {count} completions"
        )
    if len(values) != count:
        raise UserError(
            f"the reward {reward.name} returned {len(values)} values for {count} completions"
        )
    return values


def _accepted(function: Callable, arguments: dict, columns: dict[str, list]) -> dict:
    """TRL's rule: the core arguments and all columns by keyword; extras only where named.

    A function without **kwargs gets only what it names.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Copies: a function that edits its arguments must not edit the data or the samples.
    copies = copy.deepcopy(arguments | columns)
    named = {n: v for n, v in copies.items() if n in parameters}
    if not takes_all:
        return named
    extras = set(PASSED_WHEN_NAMED) - set(named)
    return {n: v for n, v in copies.items() if n not in extras}


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return mathlib.inf
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the reward {name} returned {str(value)[:40]!r} for a completion; "
            "expected a number, None or a dict of components"
        ) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
