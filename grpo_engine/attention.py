"""The one attention function of prefill, decode and training.

transformers calls it for every layer; what it computes is up to the forward's kwarg `group`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import UserError, require

NAME = "grpo_engine_group"


class GroupState(Protocol):
    """What stands behind the kwarg `group`: which keys a query sees, and where they are kept."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """q: [N, H, d]; k, v: [N, H_kv, d]; strided views. Returns [N, H, d]."""


def group_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    group: GroupState | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, d], key, value [1, H_kv, N, d]."""
    if group is None:
        raise RuntimeError(f"the attention {NAME} was called without the kwarg `group`")
    if s_aux is not None:
        raise UserError(f"{type(module).__name__} has attention sinks: not supported")
    if dropout:
        raise UserError(
            f"{type(module).__name__} has attention dropout {dropout}: not supported; set "
            "attention_dropout to 0 in the model's config.json"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = group.attend(module.layer_idx, q, k, v, scaling, softcap, sliding_window)
    return out[None], None


@functools.cache
def _register() -> None:
    interface = require("transformers", "train", "a model").AttentionInterface
    # No mask function goes with the name, so transformers builds no mask.
    interface.register(NAME, group_attention)


@contextmanager
def routed(causal: nn.Module) -> Iterator[None]:
    """Attention goes through `group_attention` for a while; afterwards through the model's own."""
    _register()
    config = causal.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def routed_in_backward(causal: nn.Module, hidden: Tensor) -> Tensor:
    """The same hidden states; layers that are run again in their backward take the route too."""
    # The flag of the layers: transformers' property that asks for it is called otherwise in 6.
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in causal.modules())
    return _RouteBackward.apply(hidden, causal) if hidden.requires_grad and checkpointed else hidden


class _RouteBackward(torch.autograd.Function):
    """Its backward comes before that of every layer, and the engine's callback after all."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, causal: nn.Module) -> Tensor:
        ctx.causal = causal
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        route = routed(ctx.causal)
        route.__enter__()
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: route.__exit__(None, None, None)
        )
        return grad, None
