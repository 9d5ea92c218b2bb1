"""What lies between the raw product of the head's GEMM and the logits, and what a row gives."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class LogitMap:
    """z_v = cap((a_v + bias_v) * logit_scale) * inv_temperature; a = hidden . W_v, from the GEMM.

    cap(x) = softcap tanh(x / softcap), or x without a softcap. slope_v = d z_v / d a_v.
    """

    bias: Tensor | None  # [V] f32
    inv_temperature: Tensor  # [C] f32
    softcap: float | None
    logit_scale: float


class RowStats(NamedTuple):
    """One number a row, in nats."""

    logp: Tensor  # [C] f32; log-probability of the target
    entropy: Tensor  # [C] f32
    lse: Tensor  # [C] f32; log-sum-exp of the logits
    target_weight: Tensor | None  # [C] f32; slope_y (1 - p_y); None unless the gradient was wanted
