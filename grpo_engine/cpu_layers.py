"""Parts of a decoder layer in C++, for inference on the CPU: tensors to addresses.

All tensors are of one dtype and, but for x, contiguous: the caller answers for it. No gradients.
"""

import torch
from torch import Tensor

from . import _C

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., K], weight: [N, K], bias: [N] -> [..., N], summed in float32 and rounded once."""
    x = x.contiguous()
    columns, width = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != width:
        raise ValueError(
            f"x must be {weight.dtype} of {width} columns; given {x.dtype} {list(x.shape)}"
        )
    out = x.new_empty(*x.shape[:-1], columns)
    _C.linear(
        DTYPES[x.dtype], x.data_ptr(), width, weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), x.numel() // width, width, columns,
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, gemma: bool) -> Tensor:
    """x: [..., D], weight: [D] -> [..., D]: Llama's norm, or Gemma's by 1 + weight."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = len(weight)
    _C.rms_norm(
        DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width,
        epsilon, gemma,
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """SiLU(gate) * up, or GELU's tanh form; written over `gate`."""
    _C.gated(
        DTYPES[gate.dtype], gate.data_ptr(), up.data_ptr(), gate.data_ptr(), gate.numel(), gelu
    )
    return gate


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x: [N, H, d], cos, sin: [N, d]: rotated in place, halves of a head together."""
    rows, heads, dim = x.shape
    _C.rotate(DTYPES[x.dtype], x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, dim)
