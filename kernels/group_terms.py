"""One sample of the group loss: its tokens, their terms and derivatives: device functions."""

import triton
import triton.language as tl

from .group_flags import (
    FROM_REWARDS,
    HAS_IMPORTANCE,
    HAS_IN_LOSS,
    HAS_MASK,
    HAS_OLD,
    HAS_VALID,
    PADDED,
    PER_TOKEN,
    RATIO_WEIGHTS_KL,
)
from .group_stats import sample_advantage
from .reference import LOG_RATIO_BOUND, VESPO_LOG_MIN

BOUND = tl.constexpr(LOG_RATIO_BOUND)
LOG_W_MIN = tl.constexpr(VESPO_LOG_MIN)


@triton.jit
def bounded(x, low, high):
    """clamp as torch has it: NaN stays. Also where its gradient is not zero."""
    return tl.where(x < low, low, tl.where(x > high, high, x)), (x >= low) & (x <= high)


@triton.jit
def counted(mask_ptr, at, inside, flags):
    """The tokens that count."""
    has_mask = tl.where((flags & HAS_MASK) != 0, inside, False)
    return inside & (tl.load(mask_ptr + at, mask=has_mask, other=1) != 0)


@triton.jit
def load_tokens(tensors, at, m, own_advantage, flags):
    """logp, old, advantage and importance ratio; 0, 0, 0 and 1 where masked."""
    logp_ptr, old_ptr, _, importance_ptr, advantages_ptr = tensors
    per_token = tl.where((flags & PER_TOKEN) != 0, m, False)
    has_importance = tl.where((flags & HAS_IMPORTANCE) != 0, m, False)
    logp = tl.load(logp_ptr + at, mask=m, other=0.0)
    old = tl.load(old_ptr + at, mask=m, other=0.0)
    of_token = tl.load(advantages_ptr + at, mask=per_token, other=0.0)
    advantage = tl.where(per_token, of_token, tl.where(m, own_advantage, 0.0))
    importance = tl.load(importance_ptr + at, mask=has_importance, other=1.0)
    return logp, old, advantage, importance


@triton.jit
def clipped_term(ratio, advantage, low, high, delta):
    """-min(min(ratio, delta) A, clamp(ratio, low, high) A) and its derivative by the ratio."""
    free = tl.where(ratio > delta, delta, ratio)
    kept, within = bounded(ratio, low, high)
    is_free = free * advantage < kept * advantage
    moves = tl.where(is_free, ratio <= delta, within)
    return -tl.where(is_free, free, kept) * advantage, tl.where(moves, -advantage, 0.0)


@triton.jit
def policy_term(
    logp, ratio, advantage, importance,
    moves,  # where the bound of the log-ratio lets a gradient through
    sample_weight,  # vespo's phi; the slope of a sample that has one ratio
    limits, TERM: tl.constexpr, SEQUENCE: tl.constexpr,
):  # fmt: skip
    """The policy term of tokens and its derivative by logp."""
    low, high, delta, gate_pos, gate_neg = limits
    if TERM == "cispo":
        slope = -tl.where(ratio > high, high, ratio) * advantage * importance
        term = slope * logp
    elif TERM == "vespo":
        slope = -sample_weight * advantage
        term = slope * logp
    else:
        if TERM == "sapo":
            tau = tl.where(advantage > 0, gate_pos, gate_neg)
            gate = tl.sigmoid(tau * (ratio - 1))
            term = -advantage * 4 / tau * gate
            by_ratio = -advantage * 4 * gate * (1 - gate)
        else:
            term, by_ratio = clipped_term(ratio, advantage, low, high, delta)
        term *= importance
        if SEQUENCE:
            slope = tl.where(moves, sample_weight, 0.0)
        else:
            slope = tl.where(moves, by_ratio * ratio * importance, 0.0)
    return term, slope


