"""YAML and `--group.key value` to a RunConfig; the help is written by jsonargparse."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from .config import RunConfig
from .errors import UserError, require
from .paths import absolute, map_paths, path_of
from .typed import Plain, fields_of, known_keys, made, read_yaml, typed, unknown_key, write_yaml

COMMAND_LINE = "the command line"
USAGE = "grpo train run.yaml [--resume] [--group.key value ...]"
HELP = ("-h", "--help", "--lora.help", "--rewards.help")
FLAGS = ("resume", "print_config")
KINDS = {f.name: f.type for f in dataclasses.fields(RunConfig)}
GROUPS = {
    name: next(k for k in (kind, *get_args(kind)) if dataclasses.is_dataclass(k))
    for name, kind in KINDS.items()
    if get_origin(kind) is not list
}
KNOWN = tuple(known_keys(RunConfig))

Found = dict[str, Any]  # by group: the typed values of its keys, or what stands for the group


def parse_run(args: Sequence[str]) -> tuple[RunConfig, bool]:
    """The arguments of `grpo train` -> the config, and whether --resume was given.

    Raises UserError for an unreadable file, an unknown key or a bad value.
    """
    args = _with_config_first(args)
    if any(arg in HELP for arg in args):
        _parser().parse_args([arg for arg in args if arg in HELP])
    found: Found = {}
    flags = set()
    files = []
    words = iter(args)
    for arg in words:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            raise UserError(f"what is {arg!r} for? usage: {USAGE}")
        if name in FLAGS and not equals:
            flags.add(name)
            continue
        if not equals and ((value := next(words, None)) is None or value.startswith("--")):
            _kind_of(name)
            raise UserError(f"{arg} needs a value")
        if name == "config":
            files.append(value)
            _add_file(found, path_of(value))
        else:
            _add_argument(found, name, value)
    config = _made(found, " and ".join([*files, COMMAND_LINE]))
    if "print_config" in flags:
        print(dump_config(config), end="")
        sys.exit(0)
    return config, "resume" in flags


def load_run(path: Path) -> RunConfig:
    """The config of a YAML file."""
    return parse_run([str(path)])[0]


def dump_config(config: RunConfig) -> str:
    """YAML that `load_run` reads as the same config, from any folder."""
    return write_yaml(map_paths(config.to_dict(), absolute))


def _with_config_first(args: Sequence[str]) -> list[str]:
    """`run.yaml`, given first or after --resume, as --config in front of what overrides it."""
    args = [part for arg in args for part in re.split("(?<=^--config)=", arg)]
    for i, arg in enumerate(args):
        if not arg.startswith("-") and (i == 0 or args[i - 1].removeprefix("--") in FLAGS):
            return ["--config", arg, *args[:i], *args[i + 1 :]]
    return args


def _add_file(found: Found, path: Path) -> None:
    yaml = require("yaml", "train", "reading a config")
    try:
        content = read_yaml(path.read_bytes())
    except OSError as error:
        raise UserError(f"can't read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold the groups model, data, rewards, ...; see grpo train -h")
    for group, value in content.items():
        if group not in KINDS:
            raise unknown_key(str(group), str(path), KNOWN)
        _add_group(found, group, value, str(path))


def _add_group(found: Found, group: str, value: Any, source: str) -> None:
    if group in GROUPS and isinstance(value, dict):
        given = fields_of(GROUPS[group], value, group, source, KNOWN)
        found[group] = (found.get(group) or {}) | given
    else:
        found[group] = _typed_group(group, value, source)


def _typed_group(group: str, value: Any, source: str) -> Any:
    rows = value if isinstance(value, list) else [None]
    if group == "rewards" and not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"rewards in {source} must be a list of rows, as in rewards: [{{function: math}}]; "
            f"given {value!r}"
        )
    return typed(KINDS[group], value, group, source)


def _kind_of(name: str) -> Any:
    """The type of a key of the command line; UserError for one that there is not."""
    group, _, key = name.partition(".")
    if name in KINDS:
        return KINDS[name]
    fields = dataclasses.fields(GROUPS[group]) if group in GROUPS else ()
    kinds = {f.name: f.type for f in fields}
    if key not in kinds:
        raise unknown_key(name, COMMAND_LINE, [*KNOWN, *FLAGS, "config", "help"])
    return kinds[key]


def _add_argument(found: Found, name: str, text: str) -> None:
    name, plus, _ = name.partition("+")
    kind = _kind_of(name)
    group, _, key = name.partition(".")
    value = _word_or_yaml(kind, text)
    if not key:
        if plus:
            value = value if isinstance(value, list) else [value]
            found[group] = [*found.get(group, []), *_typed_group(group, value, COMMAND_LINE)]
        else:
            found.pop(group, None)
            _add_group(found, group, value, COMMAND_LINE)
        return
    values = found[group] = dict(found.get(group) or {})
    if plus:
        value = value if isinstance(value, list) else [value]
    given = typed(kind, value, name, COMMAND_LINE)
    values[key] = [*(values.get(key) or []), *given] if plus else given


def _word_or_yaml(kind: Any, text: str) -> Any:
    """A text is taken as it was typed, unless its key may hold more than a word."""
    if {get_origin(k) or k for k in (kind, *get_args(kind))} <= {str, type(None)}:
        return Plain(text)
    yaml = require("yaml", "train", COMMAND_LINE)
    try:
        found = read_yaml(text)
    except yaml.YAMLError:
        return Plain(text)
    return found


def _made(found: Found, source: str) -> RunConfig:
    sections = {
        group: made(GROUPS[group], value, group, source)
        if group in GROUPS and isinstance(value, dict)
        else value
        for group, value in found.items()
    }
    return made(RunConfig, sections, "the config", source)


def _parser() -> Any:
    jsonargparse = require("jsonargparse", "train", "the help of grpo train")
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="grpo train",
        usage=USAGE,
        description="Train a causal language model with GRPO.",
        epilog="Groups that may be null, and lists, explain their keys with --lora.help, "
        "--rewards.help. The resolved config lies in the run folder.",
    )
    parser.add_argument("--config", action="config", help="the run as YAML; may be given first")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of train.out",
    )
    parser.add_class_arguments(RunConfig)
    return parser
