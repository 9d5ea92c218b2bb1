"""What a sample was made by, as short hashes: settings, prompts, trained weights."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def short_hash(*values: Any) -> str:
    """16 hex digits of plain values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@torch.no_grad()
def weights_hash(parameters: Mapping[str, Tensor]) -> str:
    """16 hex digits of names, types, shapes and bits of the weights, which are read once where they
    lie.

    The bits of a tensor are folded by exclusive or: it tells the versions of a run apart, in which
    nearly all weights change; it is no defence against forgery.
    """
    described = [(name, str(x.dtype), tuple(x.shape)) for name, x in parameters.items()]
    folded = [torch.hash_tensor(x.detach()) for x in parameters.values() if x.numel()]
    return short_hash(described, torch.stack(folded).tolist() if folded else [])