@triton.jit
def kl_term(logp, ref, token_ratio, moves, estimator, flags):
    """The estimated KL to the reference and its derivative by logp."""
    linear, square, exponential = estimator
    x, inside = bounded(ref - logp, -BOUND, BOUND)
    grown = tl.exp(x)
    kl = exponential * (grown - 1) - linear * x + square * (x * x / 2)
    slope = tl.where(inside, linear - exponential * grown - square * x, 0.0)
    weighted = (flags & RATIO_WEIGHTS_KL) != 0
    weight = tl.where(weighted, token_ratio, 1.0)
    return kl * weight, weight * (slope + tl.where(weighted & moves, kl, 0.0))


@triton.jit
def count_tokens(mask_ptr, row, length, used, flags, BLOCK: tl.constexpr):
    """The tokens of a sample that count."""
    count = 0.0
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        m = counted(mask_ptr, row + t, tl.where(used, t < length, False), flags)
        count += tl.sum(m.to(tl.float32))
    return count


@triton.jit
def sweep(
    tensors, row, length, used, own_advantage, flags, TERM: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over a sample: log-ratios, tokens, A c where A > 0, A c elsewhere."""
    log_ratios, count, above, below = 0.0, 0.0, 0.0, 0.0
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        m = counted(tensors[2], row + t, tl.where(used, t < length, False), flags)
        logp, old, advantage, importance = load_tokens(tensors, row + t, m, own_advantage, flags)
        log_ratio, _ = bounded(logp - old, -BOUND, BOUND)
        if TERM == "vespo":
            log_importance, _ = bounded(tl.log(importance), LOG_W_MIN, BOUND)
            log_ratio += log_importance
        credit = advantage * importance
        log_ratios += tl.sum(log_ratio)
        count += tl.sum(m.to(tl.float32))
        above += tl.sum(tl.where(advantage > 0, credit, 0.0))
        below += tl.sum(tl.where(advantage > 0, 0.0, credit))
    return log_ratios, count, above, below


@triton.jit
def sequence_ratio(log_ratios, count, above, below, limits):
    """The one ratio of a sample (GSPO), and the slope that it gives each of its tokens."""
    low, high, delta, _, _ = limits
    count = tl.maximum(count, 1.0)
    ratio = tl.exp(log_ratios / count)
    _, of_gain = clipped_term(ratio, 1.0, low, high, delta)
    _, of_loss = clipped_term(ratio, -1.0, low, high, delta)
    return ratio, (of_gain * above - of_loss * below) * ratio / count


@triton.jit
def vespo_weight(log_w, own_advantage, gate_pos, gate_neg, decay_pos, decay_neg):
    """phi = exp(lambda + k log w - lambda w), k and lambda by the sign of the advantage."""
    log_w, _ = bounded(log_w, LOG_W_MIN, BOUND)
    gate = tl.where(own_advantage >= 0, gate_pos, gate_neg)
    decay = tl.where(own_advantage >= 0, decay_pos, decay_neg)
    return tl.exp(decay + gate * log_w - decay * tl.exp(log_w))


@triton.jit
def tokens_of(cu_seqlens_ptr, sample, n_samples, width, flags):
    """First token and length of a sample."""
    exists = sample < n_samples
    if (flags & PADDED) != 0:
        row = sample.to(tl.int64) * width
        length = tl.where(exists, width, 0)
    else:
        begin = tl.load(cu_seqlens_ptr + sample, mask=exists, other=0)
        row = begin.to(tl.int64)
        length = tl.load(cu_seqlens_ptr + sample + 1, mask=exists, other=0) - begin
    return row, length


@triton.jit
def credit_of(tensors, statistics, sample, n_samples, n_groups, flags):
    """Advantage of a sample, whether its tokens are in the loss, 1 for a group with signal."""
    rewards_ptr, valid_ptr, in_loss_ptr, advantages_ptr, cu_groups_ptr = tensors
    exists = sample < n_samples
    signals = 0.0
    if (flags & FROM_REWARDS) != 0:
        own_advantage, used, _, is_first, signal = sample_advantage(
            rewards_ptr, valid_ptr, cu_groups_ptr, sample, n_samples, n_groups, flags, statistics
        )  # fmt: skip
        signals = (is_first & signal).to(tl.float32)
    else:
        per_sample = exists & ((flags & PER_TOKEN) == 0)
        own_advantage = tl.load(advantages_ptr + sample, mask=per_sample, other=0.0)
        has_valid = exists & ((flags & HAS_VALID) != 0)
        used = tl.load(valid_ptr + sample, mask=has_valid, other=1) != 0
    has_in_loss = exists & ((flags & HAS_IN_LOSS) != 0)
    used &= exists & (tl.load(in_loss_ptr + sample, mask=has_in_loss, other=1) != 0)
    return own_advantage, used, signals


@triton.jit
def _is_bad(x):
    return 1 - (tl.abs(x) < float("inf")).to(tl.float32)


@triton.jit
def token_losses(
    tensors, ref_ptr, dlogp_ptr, row, length, used, own_advantage, sample_ratio, sample_weight,
    scale,  # weight of a token of this sample
    limits, beta, estimator, flags,
    TERM: tl.constexpr, SEQUENCE: tl.constexpr, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the tokens of a sample; what they add to the loss and the metrics."""
    zero = tl.zeros([BLOCK], tl.float32)
    loss, kl_sum, ratio_sum, clip_low, clip_high = zero, zero, zero, zero, zero
    advantage_sum, tokens, nonfinite = zero, zero, zero
    ratio_min = tl.full([BLOCK], float("inf"), tl.float32)
    ratio_max = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        m = counted(tensors[2], row + t, tl.where(used, t < length, False), flags)
        logp, old, advantage, importance = load_tokens(tensors, row + t, m, own_advantage, flags)
        log_ratio, moves = bounded(logp - old, -BOUND, BOUND)
        token_ratio = tl.exp(log_ratio)
        ratio = tl.where(m, sample_ratio, 1.0) if SEQUENCE else token_ratio
        term, slope = policy_term(
            logp, ratio, advantage, importance, moves, sample_weight, limits, TERM, SEQUENCE
        )
        nonfinite += _is_bad(logp) + _is_bad(advantage) + _is_bad(importance)
        nonfinite += tl.where((flags & HAS_OLD) != 0, _is_bad(old), 0.0)
        if HAS_REF:
            ref = tl.load(ref_ptr + row + t, mask=m, other=0.0)
            kl, kl_slope = kl_term(logp, ref, token_ratio, moves, estimator, flags)
            term += beta * kl
            slope += beta * kl_slope
            kl_sum += kl
            nonfinite += _is_bad(ref)
        tl.store(dlogp_ptr + row + t, tl.where(m, scale * slope, 0.0), mask=t < length)
        loss += tl.where(m, term, 0.0)
        ratio_sum += tl.where(m, ratio, 0.0)
        ratio_min = tl.minimum(ratio_min, tl.where(m, ratio, float("inf")))
        ratio_max = tl.maximum(ratio_max, tl.where(m, ratio, float("-inf")))
        clip_low += ((ratio < limits[0]) & (advantage < 0)).to(tl.float32)
        clip_high += ((ratio > limits[1]) & (advantage > 0)).to(tl.float32)
        advantage_sum += tl.abs(advantage)
        tokens += m.to(tl.float32)
    low, high = tl.sum(clip_low), tl.sum(clip_high)
    means = (tl.sum(kl_sum), tl.sum(ratio_sum), low, high, low + high, tl.sum(advantage_sum))
    rest = (scale * tl.sum(loss), tl.min(ratio_min), tl.max(ratio_max))
    return means, tl.sum(tokens), tl.sum(nonfinite), rest
