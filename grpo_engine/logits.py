"""Float32 logits from hidden states, step after step: what tokens are drawn from."""

import torch
from torch import Tensor
from torch.nn import functional

from . import _C, cpu_layers
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
        self._has_units = head.weight.dtype == torch.bfloat16 and _C.has_bfloat16_units()
        self._bias = None if head.bias is None else head.bias.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [n, D] -> [n, V] f32."""
        head = self._head
        if self._half and not self._on_cpu:
            logits = torch.mm(hidden.to(head.weight.dtype), self._weight.T, out_dtype=torch.float32)
            logits = logits if self._bias is None else logits + self._bias
        else:
            logits = self._float_products(hidden)
        if head.logit_scale != 1:
            logits = logits * head.logit_scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits

    def _float_products(self, hidden: Tensor) -> Tensor:
        # Where both factors came from bfloat16, its units multiply them without a rounding.
        exact = self._has_units and hidden.dtype == torch.bfloat16
        hidden = hidden.to(self._weight.dtype)
        if not self._on_cpu or self._weight.dtype != torch.float32:
            return functional.linear(hidden, self._weight, self._bias)
        if not exact:
            return cpu_layers.linear(hidden, self._weight, self._bias)
        matmul = torch.backends.mkldnn.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            return functional.linear(hidden, self._weight, self._bias)
        finally:
            matmul.fp32_precision = before
