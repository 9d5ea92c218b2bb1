"""Attention of packed groups: a prompt is computed once and read by all its completions.

Every segment attends causally to itself, the completions of a group also, all together, to its
prompt; the two are joined by their log-sum-exp. The backward of a flash kernel knows no gradient of
the log-sum-exp, so autograd must not see the join: each part's backward is given the joined output
and the joined log-sum-exp, with which it computes its share of the whole softmax's gradients.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .flash_parts import CpuFlash, CudaFlash
from .group_layout import GroupLayout
from .masked_attention import Mapping, MaskedFn

Flash = type[CpuFlash] | type[CudaFlash]


class FlashFn(torch.autograd.Function):
    """Saves q, k, v, the output and its log-sum-exp [N, H]."""

    @staticmethod
    def forward(ctx, q, k, v, layout, scale, flash):
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in flash.parts(layout):
            found = flash.forward(
                part.queries.take(q), part.keys.take(k), part.keys.take(v), part, scale
            )
            if not part.causal:
                found = _join(part.queries.take(out), part.queries.take(lse), *found)
            for into, x in zip((out, lse), found, strict=True):
                part.queries.put(into, x)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.flash = layout, scale, flash
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        for part in ctx.flash.parts(ctx.layout):
            rows, keys = part.queries, part.keys
            shares = ctx.flash.backward(
                rows.take_gradient(grad), rows.take(q), keys.take(k), keys.take(v),
                rows.take(out), rows.take(lse), part, ctx.scale,
            )  # fmt: skip
            for into, share, at in zip((dq, dk, dv), shares, (rows, keys, keys), strict=True):
                (at.put if part.causal else at.add)(into, share)
        return dq, dk, dv, None, None, None


def _join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmaxes over disjoint keys as one: out [T, H, d], lse [T, H]."""
    weight = torch.sigmoid(other_lse - lse)[..., None]
    joined = out.to(lse.dtype).lerp(other.to(lse.dtype), weight)
    return joined.to(out.dtype), torch.logaddexp(lse, other_lse)


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: GroupLayout,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of packed groups: each group's prompt once, then its completions.

    q: [N, H, d]; k, v: [N, H_kv, d] of one dtype, any strides. H_kv divides H.
    layout: of the N rows, on the same device. scale: of q.k. softcap: of scores (Gemma 2).
    window: a token sees the last `window` positions, its own included.
    Returns [N, H, d], once differentiable. Memory grows with N, not with N * N. float32 on CUDA,
    softcap, and a window shorter than the longest prompt with completion take blocks of scores, all
    else flash kernels.
    Raises ValueError for shapes that do not fit.
    reference: kernels/reference_decode.py::grouped_attention
    """
    _check(q, k, v, layout, window)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bites = window is not None and window < layout.longest
    if softcap is None and not bites and _has_flash(q):
        return FlashFn.apply(q, k, v, layout, scale, CudaFlash if q.is_cuda else CpuFlash)
    return MaskedFn.apply(q, k, v, layout, Mapping(scale, softcap, window if bites else None))


def _has_flash(q: Tensor) -> bool:
    if not q.is_cuda:
        return q.device.type == "cpu"
    head = q.shape[-1]
    half = q.dtype in (torch.bfloat16, torch.float16) and head % 8 == 0 and head <= 256
    return half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _check(q: Tensor, k: Tensor, v: Tensor, layout: GroupLayout, window: int | None) -> None:
    heads, head = q.shape[1:]
    if len(q) != layout.tokens or k.shape != v.shape or k.shape != (len(q), k.shape[1], head):
        raise ValueError(
            f"q [N, H, d], k and v [N, H_kv, d] with N = {layout.tokens}; given "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if heads % k.shape[1]:
        raise ValueError(f"H_kv must divide H; given {k.shape[1]} and {heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must be of one dtype; given {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1; given {window}")
