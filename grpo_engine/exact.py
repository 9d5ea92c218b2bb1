"""A decoder's own arithmetic in float32, whatever its weights are kept in: for checks at load."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from .errors import require

HALF = (torch.bfloat16, torch.float16)
PLAIN = {*HALF, torch.float32, torch.int64, torch.bool}
READ_BACK = ("Params4bit", "Int8Params")  # of bitsandbytes


@contextmanager
def in_float32(decoder: nn.Module) -> Iterator[None]:
    """For a while each block of the decoder runs in float32, one block's copy held at a time.

    In half precision the layers of a real model amplify what those before them have rounded: two
    right ways to compute its hidden states can differ by half of their size. Linears of
    bitsandbytes use their weights as read back; a decoder quantised otherwise runs as it is.
    """
    wide: list[tuple[Tensor, Tensor]] = []

    def widen(block: nn.Module, args: Any, kwargs: Any) -> Any:
        for tensor in chain(block.parameters(), block.buffers()):
            if tensor.dtype in HALF:
                wide.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        return tree_map(_float, (args, kwargs))

    def narrow(*_: Any) -> None:
        for tensor, data in wide:
            tensor.data = data
        wide.clear()

    blocks = list(_blocks(decoder)) if _dtypes(decoder) <= PLAIN else []
    linears = [m for block in blocks for m in block.modules() if _is_read_back(m)]
    forwards = [vars(linear).get("forward") for linear in linears]
    hooks = [block.register_forward_pre_hook(widen, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(narrow) for block in blocks]
    try:
        for linear in linears:
            linear.forward = partial(_read_back, linear)
        yield
    finally:
        narrow()
        for hook in hooks:
            hook.remove()
        for linear, forward in zip(linears, forwards, strict=True):
            del linear.forward
            if forward is not None:
                linear.forward = forward


def _blocks(decoder: nn.Module) -> Iterator[nn.Module]:
    """Its layers and what stands beside them; embeddings are looked up as they are."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, nn.Embedding):
            yield child


def _dtypes(decoder: nn.Module) -> set[torch.dtype]:
    tensors = chain(decoder.parameters(), decoder.buffers())
    return {tensor.dtype for tensor in tensors if type(tensor).__name__ not in READ_BACK}


def _is_read_back(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight).__name__ in READ_BACK


def _read_back(linear: nn.Linear, x: Tensor) -> Tensor:
    peft = require("peft.utils.integrations", "train", "a quantised model")
    weight = peft.dequantize_bnb_weight(linear.weight, state=getattr(linear, "state", None))
    return functional.linear(x, weight.to(x), linear.bias)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
