"""Which of this project's implementations can be checked and timed on a device."""

import os

import torch

from .. import ops


def implementations(device: torch.device) -> dict[str, dict[str, str]]:
    """Implementation -> the fields of harness.Provider that say what keeps it from being timed.

    The reference comes last: ratios are to the first that is timed.
    """
    names = [name for name in ops.IMPLEMENTATIONS if name != "auto"]
    return {name: _limits(name, device) for name in sorted(names, key="torch".__eq__)}


def _limits(name: str, device: torch.device) -> dict[str, str]:
    if name == "cpp" and device.type != "cpu":
        return {"unavailable": "the C++ kernels take CPU tensors"}
    if name == "triton" and device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return {"unavailable": "Triton needs CUDA tensors"}
        return {"untimed": "run by Triton's interpreter"}
    return {}
