"""LoRA through peft: attached, loaded whole, refused where it would be ignored."""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from .config import LoraConfig, ModelConfig
from .errors import UserError, first_line, require
from .forward import head_of

TRAINED, REFERENCE = "default", "reference"  # names of adapters; peft saves "default" unprefixed


def is_adapter(model: nn.Module) -> bool:
    """Whether `model` is a peft model."""
    return hasattr(model, "peft_config")


def attach_lora(
    base: nn.Module,
    config: ModelConfig,
    lora: LoraConfig,
    resume: Path | None,
    needs_reference: bool,
) -> nn.Module:
    """A peft model of `base` with a new adapter, or the one of `resume` or `lora.adapter`.

    An adapter that training continues is loaded a second time, frozen, to be the reference.
    Raises UserError if it doesn't fit the model.
    """
    peft = require("peft", "train", "LoRA")
    base.requires_grad_(False)
    if lora.adapter is None:
        targets = _named_targets(base, lora.targets)
        adapter = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets,
            lora_dropout=lora.dropout,
            task_type="CAUSAL_LM",
        )
    else:
        _adapter_file(Path(lora.adapter))
        adapter = _adapter_config(lora.adapter)
        adapter.inference_mode = False
        adapter.lora_dropout = lora.dropout
    adapter.base_model_name_or_path = config.path
    try:
        model = peft.get_peft_model(base, adapter, adapter_name=TRAINED)
    except ValueError as error:
        raise UserError(f"lora.targets don't fit the model: {first_line(error)}") from error
    head_of(model)  # refuses an adapter on the head
    if start := resume or (lora.adapter and Path(lora.adapter)):
        load_adapter(model, start, TRAINED)
    if lora.adapter is not None and needs_reference and config.reference is None:
        frozen = copy.deepcopy(adapter)
        frozen.inference_mode = True
        model.add_adapter(REFERENCE, frozen)
        load_adapter(model, Path(lora.adapter), REFERENCE)
        model.set_adapter(TRAINED)
    return model


def _named_targets(base: nn.Module, targets: str | list[str]) -> str | list[str]:
    """The targets as peft takes them; UserError for a name that no module has."""
    if targets == "all-linear":
        return targets
    targets = [targets] if isinstance(targets, str) else targets
    names = [name for name, _ in base.named_modules()]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise UserError(f"lora.targets: the model has no module {target}")
    return targets


def _adapter_config(folder: str) -> Any:
    peft = require("peft", "train", "LoRA")
    try:
        adapter = peft.PeftConfig.from_pretrained(folder)
    except Exception as error:
        raise UserError(f"{folder} has no readable adapter_config.json: {error!r}") from error
    if adapter.peft_type != peft.PeftType.LORA:
        raise UserError(f"{folder} is a {adapter.peft_type.value} adapter; only LoRA can train on")
    return adapter


def _adapter_file(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    if not file.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} is no adapter: it needs adapter_config.json and adapter_model.safetensors"
        )
    return file


def load_adapter(model: nn.Module, folder: Path, name: str) -> None:
    """Loads the adapter weights of `folder` into the adapter `name` of a peft model.

    Raises UserError unless every key lands and every parameter of the adapter gets one: keys that
    don't match would leave the base model without its adapter and say nothing.
    """
    peft = require("peft", "train", "loading an adapter")
    load_file = require("safetensors.torch", "train", "loading an adapter").load_file
    from safetensors import SafetensorError

    try:
        state = load_file(_adapter_file(folder))
    except (OSError, SafetensorError) as error:
        raise UserError(f"the adapter in {folder} is damaged: {error}") from error
    wanted = set(peft.get_peft_model_state_dict(model, adapter_name=name))
    if missing := sorted(wanted ^ set(state)):
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {len(missing)} keys have no "
            f"counterpart, {missing[0]} for one; was it made for another model?"
        )
    try:
        peft.set_peft_model_state_dict(model, state, adapter_name=name)
    except RuntimeError as error:  # the sizes differ
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {first_line(error)}"
        ) from error
