"""Decode attention by flash-attn's kernel for paged caches, where it serves the shape.

Two calls: the prompts, with the queries of a group and of a key head folded into one sequence, and
the own tokens; merged by their log-sum-exps. No sync: a CUDA graph can capture it.
"""

from collections.abc import Iterator
from functools import cache
from importlib import metadata

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.torch_version import TorchVersion

from .paged_spans import new_token
from .reference_decode import DecodeTables

__all__ = ["group_decode", "installed", "serves", "specialisations"]

FLASH_PAGE = 256  # flash_attn_with_kvcache: "page_block_size must be a multiple of 256"
MOST_DIM = 256
APPEND = {"num_warps": 1}
MOST_QUERIES = 1024  # every row of the tables is given W queries: their memory grows with R W
# softcap came with 2.6. What follows 2.8.3.post1 looks at cache_seqlens on the host, for which the
# whole GPU is waited for and which no CUDA graph can capture.
FIRST, BEYOND = "2.6", "2.8.3.post2"


@triton.jit(do_not_specialize=[
    "k_ptr", "v_ptr", "suffix_table_ptr", "suffix_len_ptr", "slot_group_ptr",
    "k_slot", "k_head", "v_slot", "v_head", "suffix_width",
])  # fmt: skip
def append_kernel(
    k_ptr, v_ptr,  # [W, H_kv, d]
    k_pages_ptr, v_pages_ptr,  # [pages, page, H_kv, d], written
    suffix_table_ptr,  # [W, suffix_pages] i32
    suffix_len_ptr, slot_group_ptr,  # [W] i32
    k_slot, k_head, v_slot, v_head, suffix_width,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    own = tl.load(suffix_len_ptr + slot)
    live = (own > 0) & (tl.load(slot_group_ptr + slot) >= 0)
    if live:
        new_token(
            (k_ptr, v_ptr), slot * k_slot + head * k_head, slot * v_slot + head * v_head,
            (k_pages_ptr, v_pages_ptr), suffix_table_ptr + slot * suffix_width, own - 1, head,
            live, KV_HEADS, D, D_PAD, PAGE,
        )  # fmt: skip


def serves(q: Tensor, k_pages: Tensor, tables: DecodeTables, window: int | None) -> bool:
    """Whether `group_decode` of this module can be called; arguments as there, on a CUDA device.

    Its one window for all queries is not ours, so a window must reach over all that tables hold.
    """
    (slots, _, d), page = q.shape, k_pages.shape[1]
    rows, prefix_width = tables.prefix_table.shape
    return (
        usable(q.device, q.dtype)
        and d % 8 == 0
        and d <= MOST_DIM
        and page % FLASH_PAGE == 0
        and 0 < rows * slots <= MOST_QUERIES
        and (window is None or window >= page * (prefix_width + tables.suffix_table.shape[1]))
    )


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn computes on this CUDA device in this dtype; pages are of FLASH_PAGE."""
    halves = torch.bfloat16, torch.float16
    return installed() and dtype in halves and _capability(device) >= (8, 0)


# This and the next are asked by every layer in every step.
@cache
def installed() -> bool:
    """Whether there is a flash-attn that a CUDA graph can capture."""
    try:
        return FIRST <= TorchVersion(metadata.version("flash-attn")) < BEYOND
    except metadata.PackageNotFoundError:
        return False


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
    """One decode step by flash-attn; to be called where `serves` says so.

    Arguments and result as in group_attention.py; `window` hides nothing where it is served.
    Reference: kernels/reference_decode.py::group_decode.
    """
    from flash_attn import flash_attn_with_kvcache

    _append(k, v, k_pages, v_pages, tables)
    t, slots, kv_heads = tables, len(q), k_pages.shape[2]
    order, row = t.order.long(), t.slot_group.clamp(min=0).long()
    idle = (t.slot_group < 0) | (t.suffix_len == 0)
    ranks = torch.arange(slots, device=q.device)
    in_order = (t.cu_slots[:-1, None] + ranks).clamp(max=slots - 1)  # [R, W]
    by_key_head = q.unflatten(1, (kv_heads, -1)).transpose(1, 2)  # [W, H / H_kv, H_kv, d]
    folded = by_key_head[order[in_order]].flatten(1, 2)  # [R, W H / H_kv, H_kv, d]
    options = {
        "softmax_scale": scale, "causal": False, "softcap": softcap or 0.0,
        "return_softmax_lse": True,
    }  # fmt: skip
    prompt, prompt_lse = flash_attn_with_kvcache(
        folded, k_pages, v_pages, block_table=t.prefix_table,
        cache_seqlens=t.prefix_len.masked_fill(t.cu_slots.diff() == 0, 0), **options,
    )  # fmt: skip
    own, own_lse = flash_attn_with_kvcache(
        q[:, None], k_pages, v_pages, block_table=t.suffix_table,
        cache_seqlens=t.suffix_len.masked_fill(idle, 0), **options,
    )  # fmt: skip
    rank = torch.empty_like(order).scatter_(0, order, ranks) - t.cu_slots[row]
    rank = rank.clamp(0, slots - 1)  # of an idle slot: any
    prompt = prompt.unflatten(1, (slots, -1))[row, rank].transpose(1, 2).flatten(1, 2)
    prompt_lse = prompt_lse.unflatten(2, (slots, -1))[row, :, rank].flatten(1)
    merged = _merge(prompt, prompt_lse, own.squeeze(1), own_lse.squeeze(2))
    return merged.masked_fill(idle[:, None, None], 0).to(q.dtype)


def _append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, tables: DecodeTables) -> None:
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    slots, kv_heads, d = k.shape
    with torch.cuda.device_of(k):
        append_kernel[(slots, kv_heads)](
            k, v, k_pages, v_pages, tables.suffix_table, tables.suffix_len, tables.slot_group,
            *k.stride()[:2], *v.stride()[:2], tables.suffix_table.shape[1],
            KV_HEADS=kv_heads, D=d, D_PAD=triton.next_power_of_2(d), PAGE=k_pages.shape[1],
            **APPEND,
        )  # fmt: skip


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
    """Both [W, H, d] and [W, H]; in float32."""
    lse = torch.stack([lse_a, lse_b])
    # flash-attn's log-sum-exp of no keys is +inf.
    weight = lse.masked_fill(lse == torch.inf, -torch.inf).softmax(0)[..., None]
    return (weight * torch.stack([a, b]).float()).sum(0)


def specialisations() -> Iterator[tuple[str, triton.JITFunction, dict, dict, dict]]:
    """Copies of the kernel: name, function, signature, constexprs, compile options."""
    signature = {
        name: "constexpr" if name.isupper()
        else "*bf16" if name in ("k_ptr", "v_ptr", "k_pages_ptr", "v_pages_ptr")
        else "*i32" if name.endswith("_ptr") else "i32"
        for name in append_kernel.arg_names
    }  # fmt: skip
    for d in (80, 256):
        constexprs = {"KV_HEADS": 8, "D": d, "D_PAD": triton.next_power_of_2(d), "PAGE": FLASH_PAGE}
        yield f"append/bf16/{d}", append_kernel, signature, constexprs, APPEND
