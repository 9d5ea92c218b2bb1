"""TRL's real GRPOTrainer._compute_loss gives our loss, gradient and metrics."""

from functools import cache

import pytest
import torch

from batches import (
    CORRECTED_KL,
    IMPLEMENTATIONS,
    KL,
    LAYOUTS,
    MASKS,
    OPTIONS,
    Result,
    assert_close,
    assert_same,
    make_batch,
    options_of,
    ours,
    trls,
)
from grpo_engine import GRPOOptions
from grpo_engine.benchmarks.peers import eager_loss, trl_compute_loss, trl_eager_loss, trl_trainer
from grpo_engine.kernels.options import CLIPPED_LOSSES, LossType

LOSS_TYPES = LossType.__args__


CLIPPED = {name: x for name, x in OPTIONS.items() if x.loss_type in CLIPPED_LOSSES}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
with_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
with_layout = pytest.mark.parametrize("layout", LAYOUTS)


@cache
def trl_result(masked: str, options: GRPOOptions, importance: bool) -> Result:
    """Once for every layout and implementation."""
    return trls(make_batch(masked), options, importance)


@with_impl
@with_layout
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("importance", [False, True], ids=["policy", "importance"])
@with_options
def test_loss_gradient_and_kl_are_trls(options, importance, masked, layout, impl):
    given = ours(make_batch(masked), options, layout, impl, importance)
    assert_same(given, trl_result(masked, options, importance), options)
    if masked == "nothing":
        assert given.loss == 0 and not given.gradient.any()


@with_options
def test_the_definition_is_trls_to_float64(options):
    batch = make_batch("holes", torch.float64)
    given = ours(batch, options, "padded", "torch", importance=True)
    expected = trls(batch, options, importance=True)
    # TRL keeps sapo's temperatures in float32.
    rounding = 1e-7 if options.loss_type == "sapo" else 1e-13
    assert_close(given.loss, expected.loss, rounding)
    assert_close(given.gradient, expected.gradient, rounding)


@with_impl
@pytest.mark.parametrize("masked", ["full", "ragged"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_log_probs_the_ratio_is_one_for_both(loss_type, masked, impl):
    batch, options = make_batch(masked), options_of(loss_type, **CORRECTED_KL)
    expected = trls(batch, options, old_logp=None)
    assert_same(ours(batch, options, "packed", impl, old_logp=None), expected, options)


@with_impl
@with_layout
@pytest.mark.parametrize("loss_type", [x for x in LOSS_TYPES if x != "vespo"])
def test_advantages_per_token_are_trls(loss_type, layout, impl):
    batch, options = make_batch("holes"), options_of(loss_type)
    batch.advantages = batch.advantages[:, None] + torch.linspace(-1, 1, 24)
    assert_same(ours(batch, options, layout, impl), trls(batch, options), options)


@with_impl
@with_layout
@pytest.mark.parametrize("loss_type", [*CLIPPED_LOSSES, "cispo"])
def test_clipped_shares_are_trls(loss_type, layout, impl):
    batch, options = make_batch("holes"), options_of(loss_type)
    given, expected = ours(batch, options, layout, impl).metrics, trls(batch, options).metrics
    names = {"clip_region": "cispo_clip_ratio"}
    if loss_type != "cispo":
        names = {f"clip_{x}": f"clip_ratio/{x}_mean" for x in ("low", "high", "region")}
    for name, trls_name in names.items():
        assert expected[trls_name] > 0
        assert_close(given[name], expected[trls_name])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_batch_meets_every_clip(level):
    batch = make_batch("holes", torch.float64)
    plain = options_of("grpo", importance_sampling_level=level)
    two_sided = options_of("grpo", importance_sampling_level=level, delta=1.5)
    given, capped = (ours(batch, x, "padded", "torch") for x in (plain, two_sided))
    assert given.metrics["clip_low"] > 0 and given.metrics["clip_high"] > 0
    assert (given.gradient != capped.gradient).any()


# Not bnpo: it divides by the tokens of each micro-batch, by design.
@with_impl
@pytest.mark.parametrize("loss_type", [x for x in LOSS_TYPES if x != "bnpo"])
def test_micro_batches_of_trl_add_up_to_our_whole_step(loss_type, impl):
    batch, options = make_batch("holes"), options_of(loss_type, **KL)
    trainer = trl_trainer(options, gradient_accumulation_steps=2)
    logp = batch.logp.clone().requires_grad_()
    for half in (slice(0, 4), slice(4, 8)):
        rows = (logp, batch.mask, batch.advantages, batch.old, batch.ref)
        tokens = batch.mask.sum()  # of the step, as TRL counts them when it has generated
        trl_compute_loss(trainer, *(x[half] for x in rows), num_items_in_batch=tokens).backward()
    assert_close(ours(batch, options, "packed", impl).gradient, logp.grad)


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("options", CLIPPED.values(), ids=CLIPPED)
def test_the_eager_chain_of_the_benchmark_is_trls(options, masked):
    batch = make_batch(masked)
    given = (batch.old, batch.ref, batch.advantages, batch.mask, options)
    results = []
    for loss_of in (eager_loss, trl_eager_loss):
        logp = batch.logp.clone().requires_grad_()
        loss = loss_of(logp, *given)
        results.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    for eager, trl in zip(*results, strict=True):
        assert_close(eager, trl)
