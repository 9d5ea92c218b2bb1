"""Float32 logits from hidden states, step after step: what tokens are drawn from."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear

from .forward import Head


class LogitHead:
    """The head as `kernels/reference.py::head_logits` defines it, for many calls without gradient.

    Products of half-precision numbers are summed in float32 and never rounded to half again.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self.vocab, self.width = head.weight.shape
        self._half = head.weight.dtype.itemsize < 4
        # The CPU has no GEMM from half precision to float32; there a float32 copy serves a call.
        self._on_cpu = head.weight.device.type == "cpu"
        self._weight = head.weight.float() if self._on_cpu else head.weight
        self._bias = None if head.bias is None else head.bias.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [n, D] -> [n, V] f32."""
        head = self._head
        if self._half and not self._on_cpu:
            logits = torch.mm(hidden.to(head.weight.dtype), self._weight.T, out_dtype=torch.float32)
            logits = logits if self._bias is None else logits + self._bias
        else:
            exact = head.weight.dtype == hidden.dtype == torch.bfloat16
            with _bfloat16_products(exact):
                logits = linear(hidden.to(self._weight.dtype), self._weight, self._bias)
        if head.logit_scale != 1:
            logits = logits * head.logit_scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits


@contextmanager
def _bfloat16_products(exact: bool) -> Iterator[None]:
    """float32 GEMMs by bfloat16 units, which is exact where both factors came from bfloat16."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if exact:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
