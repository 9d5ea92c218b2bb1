"""Checks of the public ops' arguments: messages name the argument, the expected, the given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels.options import GRPOOptions

HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_offsets(name: str, offsets: Tensor, total: int, *, values: bool = True) -> None:
    """Raises ValueError unless `offsets` is int32, starts at 0, never falls and ends at `total`.

    The values are looked at only on the CPU: on a device that would wait for it. values: False
    where the extension looks at them itself.
    """
    tensor(name, offsets)
    if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name} must be int32 offsets in one dimension; "
            f"given {list(offsets.shape)} {offsets.dtype}"
        )
    if not values or offsets.device.type != "cpu":
        return
    given = offsets.tolist()
    if given[0] != 0 or given[-1] != total or given != sorted(given):
        raise ValueError(f"{name} must start at 0, never fall and end at {total}; given {given}")


def layout(logp: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, *, values: bool) -> int:
    """The number of samples of packed or padded log-probs; values: as check_offsets."""
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, len(logp), values=values)
        return len(cu_seqlens) - 1
    if mask is None:
        raise ValueError("mask must be given with padded logp [S, T]")
    return len(logp)


def head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    tile_bytes: int,
) -> float | Tensor:
    """Checks what turns hidden states into log-probs; returns the temperature, widened."""
    for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        tensor(name, x)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [N, D] and weight [V, D]; "
            f"given {list(hidden.shape)} and {list(weight.shape)}"
        )
    if hidden.dtype not in HEAD_DTYPES or weight.dtype != hidden.dtype:
        raise ValueError(
            "hidden and weight must share one of float32, bfloat16, float16 (float64); "
            f"given {hidden.dtype} and {weight.dtype}"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"targets must be [{len(hidden)}] int64; given {list(targets.shape)} {targets.dtype}"
        )
    on_cpu = hidden.device.type == "cpu"  # values are looked at where that waits for no device
    if on_cpu and len(targets) and not 0 <= targets.min() <= targets.max() < len(weight):
        raise ValueError(
            f"targets must be from 0 to {len(weight) - 1}; "
            f"given {int(targets.min())} to {int(targets.max())}"
        )
    if bias is not None:
        same_shape("bias", tensor("bias", bias), weight.shape[:1])
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0; given {softcap}")
    if not isinstance(tile_bytes, int) or tile_bytes < 1:
        raise ValueError(f"tile_bytes must be a whole number >= 1; given {tile_bytes!r}")
    return _temperature(temperature, targets, on_cpu)


def _temperature(temperature: float | Tensor, targets: Tensor, on_cpu: bool) -> float | Tensor:
    if isinstance(temperature, Tensor):
        temperature = floating("temperature", temperature, 1)
        same_shape("temperature", temperature, targets.shape)
        if on_cpu and not (temperature > 0).all():
            raise ValueError(f"temperature must be > 0; given {float(temperature.min())}")
    elif not temperature > 0:
        raise ValueError(f"temperature must be > 0; given {temperature}")
    return temperature


def credit(
    rewards: Tensor | None,
    cu_groups: Tensor | None,
    advantages: Tensor | None,
    logp: Tensor,
    n_samples: int,
    options: GRPOOptions,
    *,
    values: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Rewards or advantages as the loss takes them; values: as check_offsets."""
    if (rewards is None) == (advantages is None):
        raise ValueError("give either rewards with cu_groups, or advantages; not both, not neither")
    if rewards is not None:
        if cu_groups is None:
            raise ValueError("cu_groups must be given with rewards")
        rewards = floating("rewards", rewards, 1)
        same_shape("rewards", rewards, (n_samples,))
        check_offsets("cu_groups", cu_groups, n_samples, values=values)
        return rewards.to(logp.dtype), None
    per_sample = tensor("advantages", advantages).shape == (n_samples,)
    if not per_sample and advantages.shape != logp.shape:
        raise ValueError(
            f"advantages must be [{n_samples}] or {list(logp.shape)}; "
            f"given {list(advantages.shape)}"
        )
    if options.loss_type == "vespo" and not per_sample:
        raise ValueError("advantages must be one per sample for loss_type vespo")
    return None, floating("advantages", advantages, advantages.dim()).to(logp.dtype)


def tensor(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor; given {type(x).__name__}")
    return x


def floating(name: str, x: Any, dim: int) -> Tensor:
    if tensor(name, x).dim() != dim or not x.is_floating_point():
        raise ValueError(
            f"{name} must be a float tensor in {dim} dimensions; given {list(x.shape)} {x.dtype}"
        )
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def like(name: str, x: Tensor | None, logp: Tensor) -> Tensor | None:
    if x is None:
        return None
    if isinstance(x, Tensor) and x.dtype == logp.dtype and x.shape == logp.shape:
        return x
    x = floating(name, x, logp.dim())
    same_shape(name, x, logp.shape)
    return x.to(logp.dtype)


def mask(name: str, x: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if x is None:
        return None
    if tensor(name, x).is_floating_point():
        raise ValueError(f"{name} must be bool or 0/1 integers; given {x.dtype}")
    same_shape(name, x, shape)
    # Values are looked at only on the CPU: on a device that would wait for it.
    if x.dtype != torch.bool and x.device.type == "cpu" and ((x != 0) & (x != 1)).any():
        raise ValueError(f"{name} must hold 0 and 1; given up to {int(x.max())}")
    return x.bool()


def same_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; given {list(x.shape)}")
