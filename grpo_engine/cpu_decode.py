"""Decode attention over shared pages in C++: tensors to addresses."""

import functools

import torch
from torch import Tensor

from . import _C
from .cpu_layers import DTYPES
from .kernels.reference_decode import DecodeTables


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
    """One decode step as kernels/reference_decode.py::group_decode, without gradient.

    q: [W, H, d]; k, v: [W, H_kv, d]; float32, bfloat16 or float16, on the CPU, the last dimension
    contiguous; what is strided before it is read in place.
    k_pages, v_pages: [pages, page, H_kv, d] of the same dtype, contiguous; written to.
    tables: int32, contiguous; the values may change between calls, the tensors are kept.
    scale, softcap > 0: of the scores; window >= 1: tokens.
    Sums are float32; the bits of a slot's result hang neither on the other slots nor on the
    number of threads. Returns [W, H, d], contiguous, 0 for idle slots.
    Raises ValueError that names the argument, also for tables that point outside the pages.
    """
    pages = _shape("k_pages", k_pages, 4)
    slots, heads, dim = _shape("q", q, 3)
    kv_heads = pages[2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of {kv_heads} heads; given {heads}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0; given {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1; given {window}")
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        raise ValueError(f"q must be one of {', '.join(DTYPES.values())}; given {q.dtype}")
    out = torch.empty(slots, heads, dim, dtype=q.dtype)
    _C.group_decode(
        _prepared(tables),
        dtype,
        (slots, heads, kv_heads, dim, pages[0], pages[1]),
        _view("q", q, q, (slots, heads, dim)),
        _view("k", k, q, (slots, kv_heads, dim)),
        _view("v", v, q, (slots, kv_heads, dim)),
        _pool("k_pages", k_pages, q, (*pages[:3], dim)),
        _pool("v_pages", v_pages, q, (*pages[:3], dim)),
        out.data_ptr(),
        scale,
        softcap,
        window,
    )
    return out


def _shape(name: str, x: Tensor, dims: int) -> torch.Size:
    if x.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions; given {list(x.shape)}")
    return x.shape


def _view(name: str, x: Tensor, q: Tensor, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Address and strides of slots and heads."""
    _check(name, x, q, shape)
    slot, head, element = x.stride()
    if element != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension; its stride: {element}")
    return x.data_ptr(), slot, head


def _pool(name: str, x: Tensor, q: Tensor, shape: tuple[int, ...]) -> int:
    _check(name, x, q, shape)
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides: {x.stride()}")
    return x.data_ptr()


def _check(name: str, x: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype != q.dtype or not x.is_cpu:
        raise ValueError(
            f"{name} must be {list(shape)} {q.dtype} on cpu; "
            f"given {list(x.shape)} {x.dtype} on {x.device}"
        )


@functools.lru_cache(maxsize=8)
def _prepared(tables: DecodeTables) -> "_C.DecodeTables":
    """The arrays behind the tensors, checked once."""
    arrays = {}
    for name, x in vars(tables).items():
        if x.dtype != torch.int32 or not x.is_cpu or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 on cpu; given {x.dtype} {x.device}")
        arrays[name] = x.numpy()
    return _C.DecodeTables(**arrays)
