"""LoRA through peft: attached, loaded whole, refused where it would be ignored."""

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import LoraConfig, ModelConfig
from .errors import UserError, first_line, require
from .forward import head_of
from .paths import absolute

ADAPTER_FILE = "adapter_model.safetensors"
TRAINED = "default"  # peft saves the adapter of this name unprefixed
# What else an adapter's config may ask for changes the base model, or makes the forward depend on
# more than hidden states.
KNOWN = set(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora "
    "modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern megatron_core trainable_token_indices eva_config use_dora runtime_config "
    "ensure_weight_tying".split()
)
LEAVE_THE_BASE = True, False, "gaussian", "orthogonal", "eva"  # values of init_lora_weights


def is_adapter(model: nn.Module) -> bool:
    """Whether `model` is a peft model."""
    return hasattr(model, "peft_config")


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the adapter that trains, by the names under which they are saved."""
    peft = require("peft", "train", "LoRA")
    return peft.get_peft_model_state_dict(model, adapter_name=TRAINED, save_embedding_layers=False)


def attach_lora(
    base: nn.Module, config: ModelConfig, lora: LoraConfig, weights: Path | None
) -> nn.Module:
    """A peft model of `base` with a new adapter, or that of the folder `weights`.

    Raises UserError if it doesn't fit the model, or would train what can't be saved with it.
    """
    peft = require("peft", "train", "LoRA")
    base.requires_grad_(False)
    if weights is None:
        adapter = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=_named_targets(base, lora.targets),
            lora_dropout=lora.dropout,
            task_type="CAUSAL_LM",
        )
    else:
        _adapter_file(weights)
        adapter = _adapter_config(weights)
        adapter.inference_mode = False
        adapter.lora_dropout = lora.dropout
        adapter.base_model_name_or_path = None  # else peft warns that it is another now
    try:
        model = peft.get_peft_model(base, adapter, adapter_name=TRAINED)
    except ValueError as error:
        what = (
            "lora.targets don't fit" if weights is None else f"the adapter in {weights} doesn't fit"
        )
        raise UserError(f"{what} the model: {first_line(error)}") from error
    # Not before: peft takes the name that the model was loaded by.
    adapter.base_model_name_or_path = absolute(config.path)
    head_of(model)  # refuses an adapter on the head
    if weights is not None:
        load_adapter(model, weights)
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


def _adapter_config(folder: Path) -> Any:
    peft = require("peft", "train", "LoRA")
    try:
        adapter = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise UserError(f"{folder} has no readable adapter_config.json: {error!r}") from error
    if adapter.peft_type != peft.PeftType.LORA:
        raise UserError(f"{folder} is a {adapter.peft_type.value} adapter; only LoRA can train on")
    plain = vars(peft.LoraConfig())
    for name, value in vars(adapter).items():
        if name not in KNOWN and value and value != plain.get(name):
            raise UserError(
                f"the adapter in {folder} has {name}: {value!r}, which is not supported: merge it "
                "into its model, and give that as model.path"
            )
    if adapter.init_lora_weights not in LEAVE_THE_BASE:
        raise UserError(
            f"the adapter in {folder} was begun by {adapter.init_lora_weights}, which changes the "
            "base model: save it as a plain one (path_initial_model_for_weight_conversion of peft)"
        )
    adapter.init_lora_weights, adapter.eva_config = True, None  # they are loaded
    return adapter


def _adapter_file(folder: Path) -> Path:
    file = folder / ADAPTER_FILE
    if not file.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} is no adapter: it needs adapter_config.json and {ADAPTER_FILE}")
    return file


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Loads the adapter weights of `folder` into a peft model.

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
    wanted = adapter_state(model).keys()
    _drop_embeddings(state, wanted, model, folder)
    if missing := sorted(wanted ^ state.keys()):
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {len(missing)} keys have no "
            f"counterpart, {missing[0]} for one; was it made for another model?"
        )
    try:
        peft.set_peft_model_state_dict(model, state, adapter_name=TRAINED)
    except RuntimeError as error:  # the sizes differ
        raise UserError(
            f"the adapter in {folder} doesn't fit the model: {first_line(error)}"
        ) from error


def _drop_embeddings(
    state: dict[str, Tensor], wanted: Set[str], model: nn.Module, folder: Path
) -> None:
    """Without the base's embeddings, which peft puts beside adapters on them, if they are ours."""
    base = model.state_dict()
    for name in [n for n in state if n not in wanted and n in base]:
        theirs, ours = state.pop(name), base[name].cpu()
        if theirs.shape != ours.shape or not (
            torch.equal(theirs.to(ours.dtype), ours) or torch.equal(theirs, ours.to(theirs.dtype))
        ):
            raise UserError(
                f"the adapter in {folder} comes with another {name} ({list(theirs.shape)}) than "
                f"the model's ({list(ours.shape)}): put that into the model of model.path"
            )
