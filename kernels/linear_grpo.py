"""The GRPO loss of a trainable head in three GEMM units: logits, dH, dW.

At token level d loss / d logp of a token needs its own log-prob and nothing of the other tokens,
so the logits of a tile can become their gradient while they are still there.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import LossOutput
from .token_logprob import (
    TILE_BYTES,
    HeadGradients,
    logit_map,
    rows_of,
    tiles,
    token_logprob,
    trains_head,
)

DWEIGHT_COLUMNS = 8192  # added at a time: a product of this height stays small beside the tile


class LinearGRPOFn(torch.autograd.Function):
    """The forward makes the gradients; the backward scales them by the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, lens, make_rows, tile_bytes, loss_of, found):
        rows = make_rows()
        parts = list(tiles(len(hidden), len(weight), rows.tile_itemsize(hidden.dtype), tile_bytes))
        grads = HeadGradients(hidden, weight, ctx.needs_input_grad[:3], blocks=len(parts))
        logp = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for part in parts:
            near, own = rows_of(lens, part), (hidden[part], weight)
            tile = rows.logits(*own)
            stats, _ = rows.softmax(tile, *own, targets[part], near, gradient=False)
            logp[part] = stats.logp
            # The log-probs of the later tiles are not there yet; no token of this one reads them.
            upstream = gradient_of(loss_of, logp)[part]
            known = targets[part], stats.lse, stats.logp, upstream
            dlogits = rows.gradient(tile, 0, *known, *own, near)
            for columns in tiles(len(weight), 1, 1, DWEIGHT_COLUMNS):
                grads.add(rows.add_product, dlogits[:, columns], part, columns)
            del tile, dlogits
        ctx.gradients = grads.results(None if bias is None else bias.dtype)
        out = loss_of(logp)
        found.append(out)
        return out.loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return *(g if g is None else g * upstream for g in ctx.gradients), *[None] * 6


def gradient_of(loss_of: Callable[[Tensor], LossOutput], logp: Tensor) -> Tensor:
    """d loss / d logp [N]."""
    with torch.enable_grad():
        logp = logp.detach().requires_grad_()
        return torch.autograd.grad(loss_of(logp).loss, logp)[0]


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    loss_of: Callable[[Tensor], LossOutput],
    make_rows: Callable,
    tile_bytes: int = TILE_BYTES,
) -> LossOutput:
    """loss_of(log-probs) with its gradient down to hidden, weight and bias.

    With a frozen head the two steps are already as cheap as they can be. In float16 a gradient
    made before the loss scale is known would fall under the smallest number: two steps as well.
    """
    if not trains_head(weight, bias) or weight.dtype == torch.float16:
        logp, _ = token_logprob(
            hidden, weight, targets, bias, temperature, softcap, logit_scale,
            make_rows=make_rows, tile_bytes=tile_bytes,
        )  # fmt: skip
        return loss_of(logp)
    lens = logit_map(hidden, bias, temperature, softcap, logit_scale)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.long().contiguous()
    found: list[LossOutput] = []
    loss = LinearGRPOFn.apply(
        hidden, weight, bias, targets, lens, make_rows, tile_bytes, loss_of, found
    )
    return LossOutput(loss, found[0].make_metrics)
