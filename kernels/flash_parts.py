"""Flash attention of one part of a packing, forward and backward, as each device has it.

Out and log-sum-exp that a backward is given may be those of a softmax over more keys than the
part's own: then the gradients are the part's share of the whole.
"""

import torch
from torch import Tensor

from .group_layout import Batch, GroupLayout, Varlen

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._flash_attention_forward
_cuda_backward = torch.ops.aten._flash_attention_backward


class CpuFlash:
    """Padded batches; bf16, f16, f32, f64. It has no heads that share keys: they are repeated."""

    @staticmethod
    def parts(layout: GroupLayout) -> list[Batch]:
        """The causal parts, which hold each row once, then those on prompts."""
        return layout.batches

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, part: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, d], k, v [U, H_kv, d] -> out [T, H, d], lse [T, H] f32 (f64 for f64)."""
        q, k, v = _batches(q, k, v, part.samples)
        out, lse = _cpu_forward(q, k, v, 0.0, part.causal, scale=scale)
        return _tokens(out), _tokens(lse)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Batch,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """-> dq [T, H, d], dk, dv [U, H_kv, d]; shapes as in forward."""
        shared = q.shape[1] // k.shape[1]
        q, k, v = _batches(q, k, v, part.samples)
        grad, out, lse = (_batch(x, part.samples) for x in (grad, out, lse))
        dq, dk, dv = _cpu_backward(grad, q, k, v, out, lse, 0.0, part.causal, scale=scale)
        dk, dv = (_tokens(x).unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))
        return _tokens(dq), dk, dv


class CudaFlash:
    """Sequences end to end; bf16 and f16, d a multiple of 8 up to 256, sm_80 and later."""

    @staticmethod
    def parts(layout: GroupLayout) -> list[Varlen]:
        """The causal part, which holds each row once, then that on prompts."""
        return layout.varlen

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, part: Varlen, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, d], k, v [U, H_kv, d] -> out [T, H, d], lse [T, H] f32."""
        out, lse, *_ = _cuda_forward(
            q, k, v, part.cu_queries, part.cu_keys, part.max_queries, part.max_keys, 0.0,
            part.causal, False, scale=scale,
        )  # fmt: skip
        return out, lse.T

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Varlen,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """-> dq [T, H, d], dk, dv [U, H_kv, d]; shapes as in forward."""
        # Read only with dropout.
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
        return _cuda_backward(
            grad, q, k, v, out, lse.T.contiguous(), part.cu_queries, part.cu_keys,
            part.max_queries, part.max_keys, 0.0, part.causal, state, unused, scale=scale,
        )  # fmt: skip


def _batches(q: Tensor, k: Tensor, v: Tensor, samples: int) -> tuple[Tensor, ...]:
    """[S R, heads, d] of each -> [S, H, R, d]."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    return tuple(_batch(x, samples) for x in (q, k, v))


def _batch(x: Tensor, samples: int) -> Tensor:
    """[S R, H, ...] -> [S, H, R, ...]."""
    return x.unflatten(0, (samples, -1)).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """[S, H, R, ...] -> [S R, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
