"""Reward functions by name: which there are, where they run, which version they are."""

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from ..data import Task
from ..errors import UserError
from ..sample_config import RewardConfig
from .builtin import BUILTIN, OWN_COLUMNS, gold_reader
from .builtin.ensemble import check_rule
from .load_function import FunctionSpec, load_function

# Built-ins with a bounded amount of work a sample, and one that holds a model: in this process.
STAY_HERE = "exact length_penalty soft_overlong repetition reward_model".split()
# These judge each sample by itself and may hang on one: called sample by sample from the start.
ONE_BY_ONE = "math format fuzzy python_tests reasoning_gym".split()
COMPARE = ["length_normalized"]  # samples of a group
ENSEMBLE = "ensemble"
RUNNING = "timeout_s isolate workers calls_per_worker max_failed".split()


@dataclass(frozen=True)
class Reward:
    """One function of the weighted sum, or an ensemble of `members`."""

    name: str
    config: RewardConfig
    version: str
    """hash of the code, the options and what is made of the numbers"""
    spec: FunctionSpec | None = None
    """what a worker loads; None: `function` runs in this process"""
    function: Callable | None = None
    renames: dict[str, str] = dataclasses.field(default_factory=dict)
    """argument -> column of the data"""
    members: tuple["Reward", ...] = ()


def reward_of(function: Callable, *, name: str | None = None, **config: Any) -> Reward:
    """A callable as a reward, run in this process: without a time-out, unless it is async.

    config: keys of RewardConfig, without `options` and `isolate`: UserError for those.
    """
    for key in {"options", "isolate"} & config.keys():
        raise UserError(
            f"reward_of calls the function as it is, in this process: leave out {key} (bind "
            "options with functools.partial; load_rewards isolates a function of a file)"
        )
    name = name or getattr(function, "__name__", type(function).__name__)
    made = RewardConfig(name, name=name, **config)
    return Reward(name, made, _version(_source(function), made), function=function)


def load_rewards(configs: Sequence[RewardConfig], answer_column: str = "answer") -> list[Reward]:
    """The functions of the config; `answer_column`: of the data, what built-ins compare with.

    Raises UserError for a function that is not there, or bad options; what a worker is to load is
    tried when the workers are started.
    """
    rewards = [_load(config, answer_column) for config in configs]
    names = [r.name for r in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two rewards are called {name}; give one of them another name: in rewards"
            )
    return rewards


def check_answers(rewards: Sequence[Reward], tasks: Sequence[Task]) -> None:
    """UserError, naming the row, for an answer that a built-in can't compare with."""
    for reward in [m for r in rewards for m in (r.members or (r,))]:
        read = gold_reader(reward.config.function, reward.config.options)
        own = OWN_COLUMNS.get(reward.config.function, [])
        for column in [*reward.renames.values(), *own]:
            bad = [(task, why) for task in tasks if (why := _unread(task, column, read))]
            if not bad:
                continue
            task, why = bad[0]
            more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
            advice = "mend the data" if own else "mend the data, or set data.answer_column"
            raise UserError(
                f"the reward {reward.name} needs the answer in the column {column!r}, which "
                f"row {task.row} of the data{more} {why}; {advice}"
            )


def _unread(task: Task, column: str, read: Callable) -> str | None:
    answer = task.columns.get(column)
    try:
        read(answer)
    except ValueError as error:
        if answer is None:
            return "lacks"
        text = repr(answer)
        return f"can't give: {text if len(text) <= 60 else text[:60] + '...'}: {error}"
    return None


def named_code(configs: Sequence[RewardConfig]) -> list[str]:
    """The files and modules among the functions of `configs`, those of ensembles with them."""
    found = []
    for config in configs:
        members = config.options.get("members") if config.function == ENSEMBLE else None
        for member in members if isinstance(members, list) else [config.function]:
            name = member.get("function") if isinstance(member, dict) else member
            if name not in BUILTIN and name != ENSEMBLE:
                found.append(str(name))
    return found


def version_of(rewards: Sequence[Reward], *settings: Any) -> str:
    """One version for all of them and the settings (dataclasses) that their numbers go through."""
    return _hash(json.dumps([r.version for r in rewards] + [_worth(s) for s in settings]))


