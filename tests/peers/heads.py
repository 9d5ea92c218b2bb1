"""A head for the peers and for us, and what each makes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_engine.benchmarks.peers import trl_chunked_logprob

LOGIT_STD = 4.0
VARIANTS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "all": {"temperature": 1.3, "bias": True, "softcap": 30.0, "logit_scale": 0.5},
}
trls = partial(trl_chunked_logprob, chunk_size=64)  # which no size below is a multiple of


@dataclass
class Head:
    """hidden [N, D], weight [V, D], bias [V], targets [N] and the gradient of the log-probs [N]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    upstream: Tensor


def make_head(rows: int = 37, width: int = 64, vocab: int = 203, seed: int = 0) -> Head:
    """Logits of std 4; sizes that no chunk divides."""
    rng = torch.Generator().manual_seed(seed)
    return Head(
        torch.randn(rows, width, generator=rng),
        torch.randn(vocab, width, generator=rng) * LOGIT_STD / width**0.5,
        torch.randn(vocab, generator=rng),
        torch.randint(vocab, (rows,), generator=rng),
        torch.randn(rows, generator=rng),
    )


def scored(
    logprob_of: Callable,
    head: Head,
    dtype: torch.dtype,
    exact: bool = False,
    frozen: bool = False,
    bias: bool = False,
    **arguments,
) -> dict[str, Tensor]:
    """Log-probs, entropy and the gradients of whatever is trained, by name.

    exact: the values of `dtype`, computed with in float64. frozen: only hidden has a gradient.
    """
    work = torch.float64 if exact else dtype
    names = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
    given = {name: getattr(head, name).to(dtype).to(work) for name in names}
    trained = ("hidden",) if frozen else names
    for name in trained:
        given[name].requires_grad_()
    logp, entropy = logprob_of(targets=head.targets, **given, **arguments)
    upstream = head.upstream.to(logp.dtype)
    gradients = torch.autograd.grad(logp, [given[name] for name in trained], upstream)
    result = {"logp": logp.detach(), "entropy": entropy.detach()}
    return result | dict(zip(trained, gradients, strict=True))
