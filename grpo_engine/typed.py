"""YAML to the types of dataclasses: what a plain word means is decided by the type of its key.

So `no`, `007` and `1e3` are text where a text is wanted, and what is quoted is text everywhere.
"""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .errors import UserError, require

NULL = ("", "~", "null", "Null", "NULL")
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
KINDS = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
)
# Names of TRL, Unsloth and transformers, where the nearest key would be another.
ELSEWHERE = {
    "learning_rate": "train.lr",
    "num_generations": "sampling.group_size",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "per_device_train_batch_size": "train.prompts_per_step, which counts groups",
    "gradient_accumulation_steps": "train.token_budget, which cuts the micro-batches",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "output_dir": "train.out",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup, a share of the steps",
    "optim": "train.optimizer",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "train.eval_every",
    "report_to": "train.tensorboard",
    "mask_truncated_completions": "groups.truncated",
    "max_prompt_length": "none: a prompt is never cut",
    "use_vllm": "none: the sampler is part of the engine",
    "vllm_mode": "none: the sampler is part of the engine",
    "reward_funcs": "rewards",
    "reward_weights": "rewards.weight",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "load_in_4bit": "model.base",
    "load_in_8bit": "model.base",
    "dataset_name": "data.path",
    "train_dataset": "data.path",
    "eval_dataset": "data.eval_path",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
}
NO_CHOICE = {"gspo": "; GSPO is loss.importance_sampling_level: sequence"}


class Plain(str):
    """A word without quotes."""


def read_yaml(text: str | bytes) -> Any:
    """Lists, mappings and words of a YAML document: Plain, or str where quoted.

    Raises yaml.YAMLError, also for a mapping that repeats a key.
    """
    yaml = require("yaml", "train", "reading a config")

    class Loader(yaml.SafeLoader):
        """Without YAML's own ideas of what a word is."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            for key in own:
                if isinstance(key, str) and own.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key} stands twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

    def word(loader: Any, node: Any) -> str:
        return Plain(node.value) if node.style is None else node.value

    for kind in "null bool int float timestamp str value".split():
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", word)
    content = yaml.load(text, Loader)
    return Plain("") if content is None else content


def write_yaml(values: dict[str, Any]) -> str:
    """YAML that `read_yaml` and `typed` read as the same values."""
    yaml = require("yaml", "train", "writing config.yaml")

    class Dumper(yaml.SafeDumper):
        """Quotes a text that would be read as something else."""

    def text(dumper: Any, value: str) -> Any:
        style = None if any_of(Plain(value)) == value else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False)


def typed(kind: Any, value: Any, key: str, source: str) -> Any:
    """What `read_yaml` gave, as the type of the `key`; UserError naming key, source and value."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, Plain) and value in NULL and Any not in kinds:
        if NoneType in kinds:
            return None
        raise UserError(f"{key} in {source} can't be null; leave it out for its default")
    for one in kinds:
        try:
            return _one(one, value, key, source)
        except ValueError:
            continue
    wanted = " or ".join(dict.fromkeys(map(_described, kinds)))
    hint = NO_CHOICE.get(value, "") if isinstance(value, str) else ""
    raise UserError(f"{key} in {source} must be {wanted}; given {any_of(value)!r}{hint}")


def fields_of(
    cls: type, values: Any, prefix: str, source: str, known: Collection[str] = ()
) -> dict[str, Any]:
    """The typed values of the keys given for the dataclass `cls`; `known`: what else is one."""
    if not isinstance(values, dict):
        raise ValueError
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    found = {}
    for name, value in values.items():
        key = f"{prefix}.{name}".removeprefix(".")
        if name not in kinds:
            raise unknown_key(key, source, known or [*known_keys(cls, prefix)])
        found[str(name)] = typed(kinds[name], value, key, source)
    return found


def made(cls: type, values: dict[str, Any], key: str, source: str) -> Any:
    """The dataclass, which checks itself; UserError for what it lacks or refuses."""
    needed = (f for f in dataclasses.fields(cls) if f.default is f.default_factory)  # both MISSING
    if missing := [f.name for f in needed if f.name not in values]:
        raise UserError(f"{key} in {source} lacks {', '.join(missing)}, which it must name")
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{key} in {source}: {error}") from error


def any_of(value: Any) -> Any:
    """A value whose key has no type: numbers, true, false and null without quotes, else text."""
    if isinstance(value, dict):
        return {any_of(name): any_of(v) for name, v in value.items()}
    if isinstance(value, list):
        return [any_of(v) for v in value]
    if not isinstance(value, Plain):
        return value
    if value in NULL:
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if WHOLE.fullmatch(value):
        return int(value)
    return _number(value) if NUMBER.fullmatch(value.lower()) else str(value)


def known_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """All keys below `cls`, by their whole names."""
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}".removeprefix(".")
        yield name
        for kind in (f.type, *get_args(f.type)):
            if dataclasses.is_dataclass(kind):
                yield from known_keys(kind, name)


def unknown_key(name: str, source: str, known: Collection[str]) -> UserError:
    """The error for a key that there is not, with the one that may be meant."""
    last = name.rpartition(".")[2]
    if last in ELSEWHERE:
        return UserError(f"unknown key {name} in {source}; here it is {ELSEWHERE[last]}")
    near = [key for key in known if key.endswith(f".{last}")]
    if len(near) != 1:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return UserError(f"unknown key {name} in {source}; the nearest is {near[0]}")


def _one(kind: Any, value: Any, key: str, source: str) -> Any:
    """ValueError if the value is of another kind."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return any_of(value)
    if dataclasses.is_dataclass(kind):
        return made(kind, fields_of(kind, value, key, source), key, source)
    if origin is list and isinstance(value, list):
        return [typed(inside[0], v, key, source) for v in value]
    if origin is dict and isinstance(value, dict):
        return {
            typed(inside[0], name, key, source): typed(inside[1], v, f"{key}.{name}", source)
            for name, v in value.items()
        }
    if kind is str and isinstance(value, str):
        return str(value)
    if origin is Literal and isinstance(value, str):
        return inside[list(map(str, inside)).index(value)]
    if not isinstance(value, Plain) or kind not in (bool, int, float):
        raise ValueError
    if kind is int:
        return int(value, 0)  # 0x1f and 1_000, but not 017
    if kind is float:
        return _number(value)
    if (word := value.lower()) not in BOOLS:
        raise ValueError
    return BOOLS[word]


def _number(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if dataclasses.is_dataclass(kind):
        return "keys, as in {key: value}"
    return KINDS[get_origin(kind) or kind]
