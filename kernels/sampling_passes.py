"""Passes over a row of logits: its peak, its mass, the bounds of filters, a place in its CDF.

A key is the unsigned integer of a logit, in the order of the floats. A cut (least, last) keeps the
logits whose key is above `least`, and of those that equal it the tokens up to `last`.
"""

import triton
import triton.language as tl

KEY_OF_LOWEST = tl.constexpr(0x00800000)  # of the lowest finite float: -inf is never kept
GONE = tl.constexpr(-87.3)  # e^x of less is 0


@triton.jit
def divide(x, y):
    """x / y for a scalar y, rounded as IEEE asks: tl.div_rn of a tile spills registers."""
    inverse = tl.div_rn(1.0, y)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, y, x), inverse, quotient)


@triton.jit
def load_logits(row_ptr, seen_ptr, penalty, column, columns):
    """z f32 of some columns, penalised; -inf outside of the row."""
    inside = (column >= 0) & (column < columns)
    z = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    if seen_ptr is not None:
        seen = tl.load(seen_ptr + column, mask=inside, other=0) != 0
        z = tl.where(seen, tl.where(z > 0, divide(z, penalty), z * penalty), z)
    return z


@triton.jit
def key_of(z):
    """-0 is 0."""
    bits = (z + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@triton.jit
def logit_of(key):
    """The inverse of key_of."""
    bits = tl.where(key >= 0x80000000, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weigh(z, peak, inverse):
    """e^((z - peak) / T)."""
    below = (z - peak) * inverse
    return tl.where(below < GONE, 0.0, tl.exp(below))


@triton.jit
def is_kept(key, column, least, last):
    return (key > least) | ((key == least) & (column <= last))


@triton.jit
def tile_columns(LANES: tl.constexpr, TALL: tl.constexpr):
    """[TALL, LANES]: 0, 1, 2, ... along the lanes."""
    return tl.arange(0, TALL)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def peak_of(row_ptr, seen_ptr, penalty, columns, LANES: tl.constexpr, TALL: tl.constexpr):
    top = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, columns, LANES * TALL):
        column = start + tile_columns(LANES, TALL)
        z = load_logits(row_ptr, seen_ptr, penalty, column, columns)
        top = tl.maximum(top, tl.max(z, 0))
    return tl.max(top, 0)


@triton.jit
def sum_all(row_ptr, peak, inverse, columns, LANES: tl.constexpr, TALL: tl.constexpr):
    """The sum of the weights of a row without penalty; f64, NaN if a logit is NaN."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, columns, LANES * TALL):
        column = start + tile_columns(LANES, TALL)
        e = weigh(load_logits(row_ptr, None, 1.0, column, columns), peak, inverse)
        total += tl.sum(tl.sum(e, 0), 0).to(tl.float64)
    return total


@triton.jit
def weights_of(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, only, column,
    TIES: tl.constexpr,
):  # fmt: skip
    """The weights of what a cut keeps; with TIES 1 for those whose key is `only`, else 0."""
    z = load_logits(row_ptr, seen_ptr, penalty, column, columns)
    key = key_of(z)
    kept = is_kept(key, column, least, last)
    if TIES:
        return tl.where(kept & (key == only), 1.0, 0.0)
    else:
        return tl.where(kept, weigh(z, peak, inverse), 0.0)


@triton.jit
def sum_kept(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last,
    LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The sum of the weights that a cut keeps, f64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, columns, LANES * TALL):
        e = weights_of(
            row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, least,
            start + tile_columns(LANES, TALL), False,
        )  # fmt: skip
        total += tl.sum(tl.sum(e, 0), 0).to(tl.float64)
    return total


@triton.jit
def locate(
    row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, target, only,
    TIES: tl.constexpr, LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The last token with a weight before which the weights add up to no more than `target`.

    First its tile, then its lanes' row in the tile, then the token; -1 if there is none.
    """
    running = tl.full([], 0.0, tl.float64)
    before, first = running, 0
    for start in range(0, columns, LANES * TALL):
        e = weights_of(
            row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, only,
            start + tile_columns(LANES, TALL), TIES,
        )  # fmt: skip
        mass = tl.sum(tl.sum(e, 0), 0).to(tl.float64)
        reached = (running <= target) & (mass > 0)
        first, before = tl.where(reached, start, first), tl.where(reached, running, before)
        running += mass
    running, tile = before, first
    for start in range(tile, tl.minimum(tile + LANES * TALL, columns), LANES):
        e = weights_of(
            row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, only,
            start + tl.arange(0, LANES), TIES,
        )  # fmt: skip
        mass = tl.sum(e, 0).to(tl.float64)
        reached = (running <= target) & (mass > 0)
        first, before = tl.where(reached, start, first), tl.where(reached, running, before)
        running += mass
    column = first + tl.arange(0, LANES)
    e = weights_of(
        row_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, only, column, TIES
    ).to(tl.float64)
    reached = (before + (tl.cumsum(e, 0) - e) <= target) & (e > 0)
    return tl.max(tl.where(reached, column, -1), 0)
