"""Attention over a span of keys that stand in pages: device functions.

Scores are kept in bits (natural ones times log2 e), so that a weight is one exp2. The state of some
query rows is (peak, mass, total): the largest score [ROWS], the sum of 2^(score - peak) [ROWS] and
the sum of the values with these weights [ROWS, D_PAD], all float32.
"""

import triton
import triton.language as tl

from .row_softmax import FLOOR, tanh_and_slope

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def in_bits(product, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores from q.k; the factor log2 e is in softcap if there is one, else in scale."""
    if HAS_SOFTCAP:
        tanh, _ = tanh_and_slope(product * scale)
        return softcap * tanh
    else:
        return product * scale


@triton.jit
def address(page, token, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where a head's key or value of a token begins in [pages, PAGE, KV_HEADS, D]."""
    return ((page.to(tl.int64) * PAGE + token) * KV_HEADS + kv_head) * D


@triton.jit
def new_token(
    new,  # pointers to k and v of all slots
    k_at, v_at,  # where those of this slot and head begin
    pages, table_ptr, token, kv_head, write,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A head's k and v of the new token [D_PAD], f32; also written to its page where `write`."""
    column = tl.arange(0, D_PAD)
    k = tl.load(new[0] + k_at + column, column < D, 0.0)
    v = tl.load(new[1] + v_at + column, column < D, 0.0)
    page = tl.load(table_ptr + token // PAGE)
    to = address(page, token % PAGE, kv_head, KV_HEADS, D, PAGE) + column
    written = tl.where(write, column < D, False)
    tl.store(pages[0] + to, k, written)
    tl.store(pages[1] + to, v, written)
    return k.to(tl.float32), v.to(tl.float32)


@triton.jit
def part_of(first, last, part, parts, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """One of `parts` spans of [first, last), of CHUNK keys or more; those behind it are empty."""
    fair = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), parts), KEYS) * KEYS
    chunk = tl.maximum(fair, CHUNK)
    start = first + part * chunk
    return start, tl.minimum(start + chunk, last)


@triton.jit
def empty_state(ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """Nothing seen."""
    peak = tl.full([ROWS], FLOOR, tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def dot(a, b, total):
    """total + a b in float32."""
    if INTERPRETED:  # there tl.dot takes the bits of a bfloat16 for an integer
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def attend_span(
    q,  # [ROWS, D_PAD]
    state,
    pages,  # pointers to k_pages and v_pages
    table_ptr, kv_head,
    first, last,  # the span of keys
    lowest,  # [ROWS], the first key that a row sees
    scale, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_LOWEST: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The state after the keys [first, last) as well."""
    peak, mass, total = state
    column = tl.arange(0, D_PAD)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < last
        page = tl.load(table_ptr + key // PAGE, inside, 0)
        at = address(page, key % PAGE, kv_head, KV_HEADS, D, PAGE)[:, None] + column[None, :]
        loaded = inside[:, None] & (column < D)[None, :]
        k = tl.load(pages[0] + at, loaded, 0.0)
        score = dot(q, tl.trans(k), tl.zeros([q.shape[0], KEYS], tl.float32))
        score = in_bits(score, scale, softcap, HAS_SOFTCAP)
        seen = inside[None, :]
        if HAS_LOWEST:
            seen = seen & (key[None, :] >= lowest[:, None])
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - top[:, None])
        shrink = tl.exp2(peak - top)
        v = tl.load(pages[1] + at, loaded, 0.0)
        mass = mass * shrink + tl.sum(weight, 1)
        total = total * shrink[:, None]
        total = dot(weight.to(v.dtype), v, total)
        peak = top
    return peak, mass, total


@triton.jit
def store_part(parts_ptr, lse_ptr, at, valid, state, D: tl.constexpr, D_PAD: tl.constexpr):
    """Means of the values and log-sum-exps, to the rows `at` [ROWS]; of an empty part only -inf."""
    peak, mass, total = state
    empty = mass == 0  # not `mass > 0`: a NaN is to be seen
    mass = tl.where(empty, 1.0, mass)
    tl.store(lse_ptr + at, tl.where(empty, float("-inf"), peak + tl.log2(mass)), valid)
    column = tl.arange(0, D_PAD)
    stored = (valid & ~empty)[:, None] & (column < D)[None, :]
    tl.store(parts_ptr + at[:, None] * D + column[None, :], total / mass[:, None], stored)
