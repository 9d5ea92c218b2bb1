"""The C++ sampler behind decode_ops.sample_tokens: tensors to arrays and back."""

from typing import Any

import torch
from torch import Tensor

from . import _C
from .cpu import _array, _matrix


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels/reference_decode.py::sample_tokens, for float32, bfloat16 and float16 logits.

    Raises ValueError for a row with NaN or +inf, or only -inf.
    """
    drawn = _C.sample_rows(
        *_matrix(logits),
        _column(uniform),
        _column(temperature),
        _column(top_k, torch.int64),
        _column(top_p),
        _column(min_p),
        _column(repetition_penalty),
        _array(seen),
    )
    tokens, logp_sampler, logp_processed = map(torch.from_numpy, drawn)
    return tokens, logp_sampler, logp_processed


def _column(x: Tensor | None, dtype: torch.dtype = torch.float64) -> Any:
    return None if x is None else _array(x.to(dtype))