def _load(config: RewardConfig, answer_column: str) -> Reward:
    if config.function == ENSEMBLE:
        return _load_ensemble(config, answer_column)
    if config.function in BUILTIN:
        return _load_builtin(config, answer_column)
    path, colon, name = config.function.rpartition(":")
    if not colon:
        raise UserError(
            f"no built-in reward {config.function!r}; there are {', '.join([*BUILTIN, ENSEMBLE])}, "
            "or give file.py:function"
        )
    spec = FunctionSpec(config.function, config.options)
    here = load_function(spec) if config.isolate is False else None
    version = _version(_code_of(path), config)
    return Reward(config.name or name, config, version, None if here else spec, here)


def _load_builtin(config: RewardConfig, answer_column: str) -> Reward:
    name, function = config.function, BUILTIN[config.function]
    parameters = inspect.signature(function).parameters
    renames = {"answers": answer_column} if "answers" in parameters else {}
    target = f"{function.__module__}:{name}"
    spec = FunctionSpec(target, config.options, renames, per_sample=name in ONE_BY_ONE)
    called = load_function(spec)
    lists = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    try:
        called(**{n: [] for n in lists})  # checks the options, and that its packages are there
    except TypeError as error:
        raise UserError(f"rewards: the options of {name} don't fit: {error}") from error
    if name in COMPARE:
        config = dataclasses.replace(config, compares=True)
    isolate = name not in STAY_HERE if config.isolate is None else config.isolate
    return Reward(
        config.name or name,
        config,
        _version(_code_of(function.__module__), config),
        spec if isolate else None,
        None if isolate else called,
        renames,
    )


def _load_ensemble(config: RewardConfig, answer_column: str) -> Reward:
    options = dict(config.options)
    named = options.pop("members", None)
    check_rule(options.pop("rule", "mean"), options.pop("tolerance", 0.0))
    if options or not isinstance(named, list) or len(named) < 2:
        raise UserError(
            "rewards: an ensemble has the options members (a list of at least two functions), rule "
            f"and tolerance; given {config.options}"
        )
    members = []
    for member in named:
        keys = member if isinstance(member, dict) else {"function": member}
        own = {"timeout_s": config.timeout_s, "isolate": config.isolate}
        if not {"function"} <= keys.keys() <= {"function", "options", *own}:
            raise UserError(
                "rewards: a member of an ensemble is a function or {function, options, timeout_s, "
                f"isolate}}; given {member!r}"
            )
        _check_member(own | {"options": {}} | keys)
        members.append(_load(RewardConfig(**(own | keys)), answer_column))
    versions = json.dumps([m.version for m in members])
    name = config.name or ENSEMBLE
    return Reward(name, config, _version(versions, config), members=tuple(members))


def _check_member(keys: dict[str, Any]) -> None:
    """UserError for a value of another type: inside options nothing has looked at it yet."""
    for name, kinds, wanted in (
        ("function", str, "a text"),
        ("options", dict, "a mapping"),
        ("timeout_s", (int, float), "a number"),
        ("isolate", (bool, NoneType), "true, false or null"),
    ):
        if not isinstance(keys[name], kinds):
            raise UserError(
                f"rewards: {name} of a member of an ensemble must be {wanted}; given {keys[name]!r}"
            )
    if keys["function"] == ENSEMBLE:
        raise UserError("rewards: a member of an ensemble can't be an ensemble: name its members")


def _code_of(place: str) -> str:
    """The text of a file, or of a module by its name."""
    path = Path(place)
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        if place.endswith(".py") or os.sep in place:
            raise UserError(f"no such reward file: {path.absolute()}")
        raise UserError(f"no such reward module: {place}")
    return Path(found.origin).read_text(encoding="utf-8", errors="replace")


def _version(source: str, config: RewardConfig) -> str:
    return _hash(source + _worth(config))


def _worth(settings: Any) -> str:
    """What of the settings bears on the numbers; not where and how long functions may run."""
    values = {n: v for n, v in dataclasses.asdict(settings).items() if n not in RUNNING}
    # Twice: keys of several types are sorted as the texts that JSON makes of them.
    return json.dumps(json.loads(json.dumps(values, default=str)), sort_keys=True)


def _source(function: Callable) -> str:
    """The code of a callable, of its class for an object; its name where there is none."""
    if isinstance(function, functools.partial):
        return f"{_source(function.func)}{function.args}{sorted(function.keywords.items())}"
    plain = inspect.isfunction(function) or inspect.ismethod(function)
    try:
        return inspect.getsource(function if plain else type(function))
    except (OSError, TypeError):
        return f"{type(function).__module__}.{type(function).__qualname__}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
