"""What a checkpoint holds, read back: weights that don't load are an error now, not days later."""

from pathlib import Path

import torch
from torch import nn

from .config import ModelConfig
from .errors import UserError, require
from .lora import ADAPTER_FILE, adapter_state, is_adapter
from .model import load_causal_lm


def check_saved(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Raises UserError, by name, for weights of `model` that don't come back from `folder`.

    Adapters are compared bit by bit. Of whole models, which may fill a device, names and shapes:
    they are loaded on torch's meta device, without their values.
    """
    lost = _lost_of_adapter(model, folder) if is_adapter(model) else _lost(model, config, folder)
    if lost:
        raise UserError(
            f"what was saved is not what trains: {len(lost)} weights don't come back, {lost[0]} "
            "for one; other versions of transformers and peft may save this model"
        )


def _lost_of_adapter(model: nn.Module, folder: Path) -> list[str]:
    load_file = require("safetensors.torch", "train", "loading an adapter").load_file
    found, wanted = load_file(folder / ADAPTER_FILE), adapter_state(model)
    held = {tensor.data_ptr() for tensor in wanted.values()}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return sorted(
        [name for name, parameter in trained if parameter.data_ptr() not in held]
        + [n for n in wanted if n not in found or not torch.equal(found[n], wanted[n].cpu())]
        + [name for name in found if name not in wanted]
    )


def _lost(model: nn.Module, config: ModelConfig, folder: Path) -> list[str]:
    loaded = load_causal_lm(config, str(folder), torch.device("meta"))
    found, wanted = ({n: p.shape for n, p in m.named_parameters()} for m in (loaded, model))
    return sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
