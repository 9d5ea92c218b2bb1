"""The public ops: arguments are checked here, and here an implementation is chosen."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels import reference
from .kernels.options import GRPOOptions
from .kernels.reference import LossOutput

IMPLEMENTATIONS = ("auto", "torch")

# Ops inside the engine, with one implementation each.
head_logits = reference.head_logits
sample_tokens = reference.sample_tokens
loss_normalizer = reference.default_normalizer
HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def group_advantages(
    rewards: Tensor,
    cu_groups: Tensor,
    valid: Tensor | None = None,
    options: GRPOOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages relative to the group (DeepSeekMath, section 4.1; options as in GRPOOptions).

    rewards: [S] float; a reward that is not finite is never valid.
    cu_groups: [P+1] int32; sample offsets of the groups.
    valid: [S] bool; the samples that enter the statistics, all by default.
    Returns advantages [S] in the dtype of the rewards (float32 for half types), exactly 0 in a
    group without signal and for samples that are not valid, and signal [P] bool.
    Raises ValueError that names the argument. Reference: kernels/reference.py::group_advantages.
    """
    rewards = _floating("rewards", rewards, 1)
    check_offsets("cu_groups", cu_groups, len(rewards))
    valid = _mask("valid", valid, rewards.shape)
    return reference.group_advantages(rewards, cu_groups, valid, options or GRPOOptions())


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probs of chosen tokens from hidden states, with float32 logits.

    hidden: [N, D] f32, bf16, f16 (f64 with impl="torch"); weight: [V, D] of the same dtype.
    targets: [N] int64; bias: [V]; temperature: number or [N], > 0.
    softcap: z <- c tanh(z / c); logit_scale: factor of the logits before it.
    Returns log-prob [N] in nats, differentiable, and entropy [N] in nats, without gradient.
    Raises ValueError that names the argument. Reference: kernels/reference.py::token_logprob.
    """
    _check_impl(impl)
    for name, x in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        _tensor(name, x)
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
    if isinstance(temperature, Tensor):
        temperature = _floating("temperature", temperature, 1)
        _same_shape("temperature", temperature, targets.shape)
        if on_cpu and not (temperature > 0).all():
            raise ValueError(f"temperature must be > 0; given {float(temperature.min())}")
    elif not temperature > 0:
        raise ValueError(f"temperature must be > 0; given {temperature}")
    if bias is not None:
        _same_shape("bias", _tensor("bias", bias), weight.shape[:1])
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0; given {softcap}")
    return reference.token_logprob(hidden, weight, targets, bias, temperature, softcap, logit_scale)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    *,
    rewards: Tensor | None = None,
    cu_groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    options: GRPOOptions | None = None,
    advantages: Tensor | None = None,
    valid: Tensor | None = None,
    in_loss: Tensor | None = None,
    mask: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    impl: str = "auto",
) -> LossOutput:
    """The GRPO loss over token log-probs, with its metrics.

    logp: [N] packed, with cu_seqlens [S+1] int32, or [S, T] padded, with mask [S, T] bool; nats.
    old_logp: as logp, or None: on-policy, the ratio is 1. ref_logp: as logp; needed if beta > 0.
    rewards: [S] with cu_groups [P+1]; or advantages: [S] or one per token. Both is an error.
    valid, in_loss: [S] bool; who enters the statistics and who the loss (default: the valid).
    importance_ratio: as logp; truncated sampler/trainer ratio, weights the policy term.
    normalizer: number or scalar tensor that replaces the default denominator, so that any split
    into micro-batches accumulates to the same gradient.
    Returns LossOutput(loss, metrics): a differentiable scalar, and detached scalar tensors.
    Raises ValueError that names the argument. Reference: kernels/reference.py::grpo_loss.
    """
    _check_impl(impl)
    options = options or GRPOOptions()
    logp, n_samples = _check_layout(logp, cu_seqlens, mask)
    old_logp = _like("old_logp", old_logp, logp)
    ref_logp = _like("ref_logp", ref_logp, logp)
    if options.beta > 0 and ref_logp is None:
        raise ValueError(f"ref_logp must be given when beta > 0; beta is {options.beta}")
    rewards, advantages = _check_credit(rewards, cu_groups, advantages, logp, n_samples, options)
    if isinstance(normalizer, Tensor) and normalizer.numel() != 1:
        raise ValueError(f"normalizer must be a scalar; given {list(normalizer.shape)}")
    return reference.grpo_loss(
        logp,
        old_logp,
        ref_logp,
        options=options,
        rewards=rewards,
        cu_groups=cu_groups,
        cu_seqlens=cu_seqlens,
        advantages=advantages,
        valid=_mask("valid", valid, (n_samples,)),
        in_loss=_mask("in_loss", in_loss, (n_samples,)),
        mask=_mask("mask", mask, logp.shape),
        importance_ratio=_like("importance_ratio", importance_ratio, logp),
        normalizer=normalizer,
    )


def pack_groups(
    prompt_len: Any,
    completion_len: Any,
    cu_groups: Any,
    token_budget: int,
    shared_prompt: bool = True,
) -> list[list[tuple[int, int, int]]]:
    """Ragged groups into micro-batches under a token budget, groups whole (C++).

    prompt_len: [P], completion_len: [S], cu_groups: [P+1]; integers (arrays, tensors or lists).
    shared_prompt: a group pays for its prompt once, instead of once per sample.
    Returns micro-batches, each a list of (group, first_sample, last_sample_exclusive). First-fit
    decreasing: at most 11/9 OPT + 6/9 micro-batches. A group is split only when it alone exceeds
    the budget. Raises ValueError for bad offsets and for a sample that alone exceeds the budget.
    """
    import numpy as np

    from . import _C

    def int32(name: str, x: Any) -> "np.ndarray":
        given = np.asarray(x)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"{name} must hold integers; given {given.dtype}")
        if given.size and max(abs(int(given.min())), abs(int(given.max()))) >= 2**31:
            raise ValueError(f"{name} must fit into int32; given up to {given.max()}")
        return np.ascontiguousarray(given, dtype=np.int32)

    return _C.pack_groups(
        int32("prompt_len", prompt_len),
        int32("completion_len", completion_len),
        int32("cu_groups", cu_groups),
        token_budget,
        shared_prompt,
    )


def check_offsets(name: str, offsets: Tensor, total: int) -> None:
    """Raises ValueError unless `offsets` is int32, starts at 0, never falls and ends at `total`.

    The values are looked at only on the CPU: on a device that would wait for it.
    """
    _tensor(name, offsets)
    if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name} must be int32 offsets in one dimension; "
            f"given {list(offsets.shape)} {offsets.dtype}"
        )
    if offsets.device.type != "cpu":
        return
    values = offsets.tolist()
    if values[0] != 0 or values[-1] != total or values != sorted(values):
        raise ValueError(f"{name} must start at 0, never fall and end at {total}; given {values}")


def _check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}; given {impl!r}")


def _check_layout(
    logp: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, int]:
    logp = _floating("logp", logp, 2 if cu_seqlens is None else 1)
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, len(logp))
        return logp, len(cu_seqlens) - 1
    if mask is None:
        raise ValueError("mask must be given with padded logp [S, T]")
    return logp, len(logp)


def _check_credit(
    rewards: Tensor | None,
    cu_groups: Tensor | None,
    advantages: Tensor | None,
    logp: Tensor,
    n_samples: int,
    options: GRPOOptions,
) -> tuple[Tensor | None, Tensor | None]:
    if (rewards is None) == (advantages is None):
        raise ValueError("give either rewards with cu_groups, or advantages; not both, not neither")
    if rewards is not None:
        if cu_groups is None:
            raise ValueError("cu_groups must be given with rewards")
        rewards = _floating("rewards", rewards, 1)
        _same_shape("rewards", rewards, (n_samples,))
        check_offsets("cu_groups", cu_groups, n_samples)
        return rewards, None
    per_sample = _tensor("advantages", advantages).shape == (n_samples,)
    if not per_sample and advantages.shape != logp.shape:
        raise ValueError(
            f"advantages must be [{n_samples}] or {list(logp.shape)}; "
            f"given {list(advantages.shape)}"
        )
    if options.loss_type == "vespo" and not per_sample:
        raise ValueError("advantages must be one per sample for loss_type vespo")
    return None, _floating("advantages", advantages, advantages.dim())


def _tensor(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor; given {type(x).__name__}")
    return x


def _floating(name: str, x: Any, dim: int) -> Tensor:
    if _tensor(name, x).dim() != dim or not x.is_floating_point():
        raise ValueError(
            f"{name} must be a float tensor in {dim} dimensions; given {list(x.shape)} {x.dtype}"
        )
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _like(name: str, x: Tensor | None, logp: Tensor) -> Tensor | None:
    if x is None:
        return None
    x = _floating(name, x, logp.dim())
    _same_shape(name, x, logp.shape)
    return x


def _mask(name: str, x: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if x is None:
        return None
    if _tensor(name, x).is_floating_point():
        raise ValueError(f"{name} must be bool or 0/1 integers; given {x.dtype}")
    _same_shape(name, x, shape)
    # Values are looked at only on the CPU: on a device that would wait for it.
    if x.dtype != torch.bool and x.device.type == "cpu" and ((x != 0) & (x != 1)).any():
        raise ValueError(f"{name} must hold 0 and 1; given up to {int(x.max())}")
    return x.bool()


def _same_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}; given {list(x.shape)}")
