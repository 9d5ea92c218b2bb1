"""Where our loss is meant to differ from TRL's, by how much and how."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batches import (
    CORRECTED_KL,
    IMPLEMENTATIONS,
    KL,
    LAYOUTS,
    SEQUENCE,
    assert_close,
    assert_same,
    make_batch,
    options_of,
    ours,
    trls,
)
from grpo_engine.kernels.options import CLIPPED_LOSSES, LossType

with_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
with_layout = pytest.mark.parametrize("layout", LAYOUTS)


def reduced(terms: Tensor, mask: Tensor, loss_type: str) -> Tensor:
    """Terms [S, T], 0 where masked, to the scalar of a clipped loss type."""
    per_sample = terms.sum(-1)
    if loss_type == "grpo":
        return (per_sample / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "luspo":
        return per_sample.mean()
    return per_sample.sum() / (8 * 32 if loss_type == "dr_grpo" else mask.sum())


@with_impl
@with_layout
@pytest.mark.parametrize("loss_type", CLIPPED_LOSSES)
def test_trl_corrects_the_kl_by_the_ratio_of_the_sequence_and_we_by_that_of_the_token(
    loss_type, layout, impl
):
    batch = make_batch("holes")
    mask = batch.mask
    options = options_of(loss_type, **SEQUENCE, **CORRECTED_KL)
    policy = ours(batch, options_of(loss_type, **SEQUENCE), layout, impl)
    logp = batch.logp.clone().requires_grad_()
    token = torch.where(mask, logp - batch.old, 0.0)
    sequence = (token.sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    x = batch.ref - logp
    kl = torch.where(mask, x.exp() - x - 1, 0.0)
    trl, we = trls(batch, options), ours(batch, options, layout, impl)
    for made, log_ratio in ((trl, sequence), (we, token)):
        added = options.beta * reduced(log_ratio.exp() * kl, mask, loss_type)
        (gradient,) = torch.autograd.grad(added, logp, retain_graph=True)
        assert_close(made.metrics["kl"], (log_ratio.exp() * kl).sum() / mask.sum())
        assert_close(made.loss, policy.loss + added)
        assert_close(made.gradient, policy.gradient + gradient)
    assert (we.metrics["kl"] / trl.metrics["kl"] - 1).abs() > 0.05


@with_impl
@with_layout
def test_one_ratio_for_all_tokens_of_a_sample_makes_both_corrections_one(layout, impl):
    batch = make_batch("holes")
    batch.old = batch.logp - torch.linspace(-0.5, 0.5, 8)[:, None]
    options = options_of("grpo", **SEQUENCE, **CORRECTED_KL)
    given, expected = ours(batch, options, layout, impl), trls(batch, options)
    assert_close(given.loss, expected.loss)
    assert_close(given.metrics["kl"], expected.metrics["kl"])


@with_impl
@pytest.mark.parametrize("loss_type", LossType.__args__)
def test_nan_in_the_padding_spoils_trls_loss_and_not_ours(loss_type, impl):
    clean, options = make_batch("holes"), options_of(loss_type, **KL)
    fields = ("logp", "old", "ref")
    batch = replace(
        clean, **{x: getattr(clean, x).masked_fill(~clean.mask, torch.nan) for x in fields}
    )
    assert trls(batch, options).loss.isnan()
    expected = trls(clean, options)
    for layout in LAYOUTS:
        given = ours(batch, options, layout, impl)
        assert given.metrics["nonfinite"] == 0
        assert_same(given, expected, options)


@with_impl
@with_layout
def test_beyond_e20_our_ratio_stays_and_trls_runs_away(layout, impl):
    batch, options = make_batch("full"), options_of("grpo")
    row = batch.advantages.argmin()  # nothing clips a large ratio where the advantage is negative
    batch.old[row, 5] = batch.logp[row, 5] - 30
    share = -batch.advantages[row] / batch.mask.sum(-1)[row] / 8
    assert_close(trls(batch, options).loss, share * torch.tensor(30.0).exp())
    given = ours(batch, options, layout, impl)
    assert_close(given.loss, share * torch.tensor(20.0).exp())
    assert given.gradient[row, 5] == 0
