"""Top-k, top-p and min-p as cuts: the smallest key that they keep, and the last of its tokens."""

import triton
import triton.language as tl

from .sampling_passes import (
    is_kept,
    key_of,
    load_logits,
    locate,
    logit_of,
    sum_kept,
    tile_columns,
    weigh,
)

ROUNDS = tl.constexpr(16)  # two bits of a key in each


@triton.jit
def keep_likely(peak, min_p, temperature):
    """The key of the smallest logit whose probability is at least min_p of the largest."""
    bound = peak.to(tl.float64) + tl.log(min_p).to(tl.float64) * temperature
    rounded = tl.maximum(bound, -3.4e38).to(tl.float32)
    return key_of(rounded) + (rounded < bound).to(tl.uint32)


@triton.jit
def keep_count(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, top_k, least, last,
    LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The cut that leaves the `top_k` best of those that (least, last) keeps."""
    boundary = find_boundary(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, top_k.to(tl.float64), least, last,
        False, LANES, TALL,
    )  # fmt: skip
    above, _, ties = around(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, least, last, LANES, TALL
    )
    return keep_ties(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, top_k - above, ties,
        least, last, LANES, TALL,
    )  # fmt: skip


@triton.jit
def keep_mass(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, top_p, least, last,
    LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The cut that leaves the fewest best with `top_p` of the mass that (least, last) keeps."""
    total = sum_kept(row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, LANES, TALL)
    target = top_p * total
    boundary = find_boundary(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, target, least, last,
        True, LANES, TALL,
    )  # fmt: skip
    _, above, ties = around(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, least, last, LANES, TALL
    )
    each = weigh(logit_of(boundary), peak, inverse).to(tl.float64)
    wanted = tl.ceil((target - above) / tl.where(each > 0, each, 1.0))
    return keep_ties(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, tl.maximum(wanted, 1.0), ties,
        least, last, LANES, TALL,
    )  # fmt: skip


@triton.jit
def find_boundary(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, target, least, last,
    BY_MASS: tl.constexpr, LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The largest key from which on there is `target`: tokens, or mass; 0 if all are too few."""
    boundary = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(ROUNDS):
        one = tl.zeros([LANES], tl.float32)
        two, three = one, one
        for start in range(0, columns, LANES * TALL):
            column = start + tile_columns(LANES, TALL)
            z = load_logits(row_ptr, seen_ptr, penalty, column, columns)
            key = key_of(z)
            weight = weigh(z, peak, inverse) if BY_MASS else tl.full(z.shape, 1.0, tl.float32)
            weight = tl.where(is_kept(key, column, least, last), weight, 0.0)
            one += tl.sum(tl.where(key >= boundary + step, weight, 0.0), 0)
            two += tl.sum(tl.where(key >= boundary + 2 * step, weight, 0.0), 0)
            three += tl.sum(tl.where(key >= boundary + 3 * step, weight, 0.0), 0)
        reached = (tl.sum(one, 0) >= target).to(tl.uint32) + (tl.sum(two, 0) >= target)
        boundary += step * (reached + (tl.sum(three, 0) >= target))
        step = step >> 2
    return boundary


@triton.jit
def around(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, least, last,
    LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Of what a cut keeps: count and mass above a key, and how many have that key; f64."""
    nothing = tl.zeros([LANES], tl.float32)
    count, mass, ties = nothing, nothing, nothing
    for start in range(0, columns, LANES * TALL):
        column = start + tile_columns(LANES, TALL)
        z = load_logits(row_ptr, seen_ptr, penalty, column, columns)
        key = key_of(z)
        kept = is_kept(key, column, least, last)
        count += tl.sum(tl.where(kept & (key > boundary), 1.0, 0.0), 0)
        mass += tl.sum(tl.where(kept & (key > boundary), weigh(z, peak, inverse), 0.0), 0)
        ties += tl.sum(tl.where(kept & (key == boundary), 1.0, 0.0), 0)
    return (
        tl.sum(count, 0).to(tl.float64),
        tl.sum(mass, 0).to(tl.float64),
        tl.sum(ties, 0).to(tl.float64),
    )


@triton.jit
def keep_ties(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, boundary, wanted, ties, least, last,
    LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The cut (least, last), cut further: at `boundary`, of whose `ties` the first are wanted."""
    if boundary >= least:
        if wanted < ties:
            last = locate(
                row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, wanted - 1,
                boundary, True, LANES, TALL,
            )  # fmt: skip
        elif boundary > least:
            last = columns
        least = boundary
    return least, last
