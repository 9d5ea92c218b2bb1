"""Errors that a user can act on. The command line prints them as one line and exits with 2."""

import importlib
from types import ModuleType


class UserError(Exception):
    """What is wrong, where, and what to do, in one line."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: reward functions must not swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency, or says which extra brings it.

    `module`: dotted name; `extra`: of grpo-engine; `purpose`: what it is needed for.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise  # the package is there and broken: its own error says more
        raise UserError(
            f"{purpose} needs the package {package}: pip install 'grpo-engine[{extra}]'"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of a library's error, or the line with the sizes if it only announces one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sizes = [line for line in lines if "size mismatch" in line or "MISMATCH" in line]
    return (sizes or lines or [type(error).__name__])[0]
