"""A loss whose gradient a kernel has already written: autograd only scales it."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class KnownGradientFn(torch.autograd.Function):
    """Returns `loss`; its gradient with respect to logp is `dlogp / normalizer`."""

    @staticmethod
    def forward(ctx, logp: Tensor, result: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        loss, dlogp, normalizer = result  # not tensors of the graph: nothing is differentiable
        # Saved, not kept: what the engine lets go of, it can hand on without a copy.
        ctx.save_for_backward(dlogp, normalizer)
        return loss

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None]:
        # The wrapper is slow beside a small loss, and without create_graph it has nothing to do.
        return (_scaled_once if torch.is_grad_enabled() else _scaled)(ctx, upstream)


def _scaled(ctx, upstream: Tensor) -> tuple[Tensor, None]:
    dlogp, normalizer = ctx.saved_tensors
    if normalizer is None and upstream.device.type == "cpu" and upstream.item() == 1.0:
        return dlogp, None  # on a device this look at the value would wait for it
    return dlogp * (upstream if normalizer is None else upstream / normalizer), None


_scaled_once = once_differentiable(_scaled)


def attach_gradient(
    logp: Tensor, loss: Tensor, dlogp: Tensor, normalizer: Tensor | None = None
) -> Tensor:
    """The scalar `loss`, differentiable: d loss / d logp is dlogp, over normalizer if given.

    logp, dlogp: same shape, f32; normalizer: scalar on the device, read only in the backward.
    """
    return KnownGradientFn.apply(logp, (loss, dlogp, normalizer))
