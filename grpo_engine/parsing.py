"""YAML and `--group.key value` to a RunConfig, by jsonargparse; unknown keys name the nearest."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from .config import RunConfig
from .errors import UserError, require
from .paths import path_of

MAY_BE_NO_MAPPING = ("lora", "rewards")  # null, and a list
LISTS_OF_GROUPS = ("--rewards", "--curriculum.mixture")
MOST_LINES = 12
USAGE = "grpo train run.yaml [--resume] [--group.key value ...]"


def parse_run(args: Sequence[str]) -> tuple[RunConfig, bool]:
    """The arguments of `grpo train` -> the config, and whether --resume was given.

    Raises UserError for an unreadable file, an unknown key or a bad value.
    """
    parser = _parser()
    args = _with_config_first(args)
    for flag, value in pairwise(args):
        if flag == "--config":
            _check_yaml_keys(Path(value))
    _check_argument_names(args)
    args = _with_lists_afresh(args)
    jsonargparse = _jsonargparse()
    try:
        namespace = parser.parse_args(args)
        values = parser.instantiate(namespace)
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UserError(_one_line(error)) from error
    return RunConfig(**{f.name: values[f.name] for f in dataclasses.fields(RunConfig)}), bool(
        values["resume"]
    )


def _with_config_first(args: Sequence[str]) -> list[str]:
    """`run.yaml`, given first or after --resume, as --config in front of what overrides it."""
    args = [part for arg in args for part in re.split("(?<=^--config)=", arg)]
    for i, arg in enumerate(args):
        if not arg.startswith("-") and (i == 0 or args[i - 1] == "--resume"):
            args = ["--config", arg, *args[:i], *args[i + 1 :]]
            break
    before = ["", *args]
    return [
        str(path_of(arg)) if flag == "--config" else arg
        for flag, arg in zip(before, args, strict=False)
    ]


def _with_lists_afresh(args: Sequence[str]) -> list[str]:
    """With an empty list before each list: to jsonargparse the rows of a list of the same length
    that the file has are the defaults of those here, weights, gates, options and all."""
    afresh: list[str] = []
    for arg in args:
        name = arg.partition("=")[0]
        afresh += [f"{name}=[]", arg] if name in LISTS_OF_GROUPS else [arg]
    return afresh


def load_run(path: Path) -> RunConfig:
    """The config of a YAML file."""
    return parse_run([str(path)])[0]


def dump_config(config: RunConfig) -> str:
    """YAML that `load_run` reads as the same config."""
    yaml = require("yaml", "train", "writing config.yaml")

    class Dumper(yaml.SafeDumper):
        """Quotes texts like 1e3, which jsonargparse, unlike PyYAML, reads as numbers."""

    number = re.compile(r"[-+]?(\d[\d_]*)?\.?\d*[eE][-+]?\d+$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.dump(config.to_dict(), Dumper=Dumper, sort_keys=False)


def _jsonargparse() -> ModuleType:
    return require("jsonargparse", "train", "the command line")


def _parser() -> Any:
    jsonargparse = _jsonargparse()
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="grpo train",
        usage=USAGE,
        description="Train a causal language model with GRPO.",
        epilog="Groups that may be null, and lists, explain their keys with --lora.help, "
        "--rewards.help. The resolved config lies in the run folder.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="the run as YAML; may be given first")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of train.out",
    )
    parser.add_class_arguments(RunConfig)
    return parser


def _check_yaml_keys(path: Path) -> None:
    yaml = require("yaml", "train", "reading a config")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold the groups model, data, rewards, ...; see grpo train -h")
    known = set(_keys(RunConfig))
    for group, value in content.items():
        _check_known(str(group), known, str(path))
        if group not in MAY_BE_NO_MAPPING and not isinstance(value, dict):
            raise UserError(
                f"{group} in {path} must hold keys, as in {group}: {{key: value}}; given {value!r}"
            )
        if group == "rewards":
            _check_rewards(value, known, str(path))
        else:
            _check_group(group, value, known, str(path))


def _check_group(group: str, value: Any, known: set[str], where: str) -> None:
    for key in value if isinstance(value, dict) else []:
        _check_known(f"{group}.{key}", known, where)


def _check_rewards(rows: Any, known: set[str], where: str) -> None:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"rewards in {where} must be a list of rows, as in rewards: [{{function: math}}]; "
            f"given {rows!r}"
        )
    for row in rows:
        _check_group("rewards", row, known, where)
        if "function" not in row:
            raise UserError(f"a row of rewards in {where} lacks function, which it must name")
        components = row.get("components")
        for name, part in components.items() if isinstance(components, dict) else []:
            if not isinstance(part, dict):
                raise UserError(
                    f"rewards: components.{name} in {where} must hold keys, as in "
                    f"{{{name}: {{weight: 0.5}}}}; given {part!r}"
                )
            _check_group("rewards.components", part, known, where)


def _check_argument_names(args: Sequence[str]) -> None:
    extra = {"config", "resume", "help", "lora.help", "rewards.help", "print_config"}
    known = extra | set(_keys(RunConfig))
    for arg in args:
        if arg.startswith("--"):  # a + at the end appends to a list
            _check_known(arg[2:].partition("=")[0].removesuffix("+"), known, "the command line")
    for name, value in _given(args):
        if name == "--rewards":
            _check_rewards(_as_yaml(value), known, "the command line")


def _given(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for arg, following in pairwise([*args, ""]):
        name, equals, value = arg.partition("=")
        yield name, value if equals else following


def _as_yaml(text: str) -> Any:
    yaml = require("yaml", "train", "the command line")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _check_known(name: str, known: set[str], where: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise UserError(f"unknown key {name} in {where}; the nearest is {near[0]}")


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(cls):
        yield prefix + f.name
        for kind in (f.type, *get_args(f.type)):
            if dataclasses.is_dataclass(kind):
                yield from _keys(kind, f"{prefix}{f.name}.")


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    given = [line for line in lines if line.startswith("Given value")]
    return " ".join([line for line in lines if line not in given][:MOST_LINES])
