"""Paths as a person writes them."""

import os
from pathlib import Path
from typing import Any

from .errors import UserError


def expand_home(settings: Any, section: str, *names: str) -> None:
    """Puts the home folder for a ~ at the beginning of paths of a frozen dataclass."""
    for name in names:
        path = getattr(settings, name)
        if isinstance(path, str) and path.startswith("~"):
            object.__setattr__(settings, name, _expanded(path, f"{section}.{name}"))


def path_of(text: str) -> Path:
    """A path given as an argument: shells leave the ~ of --out=~/x as it is."""
    return Path(_expanded(text, "the command line"))


def _expanded(path: str, where: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{where}: no home folder is known for {path}; write the whole path")
    return expanded
