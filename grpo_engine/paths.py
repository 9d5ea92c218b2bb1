"""Paths as a person writes them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import UserError

PATHS = {
    "model": ("path", "reference"),
    "lora": ("adapter",),
    "data": ("path", "eval_path", "regression_path"),
    "train": ("out",),
}


def expand_home(settings: Any, section: str, *names: str) -> None:
    """Puts the home folder for a ~ at the beginning of paths of a frozen dataclass."""
    for name in names:
        path = getattr(settings, name)
        if path is not None:
            object.__setattr__(settings, name, _expanded(path, f"{section}.{name}"))


def path_of(text: str) -> Path:
    """A path given as an argument: shells leave the ~ of --out=~/x as it is."""
    return Path(_expanded(text, "the command line"))


def absolute(path: str) -> str:
    """The full path of what is there; else, as for an id of the hub, the text as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path


def map_paths(values: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A run's config as plain values, with every path that it names changed; no other is."""
    changed = dict(values)
    for section, names in PATHS.items():
        if (group := values.get(section)) is not None:
            found = {n: change(group[n]) for n in names if group.get(n) is not None}
            changed[section] = group | found
    changed["rewards"] = [_reward_paths(row, change) for row in values["rewards"]]
    return changed


def _reward_paths(row: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Of a reward, or of a member of an ensemble, into which nothing has looked yet."""
    function, options = row.get("function"), row.get("options")
    changed = dict(row)
    if isinstance(function, str) and ":" in function:
        file, _, name = function.rpartition(":")
        changed["function"] = f"{change(file)}:{name}"
    if not isinstance(options, dict):
        return changed
    if function == "reward_model" and "path" in options:
        changed["options"] = options | {"path": change(str(options["path"]))}
    if function == "ensemble" and isinstance(options.get("members"), list):
        members = [_member_paths(member, change) for member in options["members"]]
        changed["options"] = options | {"members": members}
    return changed


def _member_paths(member: Any, change: Callable[[str], str]) -> Any:
    if isinstance(member, str):
        return _reward_paths({"function": member}, change)["function"]
    return _reward_paths(member, change) if isinstance(member, dict) else member


def _expanded(path: str, where: str) -> str:
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {path!a} can be no path here ({error.reason}): set LC_ALL=C.UTF-8"
        ) from error
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{where}: no home folder is known for {path}; write the whole path")
    return expanded
