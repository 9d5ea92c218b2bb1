"""Which implementation of an op runs: the choice is made in one place."""

import functools
import importlib
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "cpp", "torch")


def implementation(impl: str, x: Tensor) -> str:
    """The implementation that runs; ValueError for one that can't run on this tensor."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}; given {impl!r}")
    device = x.device.type
    if impl == "auto":
        if x.dtype == torch.float64 or device not in ("cpu", "cuda"):
            return "torch"
        return "cpp" if device == "cpu" else triton_or_torch()
    if impl != "torch" and x.dtype == torch.float64:
        raise ValueError(f"float64 goes only with impl 'torch'; given {impl!r}")
    if impl == "cpp" and device != "cpu":
        raise ValueError(f"impl 'cpp' needs CPU tensors; given {device}")
    if impl == "triton" and device != "cuda":
        if device != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "impl 'triton' needs CUDA tensors (on CPU tensors it runs only under "
                f"TRITON_INTERPRET=1); given {device}"
            )
    return impl


@functools.cache
def triton_or_torch() -> str:
    try:
        importlib.import_module("triton")
    except ImportError:
        warnings.warn(
            "triton is not installed: CUDA tensors go through the PyTorch reference, slower and "
            "with all logits in memory; pip install 'grpo-engine[cuda]'",
            stacklevel=3,
        )
        return "torch"
    return "triton"


def triton_module(name: str) -> ModuleType:
    """The module kernels/<name>.py; ImportError that says what to install."""
    try:
        return importlib.import_module(f".kernels.{name}", __package__)
    except ImportError as error:
        raise ImportError(f"impl 'triton' can't run: {error}; install grpo-engine[cuda]") from error
