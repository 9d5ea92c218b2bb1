"""grpo-engine: GRPO on one card. As a backend, import this and call its functions on tensors.

A name brings what it needs when it is first used, and that is torch alone. Importing the package
brings nothing, so that the processes of reward functions are light.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from .packed import group_hidden
    from .rollout import Rollout, SamplingParams
    from .sampler import GroupSampler

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

_MODULES = {
    "GRPOOptions": "kernels.options",
    "GroupSampler": "sampler",
    "LossOutput": "kernels.reference",
    "Rollout": "rollout",
    "SamplingParams": "rollout",
    "UserError": "errors",
    "check_offsets": "ops",
    "group_advantages": "ops",
    "group_hidden": "packed",
    "grpo_loss": "ops",
    "linear_grpo_loss": "ops",
    "pack_groups": "ops",
    "token_logprob": "ops",
}


def __getattr__(name: str) -> object:
    if name == "_C":
        return _extension()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # found at once from now on
    return value


def _extension() -> object:
    try:
        return importlib.import_module("._C", __name__)
    except ModuleNotFoundError as error:
        from .errors import UserError

        raise UserError(
            f"the C++ extension is not built in {__path__[0]}: run pip install -e . in its parent "
            "folder, or start elsewhere to use the installed grpo-engine"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
