"""grpo-engine: GRPO on one card. As a backend, import this and call its functions on tensors.

Importing it imports torch alone; what needs more is imported when it is used.
"""

import importlib

from .errors import UserError
from .kernels.options import GRPOOptions
from .kernels.reference import LossOutput
from .ops import (
    check_offsets,
    group_advantages,
    grpo_loss,
    linear_grpo_loss,
    pack_groups,
    token_logprob,
)
from .rollout import Rollout, SamplingParams

_LAZY = {"GroupSampler": "sampler", "group_hidden": "packed"}

__all__ = [
    "GRPOOptions",
    "GroupSampler",
    "LossOutput",
    "Rollout",
    "SamplingParams",
    "UserError",
    "check_offsets",
    "group_advantages",
    "group_hidden",
    "grpo_loss",
    "linear_grpo_loss",
    "pack_groups",
    "token_logprob",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
