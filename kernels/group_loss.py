"""The group loss in one launch: rewards and token log-probs -> loss, its gradient, all metrics.

One program per sample. Only what changes the code path compiles a kernel of its own: the token
term (clipped, cispo, sapo, vespo), one ratio per sample instead of per token (clipped only), and
whether a reference is read: 10 specialisations in all. Everything else is a runtime number.

The last program to finish adds up the partial sums of all, in their order: no float atomics, and
two runs are equal in every bit. Traffic: logp, old and ref in, dlogp out, 16 B a token.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradient import attach_gradient
from .group_flags import (
    COUNT_TOKENS,
    FROM_REWARDS,
    HAS_IMPORTANCE,
    HAS_IN_LOSS,
    HAS_MASK,
    HAS_OLD,
    MEAN_OVER_TOKENS,
    NORMALIZER_GIVEN,
    NORMALIZER_IS_TENSOR,
    PADDED,
    PER_TOKEN,
    RATIO_WEIGHTS_KL,
    pack_flags,
)
from .group_stats import (
    group_advantages,
    group_advantages_kernel,
    statistics_flags,
    statistics_limits,
)
from .group_sums import PARTIALS, RESULTS, finish, write_partials
from .group_terms import (
    count_tokens,
    credit_of,
    sequence_ratio,
    sweep,
    token_losses,
    tokens_of,
    vespo_weight,
)
from .options import CLIPPED_LOSSES, GRPOOptions
from .reference import LossOutput

__all__ = ["group_advantages", "grpo_loss", "specialisations"]

BLOCK = 512  # tokens at once
LAUNCH = {"num_warps": 4, "maxnreg": 128}  # with 128, four programs fit a multiprocessor
KL_ESTIMATORS = {"k1": (1.0, 0.0, 0.0), "k2": (0.0, 1.0, 0.0), "k3": (1.0, 0.0, 1.0)}


@triton.jit(do_not_specialize=[  # a slice of a batch may begin anywhere and have any size
    "logp_ptr", "old_ptr", "ref_ptr", "dlogp_ptr", "mask_ptr", "importance_ptr", "advantages_ptr",
    "rewards_ptr", "valid_ptr", "in_loss_ptr", "cu_seqlens_ptr", "cu_groups_ptr", "normalizer_ptr",
    "partials_ptr", "ticket_ptr", "loss_ptr", "results_ptr",
    "n_samples", "n_groups", "width", "flags",
])  # fmt: skip
def group_loss_fwd_kernel(
    logp_ptr, old_ptr, ref_ptr,  # [N] or [S, T] f32
    dlogp_ptr,  # as logp, written; not divided by the normalizer
    mask_ptr,  # as logp, bool
    importance_ptr,  # as logp, f32
    advantages_ptr,  # [S] or as logp, f32
    rewards_ptr,  # [S] f32
    valid_ptr, in_loss_ptr,  # [S] bool
    cu_seqlens_ptr,  # [S+1] i32
    cu_groups_ptr,  # [P+1] i32
    normalizer_ptr,  # [1] f32
    partials_ptr,  # [PARTIALS, S] f32, written
    ticket_ptr,  # [1] i32, 0 before and after
    loss_ptr,  # [] f32, written
    results_ptr,  # [RESULTS] f32, written
    n_samples, n_groups,
    width,  # T, when padded
    flags,
    epsilon_std, min_std, advantage_clip,
    low, high,  # clip range of the ratio; for cispo -inf and its cap
    delta,
    gate_pos, gate_neg,  # sapo's temperatures, vespo's k
    decay_pos, decay_neg,  # vespo's lambda
    beta,
    kl_linear, kl_square, kl_exponential,  # weights of -x, x^2 / 2 and exp(x) - 1
    normalizer,  # a number that is given, or the factor of a count
    TERM: tl.constexpr, SEQUENCE: tl.constexpr, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row, length = tokens_of(cu_seqlens_ptr, sample, n_samples, width, flags)
    credit = (rewards_ptr, valid_ptr, in_loss_ptr, advantages_ptr, cu_groups_ptr)
    statistics = (epsilon_std, min_std, advantage_clip)
    own_advantage, used, signals = credit_of(credit, statistics, sample, n_samples, n_groups, flags)
    tensors = (logp_ptr, old_ptr, mask_ptr, importance_ptr, advantages_ptr)
    limits = (low, high, delta, gate_pos, gate_neg)

    count = length.to(tl.float32)
    sample_ratio, sample_weight = 1.0, 0.0
    if SEQUENCE or TERM == "vespo":
        log_ratios, count, above, below = sweep(
            tensors, row, length, used, own_advantage, flags, TERM, BLOCK
        )
        if SEQUENCE:
            sample_ratio, sample_weight = sequence_ratio(log_ratios, count, above, below, limits)
        else:
            sample_weight = vespo_weight(
                log_ratios, own_advantage, gate_pos, gate_neg, decay_pos, decay_neg
            )
    elif ((flags & MEAN_OVER_TOKENS) != 0) & ((flags & HAS_MASK) != 0):
        count = count_tokens(mask_ptr, row, length, used, flags, BLOCK)
    scale = tl.where((flags & MEAN_OVER_TOKENS) != 0, 1 / tl.maximum(count, 1.0), 1.0)

    estimator = (kl_linear, kl_square, kl_exponential)
    means, tokens, nonfinite, rest = token_losses(
        tensors, ref_ptr, dlogp_ptr, row, length, used, own_advantage, sample_ratio, sample_weight,
        scale, limits, beta, estimator, flags, TERM, SEQUENCE, HAS_REF, BLOCK,
    )  # fmt: skip
    counts = (tokens, used.to(tl.float32), nonfinite, signals)
    write_partials(partials_ptr, means + counts + rest, sample, n_samples)
    tl.debug_barrier()  # the sums of all threads come before the ticket of one
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        finish(
            partials_ptr, normalizer_ptr, loss_ptr, results_ptr,
            n_samples, n_groups, flags, normalizer,
        )  # fmt: skip
        tl.store(ticket_ptr, 0)


def _limits(o: GRPOOptions) -> tuple[float, ...]:
    """The options of the token term, from `low` to `decay_neg`."""
    low, high = 1 - o.epsilon, 1 + o.clip_high
    if o.loss_type == "cispo":
        low, high = -math.inf, o.epsilon_high
    gates = o.sapo_temperature_pos, o.sapo_temperature_neg
    if o.loss_type == "vespo":
        gates = o.vespo_k_pos, o.vespo_k_neg
    delta = math.inf if o.delta is None else o.delta
    return tuple(map(float, (low, high, delta, *gates, o.vespo_lambda_pos, o.vespo_lambda_neg)))


def _normalizer(o: GRPOOptions, given: float | Tensor | None) -> float:
    if given is None:
        return float(o.max_completion_length) if o.loss_type == "dr_grpo" else 1.0
    return 1.0 if isinstance(given, Tensor) else float(given)


def _constexprs(o: GRPOOptions) -> dict[str, object]:
    term = "clipped" if o.loss_type in CLIPPED_LOSSES else o.loss_type
    sequence = o.importance_sampling_level == "sequence"
    return {"TERM": term, "SEQUENCE": sequence, "HAS_REF": o.beta > 0, "BLOCK": BLOCK}


@functools.cache
def _ticket(device: torch.device, stream: int) -> Tensor:
    """A counter that every launch leaves at 0; launches of one stream come one after another."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def group_loss_fwd(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    options: GRPOOptions,
    rewards: Tensor | None,
    cu_groups: Tensor | None,
    cu_seqlens: Tensor | None,
    advantages: Tensor | None,
    valid: Tensor | None,
    in_loss: Tensor | None,
    mask: Tensor | None,
    importance_ratio: Tensor | None,
    normalizer: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], dlogp like logp (times the normalizer), and RESULTS as a vector."""
    assert logp.dtype == torch.float32
    logp = logp.detach().contiguous()
    n_samples = len(logp) if cu_seqlens is None else len(cu_seqlens) - 1
    n_groups = 0 if cu_groups is None else len(cu_groups) - 1
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(logp.device, torch.float32)
    flags = statistics_flags(options, valid) + pack_flags(
        (PADDED, cu_seqlens is None),
        (FROM_REWARDS, rewards is not None),
        (PER_TOKEN, advantages is not None and advantages.shape != (n_samples,)),
        (HAS_OLD, old_logp is not None),
        (HAS_MASK, mask is not None),
        (HAS_IMPORTANCE, importance_ratio is not None),
        (HAS_IN_LOSS, in_loss is not None),
        (RATIO_WEIGHTS_KL, options.use_bias_correction_kl),
        (MEAN_OVER_TOKENS, options.loss_type in ("grpo", "sapo")),
        (COUNT_TOKENS, options.loss_type not in ("grpo", "sapo", "luspo", "dr_grpo")),
        (NORMALIZER_GIVEN, normalizer is not None),
        (NORMALIZER_IS_TENSOR, isinstance(normalizer, Tensor)),
    )

    def given(x: object, dtype: torch.dtype = torch.float32) -> Tensor:
        # What is missing is never read, so any memory will do; without old the policy is its own.
        return x.to(dtype).contiguous() if isinstance(x, Tensor) else results.view(dtype)

    stream = torch.cuda.current_stream(logp.device).cuda_stream if logp.is_cuda else 0
    dlogp = torch.empty_like(logp)
    results = logp.new_empty(len(RESULTS))
    loss = logp.new_empty(())
    with torch.cuda.device_of(logp):
        group_loss_fwd_kernel[(max(n_samples, 1),)](
            logp, logp if old_logp is None else given(old_logp), given(ref_logp), dlogp,
            given(mask, torch.bool), given(importance_ratio), given(advantages),
            given(rewards), given(valid, torch.bool), given(in_loss, torch.bool),
            given(cu_seqlens, torch.int32), given(cu_groups, torch.int32), given(normalizer),
            logp.new_empty(PARTIALS.value, n_samples), _ticket(logp.device, stream), loss, results,
            n_samples, n_groups, 0 if cu_seqlens is not None else logp.shape[1], flags,
            *statistics_limits(options), *_limits(options),
            float(options.beta), *KL_ESTIMATORS[options.kl_estimator],
            _normalizer(options, normalizer),
            **_constexprs(options), **LAUNCH,
        )  # fmt: skip
    return loss, dlogp, results


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    *,
    options: GRPOOptions,
    rewards: Tensor | None = None,
    cu_groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
    valid: Tensor | None = None,
    in_loss: Tensor | None = None,
    mask: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """The group loss (equations: README) with its gradient, in one launch and without a sync.

    logp, old_logp, ref_logp, importance_ratio: [N] with cu_seqlens [S+1] i32, or [S, T]; f32.
    mask: as logp, bool; rewards: [S] f32 with cu_groups [P+1] i32, or advantages: [S] or as logp.
    valid, in_loss: [S] bool; normalizer: number or scalar tensor.
    Returns LossOutput: the loss, differentiable in logp, and the metrics, scalars on the device.
    Takes arguments that have been checked. Reference: kernels/reference.py::grpo_loss.
    """
    loss, dlogp, results = group_loss_fwd(
        logp, old_logp, ref_logp, options, rewards, cu_groups, cu_seqlens, advantages,
        valid, in_loss, mask, importance_ratio, normalizer,
    )  # fmt: skip
    loss = attach_gradient(logp, loss, dlogp, results[RESULTS.index("normalizer")])
    hidden = {"normalizer", "loss"} | ({"no_signal"} if rewards is None else set())
    return LossOutput(
        loss,
        lambda: {n: x for n, x in zip(RESULTS, results.unbind(), strict=True) if n not in hidden},
    )


def specialisations() -> Iterator[tuple[str, triton.JITFunction, dict, dict, dict]]:
    """All copies of the kernels: name, function, signature, constexprs, compile options."""
    kinds = [GRPOOptions(importance_sampling_level=level) for level in ("token", "sequence")]
    kinds += [GRPOOptions(loss, epsilon_high=2.0) for loss in ("cispo", "sapo", "vespo")]
    for options in kinds:
        for beta in (0.0, 0.04):
            constexprs = _constexprs(replace(options, beta=beta))
            name = f"group_loss/{constexprs['TERM']}"
            name += "/sequence" * constexprs["SEQUENCE"] + "/ref" * constexprs["HAS_REF"]
            signature = _signature(group_loss_fwd_kernel)
            yield name, group_loss_fwd_kernel, signature, constexprs, LAUNCH
    signature = _signature(group_advantages_kernel)
    yield "group_advantages", group_advantages_kernel, signature, {}, {"num_warps": 1}


def _signature(kernel: triton.JITFunction) -> dict[str, str]:
    kinds = {
        "*i1": "mask_ptr valid_ptr in_loss_ptr signal_ptr",
        "*i32": "cu_seqlens_ptr cu_groups_ptr ticket_ptr",
        "i32": "n_samples n_groups width flags",
        "constexpr": "TERM SEQUENCE HAS_REF BLOCK",
    }
    known = {name: kind for kind, names in kinds.items() for name in names.split()}
    numbers = {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in kernel.arg_names}
    return {name: known.get(name, number) for name, number in numbers.items()}
