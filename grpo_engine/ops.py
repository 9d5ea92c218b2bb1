"""The public ops: arguments are checked here, and here an implementation is chosen."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks
from .checks import check_offsets
from .decode_ops import sample_tokens as sample_tokens
from .implementation import IMPLEMENTATIONS as IMPLEMENTATIONS
from .implementation import implementation, triton_module
from .kernels import reference
from .kernels.options import GRPOOptions
from .kernels.reference import LossOutput
from .kernels.token_logprob import TILE_BYTES

# Ops inside the engine, with one implementation each.
head_logits = reference.head_logits
loss_normalizer = reference.default_normalizer


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
    rewards = checks.floating("rewards", rewards, 1)
    check_offsets("cu_groups", cu_groups, len(rewards))
    valid = checks.mask("valid", valid, rewards.shape)
    op = _loss_module(implementation("auto", rewards)).group_advantages
    return op(rewards, cu_groups, valid, options or GRPOOptions())


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tile_bytes: int = TILE_BYTES,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probs of chosen tokens from hidden states; the logits are never held.

    hidden: [N, D] f32, bf16, f16 (f64 with impl="torch"); weight: [V, D] of the same dtype.
    targets: [N] int64; bias: [V]; temperature: number or [N], > 0.
    softcap: z <- c tanh(z / c); logit_scale: factor of the logits before it.
    tile_bytes: size of the one tile of logits that is held (impl torch holds them all).
    impl: auto | triton | cpp | torch; auto: triton on CUDA, cpp on the CPU, torch for float64.
    GEMM units (2 N V D FLOP): 1 without gradient, 2 with a frozen head, 4 with a trained one.
    Returns log-prob [N] f32 in nats, differentiable, and entropy [N] f32 in nats, without gradient.
    Raises ValueError that names the argument. Reference: kernels/reference.py::token_logprob.
    """
    temperature = checks.head(hidden, weight, targets, bias, temperature, softcap, tile_bytes)
    head = bias, temperature, softcap, logit_scale
    impl = implementation(impl, hidden)
    if impl == "torch":
        return reference.token_logprob(hidden, weight, targets, *head)
    from .kernels.token_logprob import token_logprob as tiled

    return tiled(
        hidden, weight, targets, *head, make_rows=_row_backend(impl), tile_bytes=tile_bytes
    )


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
    impl: auto | triton | cpp | torch; auto: triton on CUDA, cpp on the CPU, torch for float64.
    Returns LossOutput(loss, metrics): a differentiable scalar, and detached scalar tensors.
    Raises ValueError that names the argument. Reference: kernels/reference.py::grpo_loss.
    """
    logp = checks.floating("logp", logp, 2 if cu_seqlens is None else 1)
    run = _checked_loss(
        logp, old_logp, ref_logp, rewards=rewards, cu_groups=cu_groups, cu_seqlens=cu_seqlens,
        options=options or GRPOOptions(), advantages=advantages, valid=valid, in_loss=in_loss,
        mask=mask, importance_ratio=importance_ratio, normalizer=normalizer,
        impl=implementation(impl, logp),
    )  # fmt: skip
    return run(logp)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    rewards: Tensor | None = None,
    cu_groups: Tensor | None = None,
    options: GRPOOptions | None = None,
    advantages: Tensor | None = None,
    valid: Tensor | None = None,
    in_loss: Tensor | None = None,
    mask: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tile_bytes: int = TILE_BYTES,
    impl: str = "auto",
) -> LossOutput:
    """grpo_loss of token_logprob in one go: a trained head costs 3 GEMM units, not 4 (f16: 4).

    hidden [N, D], weight [V, D], targets [N] and what belongs to the head: as token_logprob.
    old_logp, ref_logp [N], packed by cu_seqlens [S+1], and what belongs to the loss: as grpo_loss.
    Token level only: a loss whose token terms need the whole sample (importance_sampling_level
    "sequence", loss_type vespo) raises ValueError; for those call the two ops.
    Returns LossOutput, differentiable in hidden, weight and bias.
    Raises ValueError that names the argument. Reference: the two ops of kernels/reference.py.
    """
    options = options or GRPOOptions()
    if options.importance_sampling_level == "sequence" or options.loss_type == "vespo":
        raise ValueError(
            "linear_grpo_loss is for token-level losses; given loss_type "
            f"{options.loss_type} at level {options.importance_sampling_level}: "
            "call token_logprob and grpo_loss"
        )
    temperature = checks.head(hidden, weight, targets, bias, temperature, softcap, tile_bytes)
    impl = implementation(impl, hidden)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    loss_of = _checked_loss(
        hidden.new_empty(len(hidden), dtype=exact), old_logp, ref_logp, rewards=rewards,
        cu_groups=cu_groups, cu_seqlens=cu_seqlens, options=options, advantages=advantages,
        valid=valid, in_loss=in_loss, mask=mask, importance_ratio=importance_ratio,
        normalizer=normalizer, impl=impl,
    )  # fmt: skip
    head = bias, temperature, softcap, logit_scale
    if impl == "torch":
        return loss_of(reference.token_logprob(hidden, weight, targets, *head)[0])
    from .kernels.linear_grpo import linear_grpo_loss as fused

    rows = _row_backend(impl)
    return fused(
        hidden, weight, targets, *head, loss_of=loss_of, make_rows=rows, tile_bytes=tile_bytes
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


def _checked_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    *,
    options: GRPOOptions,
    impl: str,
    cu_seqlens: Tensor | None,
    rewards: Tensor | None,
    cu_groups: Tensor | None,
    advantages: Tensor | None,
    valid: Tensor | None,
    in_loss: Tensor | None,
    mask: Tensor | None,
    importance_ratio: Tensor | None,
    normalizer: float | Tensor | None,
) -> Callable[[Tensor], LossOutput]:
    """The loss as a function of log-probs that look like `logp`, all else checked and bound."""
    values = impl != "cpp"  # C++ looks at the offsets that it is given
    n_samples = checks.layout(logp, cu_seqlens, mask, values=values)
    if options.beta > 0 and ref_logp is None:
        raise ValueError(f"ref_logp must be given when beta > 0; beta is {options.beta}")
    rewards, advantages = checks.credit(
        rewards, cu_groups, advantages, logp, n_samples, options, values=values
    )
    if isinstance(normalizer, Tensor) and normalizer.numel() != 1:
        raise ValueError(f"normalizer must be a scalar; given {list(normalizer.shape)}")
    return functools.partial(
        _loss_module(impl).grpo_loss,
        old_logp=checks.like("old_logp", old_logp, logp),
        ref_logp=checks.like("ref_logp", ref_logp, logp),
        options=options,
        rewards=rewards,
        cu_groups=cu_groups,
        cu_seqlens=cu_seqlens,
        advantages=advantages,
        valid=checks.mask("valid", valid, (n_samples,)),
        in_loss=checks.mask("in_loss", in_loss, (n_samples,)),
        mask=checks.mask("mask", mask, logp.shape),
        importance_ratio=checks.like("importance_ratio", importance_ratio, logp),
        normalizer=normalizer,
    )


@functools.cache
def _loss_module(impl: str) -> ModuleType:
    """The module of this implementation's group_advantages and grpo_loss."""
    if impl == "torch":
        return reference
    if impl == "cpp":
        return importlib.import_module(".cpu", __package__)
    return triton_module("group_loss")


def _row_backend(impl: str) -> Callable[[], Any]:
    """What makes the head's GEMMs and row passes."""
    if impl == "cpp":
        return importlib.import_module(".cpu", __package__).CpuRows
    return triton_module("head_rows").TritonRows
