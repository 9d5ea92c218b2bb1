"""Attention of packed groups with softcap or a window, for which no flash kernel serves.

Scores exist for one block of queries at a time; the backward makes them again.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .group_layout import GroupLayout

BLOCK_BYTES = 64 << 20  # of the scores of a block
BLOCK_ROWS = 256  # at most: siblings in a block score each other for nothing


class Block(NamedTuple):
    """Consecutive queries of one group, and the keys that one of them sees."""

    queries: slice
    prompt: slice
    own: slice


class Mapping(NamedTuple):
    """How scores are made: softcap tanh(scale q.k / softcap), the last `window` positions only."""

    scale: float
    softcap: float | None
    window: int | None


class MaskedFn(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(ctx, q, k, v, layout, mapping):
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.mapping = layout, mapping
        out = q.new_empty(q.shape)
        for block in _blocks(layout, mapping.window, _block_rows(q, layout)):
            keys, values = _seen(k, block), _seen(v, block)
            out[block.queries] = _attend(
                q[block.queries], keys, values, _hidden(layout, block, mapping.window), mapping
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        layout, mapping = ctx.layout, ctx.mapping
        dq = q.new_empty(q.shape)
        # A key gathers from many blocks: in half precision the small ones would be lost.
        dk, dv = (x.new_zeros(x.shape, dtype=_exact(x)) for x in (k, v))
        for block in _blocks(layout, mapping.window, _block_rows(q, layout)):
            inputs = [q[block.queries], _seen(k, block), _seen(v, block)]
            inputs = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = _attend(*inputs, _hidden(layout, block, mapping.window), mapping)
            dq[block.queries], *shares = torch.autograd.grad(out, inputs, grad[block.queries])
            for into, share in zip((dk, dv), shares, strict=True):
                prompt = block.prompt.stop - block.prompt.start
                into[block.prompt] += share[:prompt]
                into[block.own] += share[prompt:]
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _block_rows(q: Tensor, layout: GroupLayout) -> int:
    fit = BLOCK_BYTES // (q.shape[1] * (layout.longest + BLOCK_ROWS) * _exact(q).itemsize)
    return max(1, min(BLOCK_ROWS, fit))


def _blocks(layout: GroupLayout, window: int | None, rows: int) -> Iterator[Block]:
    """All N queries, at most `rows` at a time."""
    reach = layout.tokens if window is None else window - 1
    for start, middle, stop in layout.groups:
        for first, end in ((start, middle), (middle, stop)):
            for row in range(first, end, rows):
                queries = slice(row, min(row + rows, end))
                begin = layout.segment_start(row)
                own = slice(max(begin, row - reach), queries.stop)
                # The query of the block that stands nearest to the prompt.
                begins_here = layout.segment_start(queries.stop - 1) > begin
                gap = 0 if begins_here else row - begin
                near = slice(min(middle, max(start, middle + gap - reach)), middle)
                yield Block(queries, near if row >= middle else slice(start, start), own)


def _seen(x: Tensor, block: Block) -> Tensor:
    return torch.cat([x[block.prompt], x[block.own]])


def _hidden(layout: GroupLayout, block: Block, window: int | None) -> Tensor:
    """[queries, keys] bool."""
    behind = layout.positions[block.queries, None] - _seen(layout.positions, block)
    completion = _seen(layout.completion, block)
    sibling = (completion >= 0) & (completion != layout.completion[block.queries, None])
    hidden = sibling | (behind < 0)
    return hidden if window is None else hidden | (behind >= window)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, mapping: Mapping) -> Tensor:
    """q [B, H, d], k, v [K, H_kv, d], hidden [B, K] -> [B, H, d]; inside in f32 or f64."""
    exact = _exact(q)
    q_heads = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3).to(exact)  # [H_kv, n, B, d]
    keys, values = (x.transpose(0, 1).to(exact) for x in (k, v))  # [H_kv, K, d]
    softcap = mapping.softcap
    scale = mapping.scale if softcap is None else mapping.scale / softcap
    scores = (scale * q_heads).flatten(1, 2) @ keys.transpose(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores)
    scores = scores.unflatten(1, q_heads.shape[1:3]).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1).flatten(1, 2) @ values
    return out.unflatten(1, q_heads.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
