"""AdamW with float32 masters, its state as tensors and plain values, and the learning rate."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .config import TrainConfig
from .errors import require


class Optimizer:
    """AdamW (torch's, or the 8-bit one of bitsandbytes) over named parameters.

    A step of 1e-6 rounds to nothing in bfloat16, so parameters that are not float32 get a float32
    master, which is stepped and copied back.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainConfig) -> None:
        self.parameters = parameters
        self.masters = {
            name: p.detach().float().requires_grad_()
            for name, p in parameters.items()
            if p.dtype != torch.float32
        }
        stepped = [self.masters.get(name, p) for name, p in parameters.items()]
        if config.optimizer == "adamw8bit":
            bitsandbytes = require("bitsandbytes", "quant", "train.optimizer adamw8bit")
            self.inner = bitsandbytes.optim.AdamW8bit(stepped, weight_decay=config.weight_decay)
        else:
            self.inner = torch.optim.AdamW(stepped, weight_decay=config.weight_decay)

    def zero_grad(self) -> None:
        """Drops the gradients; a parameter that gets none is not stepped."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradients to `max_norm`, returns the norm before, not finite if they aren't."""
        return nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step at the learning rate `lr`."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            grad = self.parameters[name].grad
            master.grad = None if grad is None else grad.float()
        self.inner.step()
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)
            master.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values, keyed `parameter/field`."""
        tensors = {f"{name}/master": master.detach() for name, master in self.masters.items()}
        values: dict[str, Any] = {}
        # Not by state_dict(), where bitsandbytes folds its state up for FSDP.
        for name, parameter in self.parameters.items():
            stepped = self.masters.get(name, parameter)
            for key, value in self.inner.state.get(stepped, {}).items():
                target = tensors if isinstance(value, Tensor) else values
                target[f"{name}/{key}"] = value
        # bitsandbytes shares its quantisation maps; safetensors wants every tensor on its own.
        return {key: x.detach().clone().contiguous() for key, x in tensors.items()}, values

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        index_of = {name: index for index, name in enumerate(self.parameters)}
        state: dict[int, dict[str, Any]] = {}
        for key, value in (tensors | values).items():
            name, _, field = key.rpartition("/")
            if field == "master":
                self.masters[name].copy_(value)
            else:
                state.setdefault(index_of[name], {})[field] = value
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state, "param_groups": groups})


def learning_rate(step: int, peak: float, config: TrainConfig) -> float:
    """The rate of the step number `step`, from 0: a linear warm-up, then constant or cosine."""
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, config.steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
