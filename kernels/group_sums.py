"""Partial sums of the samples -> the loss, its normalizer and the metrics: device functions."""

import triton
import triton.language as tl

from .group_flags import COUNT_TOKENS, NORMALIZER_GIVEN, NORMALIZER_IS_TENSOR

# Rows of the partial sums, and of the results.
RESULTS = (
    "kl ratio_mean clip_low clip_high clip_region advantage_abs "  # means over tokens
    "tokens samples nonfinite no_signal loss ratio_min ratio_max normalizer"
).split()
ADVANTAGE, TOKENS, SAMPLES, NO_SIGNAL, LOSS, RATIO, RATIO_MIN, RATIO_MAX, NORMALIZER = (
    tl.constexpr(RESULTS.index(name))
    for name in (
        "advantage_abs tokens samples no_signal loss ratio_mean ratio_min ratio_max normalizer"
    ).split()
)
PARTIALS = tl.constexpr(RESULTS.index("normalizer"))  # the rows before it
REDUCE_BLOCK = tl.constexpr(64)  # samples at once in the last program


@triton.jit
def write_partials(partials_ptr, sums, sample, n_samples):
    """A column of partials [PARTIALS, S]: what one sample adds."""
    for row in tl.static_range(PARTIALS):
        tl.store(partials_ptr + row * n_samples + sample, sums[row], mask=sample < n_samples)


@triton.jit
def _row(totals, ROW: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 16) == ROW, totals, 0.0))


@triton.jit
def finish(
    partials_ptr, normalizer_ptr, loss_ptr, results_ptr, n_samples, n_groups, flags, normalizer
):
    """Adds up the partial sums, always in the same order; writes the loss and RESULTS."""
    row = tl.arange(0, 16)
    sums = tl.zeros([16, REDUCE_BLOCK], tl.float32)
    low = tl.full([REDUCE_BLOCK], float("inf"), tl.float32)
    high = tl.full([REDUCE_BLOCK], float("-inf"), tl.float32)
    for start in range(0, n_samples, REDUCE_BLOCK):
        i = start + tl.arange(0, REDUCE_BLOCK)
        inside = i < n_samples
        at = partials_ptr + row[:, None] * n_samples + i[None, :]
        is_sum = (row <= LOSS)[:, None] & inside[None, :]
        # .cg: other processors wrote these, and the L1 of this one cannot know.
        sums += tl.load(at, is_sum, 0.0, cache_modifier=".cg")
        at = partials_ptr + RATIO_MIN * n_samples + i
        low = tl.minimum(low, tl.load(at, inside, float("inf"), cache_modifier=".cg"))
        at = partials_ptr + RATIO_MAX * n_samples + i
        high = tl.maximum(high, tl.load(at, inside, float("-inf"), cache_modifier=".cg"))
    totals = tl.sum(sums, axis=1)

    tokens = _row(totals, TOKENS)
    unit = tl.maximum(tl.where((flags & COUNT_TOKENS) != 0, tokens, _row(totals, SAMPLES)), 1.0)
    if (flags & NORMALIZER_GIVEN) != 0:
        is_tensor = (flags & NORMALIZER_IS_TENSOR) != 0
        unit = tl.load(normalizer_ptr, mask=is_tensor, other=1.0)
    normalizer *= unit
    tl.store(loss_ptr, _row(totals, LOSS) / normalizer)

    values = tl.where(row <= ADVANTAGE, totals / tl.maximum(tokens, 1.0), totals)
    values = tl.where(row == RATIO, tl.where(tokens > 0, values, 1.0), values)
    values = tl.where(row == NO_SIGNAL, 1 - totals / n_groups, values)
    tl.store(results_ptr + row, values, mask=row < LOSS)
    ratio = tl.where(tokens > 0, _row(totals, RATIO), 1.0)
    # Minimum and maximum skip a NaN, which the sum has kept.
    lowest = tl.where(tokens > 0, tl.min(low), 1.0)
    tl.store(results_ptr + RATIO_MIN, tl.where(ratio == ratio, lowest, ratio))
    highest = tl.where(tokens > 0, tl.max(high), 1.0)
    tl.store(results_ptr + RATIO_MAX, tl.where(ratio == ratio, highest, ratio))
    tl.store(results_ptr + NORMALIZER, normalizer)
