"""Functions by name, from files and packages. Imports no torch: reward workers are light."""

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError

BETWEEN = (str(Path(__file__).parents[1]), os.path.dirname(asyncio.__file__), futures.__path__[0])
CONTENT = "__grpo_content__"  # hash of a file that was imported here
LONGEST_CAUSE = 300  # characters of an error's text: a line of a log


@dataclass(frozen=True)
class FunctionSpec:
    """A function that another process can load."""

    target: str
    """file.py:function or package.module:function"""
    options: dict[str, Any] = field(default_factory=dict)
    """keyword arguments that it always gets; they win over columns of the same name"""
    rename: dict[str, str] = field(default_factory=dict)
    """by parameter of the function, the argument (a column, say) that it gets"""
    per_sample: bool = False
    """judge samples one by one from the start, each with the whole time-out: for functions that
    gain nothing from seeing all samples at once"""

    @property
    def name(self) -> str:
        """The function's, for messages."""
        return self.target.rpartition(":")[2]


def load_function(spec: FunctionSpec) -> Callable:
    """The function of `spec` with its options bound.

    A file is executed once, unless its content has changed, and may import what lies beside it.
    Raises UserError, in one line, if there is no such function, if importing it raises, or if it
    has no such options.
    """
    place, colon, name = spec.target.rpartition(":")
    if not colon:
        raise UserError(
            f"{spec.target!r} names no function; give file.py:function or package.module:function"
        )
    is_file = place.endswith(".py") or os.sep in place or Path(place).is_file()
    module = _import_file(Path(place)) if is_file else _import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{place} has no function {name}")
    return _bind(function, spec) if spec.options else function


def describe(error: BaseException) -> str:
    """Class and text of an error, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= LONGEST_CAUSE else f"{text[:LONGEST_CAUSE]}..."


def raised(error: BaseException) -> str:
    """What a function raised and, where it is a user's, the line in its file."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(BETWEEN)]
    inside = [f for f in theirs if f.filename == theirs[0].filename]
    place = f" ({Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    return f"raised {describe(error)}{place}"


def _bind(function: Callable, spec: FunctionSpec) -> Callable:
    signature = inspect.signature(function)
    try:
        signature.bind_partial(**spec.options)
    except TypeError as error:
        raise UserError(f"the options of {spec.name} don't fit: {error}") from error

    @functools.wraps(function)
    def bound(**arguments: Any) -> Any:
        return function(**(arguments | spec.options))

    free = [p for name, p in signature.parameters.items() if name not in spec.options]
    bound.__signature__ = signature.replace(parameters=free)
    return bound


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"importing {name} raised {describe(error)}") from error


def _module_name(path: Path, content: str) -> str:
    """A name by which processes that the file's functions start can import it, where there is one.

    Pools that spawn look a function up by the name of its module. The file's own name serves where
    it leads to this file and to nothing else.
    """
    there = sys.modules.get(path.stem)
    if there is None:
        importlib.invalidate_caches()
        found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        origin = None if found is None else found.origin
    else:
        origin = getattr(there, "__file__", None)
    if origin is not None and Path(origin).resolve() == path.resolve():
        return path.stem
    return f"grpo_reward_{path.stem}_{content}"


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no such reward file: {path}")
    content = hashlib.sha256(os.fsencode(path.resolve()) + path.read_bytes()).hexdigest()[:16]
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # last: a helper's name hides no installed package
    name = _module_name(path, content)
    there = sys.modules.get(name)
    if there is not None and vars(there).get(CONTENT) == content:
        return there
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"{path} is no Python file; a reward is given as file.py:function")
    module = importlib.util.module_from_spec(spec)
    vars(module)[CONTENT] = content
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, UserError):
            raise UserError(f"the reward file {path} raised {describe(error)}") from error
        raise
    return module
