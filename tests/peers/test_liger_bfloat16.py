"""What Liger-Kernel's chunked loss loses in bfloat16, and ours does not."""

import pytest
import torch
from torch import Tensor

import grpo_engine as ge
from batches import IMPLEMENTATIONS
from grpo_engine import GRPOOptions
from grpo_engine.benchmarks.peers import liger_chunked_loss
from heads import make_head, scored

with_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
MEAN_LOGP = GRPOOptions(loss_type="bnpo", beta=0.0)  # on-policy, its gradient is that of mean logp


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@with_impl
def test_liger_wrong_it_adds_up_the_heads_gradient_in_bfloat16(impl):
    samples, length = 256, 4
    head = make_head(samples * length, 32, 101)
    head.hidden += 1  # what the samples share adds up
    head.upstream = torch.full_like(head.upstream, -1 / len(head.upstream))
    exact = scored(ge.token_logprob, head, torch.bfloat16, exact=True, impl="torch")["weight"]
    given = scored(ge.token_logprob, head, torch.bfloat16, impl=impl)["weight"]
    weight = head.weight.bfloat16().requires_grad_()
    liger_chunked_loss(
        head.hidden.bfloat16().view(samples, length, -1),
        weight,
        head.targets.view(samples, length),
        torch.ones(samples),
        torch.ones(samples, length, dtype=torch.bool),
        None,
        None,
        MEAN_LOGP,
        compiled=False,
    ).backward()
    assert relative_error(given, exact) < 2**-8
    assert relative_error(weight.grad, exact) > 5 * relative_error(given, exact)


@with_impl
def test_liger_wrong_it_rounds_logits_to_bfloat16(impl):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    head = make_head()
    exact = scored(ge.token_logprob, head, torch.bfloat16, exact=True, impl="torch")["logp"]
    given = scored(ge.token_logprob, head, torch.bfloat16, impl=impl)["logp"]
    rounded = LigerFusedLinearPPOBase.chunk_forward(
        head.hidden.bfloat16()[None], head.weight.bfloat16(), head.targets[None]
    )[0]
    assert (given - exact).abs().max() < 5e-3
    assert (rounded - exact).abs().max() > 2e-2
