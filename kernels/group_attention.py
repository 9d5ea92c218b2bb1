"""Decode attention in pages: a tile of a group's queries reads the prompt's keys and values once.

Two launches. The first makes parts: a span of a prompt for as many slots of its group as fill a
tile, or a span of a slot's own tokens. The second joins the parts of a slot by log-sum-exp.
Lengths are read on the device and grids hang on the shapes alone, as a CUDA graph needs it.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_parts import own_part, prompt_part
from .reference_decode import DecodeTables

__all__ = ["group_decode", "specialisations"]

LOG2_E = math.log2(math.e)
CHUNK = 256  # the fewest keys whose reading pays for a part of its own
MOST_PARTS = 16  # of a prompt, and of a slot's own tokens
ENOUGH = 1024  # programs, of either kind: they fill every processor a few times over
MERGE = {"num_warps": 4}
MOST_DIM = 256
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Tile(NamedTuple):
    """What a program of the first launch holds at once."""

    rows: int  # queries, at most
    keys: int
    warps: int


# By bytes of a value and padded head dim. Two stages of keys and values lie in shared memory while
# a third one's page numbers come: two programs or more fit a multiprocessor of sm_86.
TILES = {
    (2, 64): Tile(32, 64, 4),
    (2, 128): Tile(32, 32, 4),
    (2, 256): Tile(32, 16, 4),
    (4, 64): Tile(16, 32, 8),
    (4, 128): Tile(16, 16, 8),
    (4, 256): Tile(16, 16, 8),
}
STAGES = 3


@triton.jit(do_not_specialize=[
    "q_ptr", "k_ptr", "v_ptr", "prefix_table_ptr", "prefix_len_ptr", "suffix_table_ptr",
    "suffix_len_ptr", "slot_group_ptr", "order_ptr", "cu_slots_ptr", "parts_ptr", "lse_ptr",
    "slots", "rows", "q_slot", "q_head", "k_slot", "k_head", "v_slot", "v_head",
    "prefix_width", "suffix_width", "prompt_parts", "own_parts", "scale", "softcap", "window",
])  # fmt: skip
def attend_kernel(
    q_ptr,  # [W, H, d]
    k_ptr, v_ptr,  # [W, H_kv, d]
    k_pages_ptr, v_pages_ptr,  # [pages, page, H_kv, d], written
    prefix_table_ptr,  # [R, prefix_pages] i32
    prefix_len_ptr,  # [R] i32
    suffix_table_ptr,  # [W, suffix_pages] i32
    suffix_len_ptr, slot_group_ptr, order_ptr,  # [W] i32
    cu_slots_ptr,  # [R+1] i32
    parts_ptr,  # [prompt_parts + own_parts, W, H, d] f32, written
    lse_ptr,  # [prompt_parts + own_parts, W, H] f32, written; in bits
    slots, rows, q_slot, q_head, k_slot, k_head, v_slot, v_head, prefix_width, suffix_width,
    prompt_parts, own_parts, scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    TILE_HEADS: tl.constexpr = min(HEADS // KV_HEADS, ROWS)
    BLOCKS: tl.constexpr = triton.cdiv(HEADS // KV_HEADS, TILE_HEADS)
    OWN_ROWS: tl.constexpr = max(16, triton.next_power_of_2(TILE_HEADS))
    at, part = tl.program_id(0), tl.program_id(2)
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    pages = (k_pages_ptr, v_pages_ptr)
    slot_tables = (suffix_len_ptr, slot_group_ptr)
    if part < prompt_parts:
        prompt_part(
            q_ptr, pages, (prefix_table_ptr, prefix_len_ptr, order_ptr, cu_slots_ptr), slot_tables,
            parts_ptr, lse_ptr, (at, kv_head, block, part), (q_slot, q_head, prefix_width),
            slots, rows, prompt_parts, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW,
            HEADS, KV_HEADS, D, D_PAD, PAGE, TILE_HEADS, ROWS, KEYS, CHUNK,
        )  # fmt: skip
    else:
        own_part(
            q_ptr, (k_ptr, v_ptr), pages, suffix_table_ptr, slot_tables,
            parts_ptr, lse_ptr, (at, kv_head, block, part - prompt_parts),
            (q_slot, q_head, k_slot, k_head, v_slot, v_head, suffix_width),
            slots, own_parts, prompt_parts, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW,
            HEADS, KV_HEADS, D, D_PAD, PAGE, TILE_HEADS, OWN_ROWS, KEYS, CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=[
    "parts_ptr", "lse_ptr", "suffix_len_ptr", "slot_group_ptr", "out_ptr", "slots", "parts",
])  # fmt: skip
def merge_kernel(
    parts_ptr,  # [parts, W, H, d] f32
    lse_ptr,  # [parts, W, H] f32, in bits
    suffix_len_ptr, slot_group_ptr,  # [W] i32
    out_ptr,  # [W, H, d], written
    slots, parts,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    live = (tl.load(suffix_len_ptr + slot) > 0) & (tl.load(slot_group_ptr + slot) >= 0)
    part, column = tl.arange(0, PARTS_PAD), tl.arange(0, D_PAD)
    at = (part * slots + slot) * HEADS + head
    lse = tl.load(lse_ptr + at, tl.where(live, part < parts, False), float("-inf"))
    weight = tl.exp2(lse - tl.where(live, tl.max(lse, 0), 0.0))
    loaded = (weight != 0)[:, None] & (column < D)[None, :]
    mean = tl.load(parts_ptr + at[:, None] * D + column[None, :], loaded, 0.0)
    mass = tl.where(live, tl.sum(weight, 0), 1.0)
    out = tl.sum(weight[:, None] * mean, 0) / mass
    out_at = (slot * HEADS + head) * D + column
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), column < D)


def group_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: DecodeTables,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One decode step in two launches, without a sync: writes the new keys and values, attends.

    q: [W, H, d], k, v: [W, H_kv, d], k_pages, v_pages: [pages, page, H_kv, d], contiguous; all of
    one dtype, f32, bf16 or f16; d <= 256. tables: contiguous int32. Sums in float32.
    Returns [W, H, d] in q's dtype; 0 for idle slots, for which nothing is written.
    Raises ValueError for other dtypes, shapes and layouts of the pages.
    Reference: kernels/reference_decode.py::group_decode.
    """
    _check(q, k, v, k_pages, v_pages)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (slots, heads, d), (_, page, kv_heads, _) = q.shape, k_pages.shape
    tile = _tile(q.dtype, d, slots * (heads // kv_heads))
    programs = kv_heads * triton.cdiv(heads // kv_heads, tile.rows)
    (rows, prefix_width), suffix_width = tables.prefix_table.shape, tables.suffix_table.shape[1]
    prompt_parts = _part_count(prefix_width * page, slots * programs)
    own_parts = _part_count(suffix_width * page, slots * programs)
    parts = prompt_parts + own_parts
    means = torch.empty(parts, slots, heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, slots, heads, dtype=torch.float32, device=q.device)
    out = torch.empty(slots, heads, d, dtype=q.dtype, device=q.device)
    shape = {"HEADS": heads, "D": d, "D_PAD": _padded(d)}
    with torch.cuda.device_of(q):
        attend_kernel[(slots, programs, parts)](
            q, k, v, k_pages, v_pages,
            tables.prefix_table, tables.prefix_len, tables.suffix_table, tables.suffix_len,
            tables.slot_group, tables.order, tables.cu_slots, means, lse,
            slots, rows, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            prefix_width, suffix_width, prompt_parts, own_parts,
            *_scalars(scale, softcap), window or 0,
            HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, **shape,
            KV_HEADS=kv_heads, PAGE=page, ROWS=tile.rows, KEYS=tile.keys, CHUNK=CHUNK,
            num_warps=tile.warps, num_stages=STAGES,
        )  # fmt: skip
        merge_kernel[(slots, heads)](
            means, lse, tables.suffix_len, tables.slot_group, out, slots, parts,
            **shape, PARTS_PAD=triton.next_power_of_2(parts), **MERGE,
        )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    dtypes = {x.dtype for x in (q, k, v, k_pages, v_pages)}
    if len(dtypes) > 1 or q.dtype not in DTYPES:
        raise ValueError(f"q, k, v and pages must share one of {list(DTYPES)}; given {dtypes}")
    (slots, heads, d), kv_heads = q.shape, k_pages.shape[2]
    if heads % kv_heads or d > MOST_DIM or k_pages.shape[3] != d:
        raise ValueError(
            f"H must be a multiple of H_kv and d at most {MOST_DIM}; "
            f"given q {list(q.shape)}, k_pages {list(k_pages.shape)}"
        )
    if not k.shape == v.shape == (slots, kv_heads, d):
        raise ValueError(f"k, v must be {[slots, kv_heads, d]}; given {k.shape}, {v.shape}")
    if k_pages.shape != v_pages.shape or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages and v_pages must be contiguous and of the same shape")


def _padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def _tile(dtype: torch.dtype, d: int, queries: int) -> Tile:
    tile = TILES[dtype.itemsize, max(64, _padded(d))]
    return tile._replace(rows=max(16, min(tile.rows, triton.next_power_of_2(queries))))


def _part_count(tokens: int, programs: int) -> int:
    return max(1, min(MOST_PARTS, triton.cdiv(ENOUGH, programs), triton.cdiv(tokens, CHUNK)))


def _scalars(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factors of q.k and of its tanh: the score in bits."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def specialisations() -> Iterator[tuple[str, triton.JITFunction, dict, dict, dict]]:
    """Copies of the kernels: name, function, signature, constexprs, compile options.

    All tiles, each without and with all that a model can ask for. Half precisions differ in no more
    than the names of instructions, so one copy of float16 stands for all.
    """
    for dtype, d, kv_heads in (
        (torch.bfloat16, 64, 8), (torch.bfloat16, 80, 1), (torch.bfloat16, 128, 8),
        (torch.bfloat16, 256, 8), (torch.float16, 128, 8), (torch.float32, 64, 8),
        (torch.float32, 128, 8), (torch.float32, 256, 8),
    ):  # fmt: skip
        kind, tile = DTYPES[dtype], _tile(dtype, d, 64)
        shape = {"HEADS": 32, "D": d, "D_PAD": _padded(d)}
        for masked in (True,) if kind == "fp16" else (False, True):
            name = f"attend/{kind}/{d}" + "/softcap/window" * masked
            constexprs = {
                "HAS_SOFTCAP": masked, "HAS_WINDOW": masked, **shape, "KV_HEADS": kv_heads,
                "PAGE": 16, "ROWS": tile.rows, "KEYS": tile.keys, "CHUNK": CHUNK,
            }  # fmt: skip
            options = {"num_warps": tile.warps, "num_stages": STAGES}
            yield name, attend_kernel, _signature(attend_kernel, kind), constexprs, options
        if d in (80, 256):
            constexprs = {**shape, "PARTS_PAD": 2 * MOST_PARTS}
            signature = _signature(merge_kernel, kind)
            yield f"merge/{kind}/{d}", merge_kernel, signature, constexprs, MERGE


def _signature(kernel: triton.JITFunction, kind: str) -> dict[str, str]:
    values = "q_ptr k_ptr v_ptr k_pages_ptr v_pages_ptr out_ptr".split()
    known = dict.fromkeys(values, f"*{kind}") | dict.fromkeys(["scale", "softcap"], "fp32")
    known |= dict.fromkeys(["parts_ptr", "lse_ptr"], "*fp32")
    return {
        name: known.get(
            name, "constexpr" if name.isupper() else "*i32" if name.endswith("_ptr") else "i32"
        )
        for name in kernel.arg_names
    }
