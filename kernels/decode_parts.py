"""The parts of a decode step: a span of a prompt, a span of own tokens: device functions."""

import triton
import triton.language as tl

from .paged_spans import attend_span, empty_state, in_bits, new_token, part_of, store_part


@triton.jit
def prompt_part(
    q_ptr, pages, tables, slot_tables, parts_ptr, lse_ptr, place, strides, slots,
    rows,  # of groups
    parts, scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE_HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A span of a prompt for the slots order[at], order[at + 1], ..., if a tile begins at `at`."""
    at, kv_head, head_block, part = place
    q_slot, q_head, width = strides
    table_ptr, prefix_len_ptr, order_ptr, cu_slots_ptr = tables
    suffix_len_ptr, slot_group_ptr = slot_tables
    REPEAT: tl.constexpr = HEADS // KV_HEADS
    TILE_SLOTS: tl.constexpr = ROWS // TILE_HEADS
    if at < tl.load(cu_slots_ptr + rows):
        row = tl.load(slot_group_ptr + tl.load(order_ptr + at))
        if (at - tl.load(cu_slots_ptr + row)) % TILE_SLOTS == 0:
            count = tl.minimum(tl.load(cu_slots_ptr + row + 1) - at, TILE_SLOTS)
            i, column = tl.arange(0, ROWS), tl.arange(0, D_PAD)
            in_block = head_block * TILE_HEADS + i % TILE_HEADS
            valid = (i // TILE_HEADS < count) & (in_block < REPEAT)
            slot = tl.load(order_ptr + at + i // TILE_HEADS, valid, 0)
            head = kv_head * REPEAT + in_block
            q_at = (slot * q_slot + head * q_head)[:, None] + column[None, :]
            q = tl.load(q_ptr + q_at, valid[:, None] & (column < D)[None, :], 0.0)

            prompt = tl.load(prefix_len_ptr + row)
            first, lowest = 0, i
            if HAS_WINDOW:
                own = tl.load(suffix_len_ptr + slot, valid, 0)
                lowest = tl.where(valid, prompt + own - window, prompt)
                first = tl.maximum(tl.min(lowest, 0), 0)
            first, last = part_of(first, prompt, part, parts, CHUNK, KEYS)
            state = attend_span(
                q, empty_state(ROWS, D_PAD), pages, table_ptr + row * width, kv_head,
                first, last, lowest, scale, softcap,
                HAS_SOFTCAP, HAS_WINDOW, KV_HEADS, D, D_PAD, PAGE, KEYS,
            )  # fmt: skip
            to = (part * slots + slot) * HEADS + head
            store_part(parts_ptr, lse_ptr, to, valid, state, D, D_PAD)


@triton.jit
def own_part(
    q_ptr, new, pages, table_ptr, slot_tables, parts_ptr, lse_ptr, place, strides, slots, parts,
    parts_before,  # of the prompt
    scale, softcap, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE_HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A span of a slot's own tokens; the first part has the new token too, and writes it."""
    slot, kv_head, head_block, part = place
    q_slot, q_head, k_slot, k_head, v_slot, v_head, width = strides
    suffix_len_ptr, slot_group_ptr = slot_tables
    REPEAT: tl.constexpr = HEADS // KV_HEADS
    own = tl.load(suffix_len_ptr + slot)
    if (own > 0) & (tl.load(slot_group_ptr + slot) >= 0):
        i, column = tl.arange(0, ROWS), tl.arange(0, D_PAD)
        in_block = head_block * TILE_HEADS + i
        valid = (i < TILE_HEADS) & (in_block < REPEAT)
        head = kv_head * REPEAT + in_block
        q_at = slot * q_slot + (head * q_head)[:, None] + column[None, :]
        q = tl.load(q_ptr + q_at, valid[:, None] & (column < D)[None, :], 0.0)

        table_ptr += slot * width
        k_at, v_at = slot * k_slot + kv_head * k_head, slot * v_slot + kv_head * v_head
        has_new = part == 0
        write = has_new & (head_block == 0)
        k, v = new_token(
            new, k_at, v_at, pages, table_ptr, own - 1, kv_head, write, KV_HEADS, D, D_PAD, PAGE
        )
        score = in_bits(tl.sum(q.to(tl.float32) * k[None, :], 1), scale, softcap, HAS_SOFTCAP)
        peak, mass, total = empty_state(ROWS, D_PAD)
        peak = tl.where(has_new, score, peak)
        mass = tl.where(has_new, 1.0, mass)
        total = tl.where(has_new, v[None, :], total)

        first = 0
        if HAS_WINDOW:
            first = tl.maximum(own - window, 0)
        first, last = part_of(first, own - 1, part, parts, CHUNK, KEYS)
        state = attend_span(
            q, (peak, mass, total), pages, table_ptr, kv_head, first, last, i, scale, softcap,
            HAS_SOFTCAP, False, KV_HEADS, D, D_PAD, PAGE, KEYS,
        )  # fmt: skip
        to = ((parts_before + part) * slots + slot) * HEADS + head
        store_part(parts_ptr, lse_ptr, to, valid, state, D, D_PAD)
