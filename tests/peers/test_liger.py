"""Liger-Kernel's chunked loss from hidden states: the same as ours, and named where it is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import grpo_engine as ge
from batches import (
    CORRECTED_KL,
    IMPLEMENTATIONS,
    KL,
    MASKS,
    OPTIONS,
    SEQUENCE,
    Batch,
    assert_close,
    make_batch,
    options_of,
    trls,
)
from grpo_engine import GRPOOptions
from grpo_engine.benchmarks.peers import liger_module
from grpo_engine.kernels.options import CLIPPED_LOSSES
from heads import Head, make_head

TEMPERATURE = 0.8
# luspo is right where each term is one number a sample: see the tests of it below.
RIGHT = {
    name: options
    for name, options in OPTIONS.items()
    if options.loss_type != "luspo" or name == "luspo-sequence"
}
TOKEN_LEVEL = {
    name: options
    for name, options in RIGHT.items()
    if options.importance_sampling_level == "token" and options.loss_type != "vespo"
}
with_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
with_mask = pytest.mark.parametrize("masked", MASKS)


def make_case(masked: str) -> tuple[Head, Batch]:
    """A batch whose log-probs are those of a head; its old and reference log-probs move along."""
    head, batch = make_head(8 * 24, 32, 101), make_batch(masked)
    logp, _ = ge.token_logprob(
        head.hidden, head.weight, head.targets, head.bias, TEMPERATURE, impl="torch"
    )
    shift = logp.view(8, 24) - batch.logp
    moved = {name: getattr(batch, name) + shift for name in ("logp", "old", "ref")}
    return head, replace(batch, **moved)


def parameters(head: Head, frozen: bool) -> dict[str, Tensor]:
    """hidden, weight and bias; a frozen head leaves the gradient to hidden."""
    given = {name: getattr(head, name).clone() for name in ("hidden", "weight", "bias")}
    for name, x in given.items():
        x.requires_grad_(name == "hidden" or not frozen)
    return given


def result(loss: Tensor, metrics: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, metrics and gradients, by name."""
    trained = [name for name, x in given.items() if x.requires_grad]
    gradients = torch.autograd.grad(loss, [given[name] for name in trained])
    return {"loss": loss.detach(), **metrics, **dict(zip(trained, gradients, strict=True))}


def ligers(
    head: Head,
    batch: Batch,
    options: GRPOOptions,
    importance: bool = False,
    frozen: bool = False,
    **attributes,
) -> dict[str, Tensor]:
    """Liger's result; in chunks of 3, which 8 samples don't divide into."""
    given = parameters(head, frozen)
    module = liger_module(options, TEMPERATURE, chunk_size=3, compiled=False)
    for name, value in attributes.items():
        setattr(module, name, value)
    loss, metrics = module(
        given["hidden"].view(*batch.mask.shape, -1),
        given["weight"],
        head.targets.view_as(batch.mask),
        batch.mask.long(),
        batch.advantages,
        bias=given["bias"],
        ref_per_token_logps=batch.ref if options.beta > 0 else None,
        old_per_token_logps=batch.old,
        vllm_is_ratio=batch.importance if importance else None,
    )
    names = ("kl", "clip_region") if options.beta > 0 else ("clip_region",)
    return result(loss, dict(zip(names, metrics, strict=True)), given)


def ours(
    head: Head,
    batch: Batch,
    options: GRPOOptions,
    impl: str,
    importance: bool = False,
    frozen: bool = False,
    fused: bool = False,
) -> dict[str, Tensor]:
    """Our result, packed: ge.token_logprob and ge.grpo_loss, or fused ge.linear_grpo_loss."""
    given, row = parameters(head, frozen), batch.completion
    inputs = given["hidden"][row.flatten()], given["weight"], head.targets[row.flatten()]
    of_head = {"bias": given["bias"], "temperature": TEMPERATURE, "impl": impl}
    of_loss = {
        "old_logp": batch.old[row],
        "ref_logp": batch.ref[row] if options.beta > 0 else None,
        "advantages": batch.advantages,
        "cu_seqlens": batch.cu_seqlens,
        "mask": batch.tool[row],
        "options": options,
        "importance_ratio": batch.importance[row] if importance else None,
        "impl": impl,
    }
    if fused:
        out = ge.linear_grpo_loss(*inputs, **(of_head | of_loss))
    else:
        out = ge.grpo_loss(ge.token_logprob(*inputs, **of_head)[0], **of_loss)
    return result(out.loss, out.metrics, given)


def assert_ligers(
    given: dict[str, Tensor], expected: dict[str, Tensor], options: GRPOOptions
) -> None:
    # vespo's weight is exponential in the sum of a sample's log-ratios, and so is its rounding.
    rounding = 5e-5 if options.loss_type == "vespo" else 5e-6
    if options.loss_type in ("sapo", "vespo"):
        del expected["clip_region"]  # Liger counts none there
    for name, x in expected.items():
        assert_close(given[name], x, rounding)


@with_impl
@with_mask
@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_loss_gradients_and_metrics_are_ligers(options, masked, impl):
    head, batch = make_case(masked)
    importance = options.loss_type != "luspo"
    given = ours(head, batch, options, impl, importance)
    assert_ligers(given, ligers(head, batch, options, importance), options)


@with_impl
@pytest.mark.parametrize("masked", ["holes", "nothing"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("options", TOKEN_LEVEL.values(), ids=TOKEN_LEVEL)
def test_the_fused_loss_is_ligers(options, frozen, masked, impl):
    head, batch = make_case(masked)
    given = ours(head, batch, options, impl, importance=True, frozen=frozen, fused=True)
    expected = ligers(head, batch, options, importance=True, frozen=frozen)
    assert ("weight" in expected) != frozen
    assert_ligers(given, expected, options)


@with_impl
def test_liger_wrong_its_luspo_averages_over_the_padding_what_it_should_sum(impl):
    head, batch = make_case("ragged")
    options = options_of("luspo")
    given, wrong = ours(head, batch, options, impl), ligers(head, batch, options)
    # Per token, padding too: - min(rho A, clamp(rho, 0.8, 1.2) A). As TRL had it until its pull
    # request 6654, which says why that is wrong.
    ratio, a = (batch.logp - batch.old).exp(), batch.advantages[:, None]
    terms = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    assert_close(given["loss"], (terms * batch.mask).sum(-1).mean())
    assert_close(wrong["loss"], (terms * batch.mask.sum(-1, keepdim=True)).mean(), 2e-6)
    padding = ~batch.mask.flatten()
    assert not given["hidden"][padding].any()
    assert wrong["hidden"][padding].abs().max() > 0.1 * given["hidden"].abs().max()
    assert (wrong["weight"] - given["weight"]).abs().max() > 0.1 * given["weight"].abs().max()


@with_impl
def test_liger_wrong_its_luspo_with_a_kl_is_wrong_at_sequence_level_too(impl):
    head, batch = make_case("ragged")
    options = options_of("luspo", **SEQUENCE, **KL)
    given, wrong = ours(head, batch, options, impl), ligers(head, batch, options)
    assert wrong["hidden"][~batch.mask.flatten()].any()
    assert (wrong["hidden"] - given["hidden"]).abs().max() > 0.01 * given["hidden"].abs().max()


@with_mask
@pytest.mark.parametrize("loss_type", [x for x in CLIPPED_LOSSES if x != "luspo"])
def test_liger_like_trl_corrects_the_kl_by_the_ratio_of_the_sequence(loss_type, masked):
    head, batch = make_case(masked)
    options = options_of(loss_type, **SEQUENCE, **CORRECTED_KL)
    given, expected = ligers(head, batch, options), trls(batch, options)
    assert_close(given["loss"], expected.loss, 2e-6)
    assert_close(given["kl"], expected.metrics["kl"], 5e-6)


def test_liger_wrong_without_its_use_ref_model_a_given_reference_is_dropped():
    head, batch = make_case("ragged")
    options = options_of("grpo", **KL)
    wrong = ligers(head, batch, options, use_ref_model=False)
    assert wrong["kl"] == 0
    assert_close(wrong["loss"], ligers(head, batch, options_of("grpo"))["loss"])
    with pytest.raises(ValueError, match="ref_logp must be given when beta > 0"):
        ge.grpo_loss(
            batch.logp,
            batch.old,
            advantages=batch.advantages,
            mask=batch.mask,
            options=options,
        )


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_liger_wrong_a_delta_that_the_loss_type_has_not_is_ignored(loss_type):
    head, batch = make_case("ragged")
    options = options_of(loss_type)
    wrong = ligers(head, batch, options, delta=0.5)
    assert_close(wrong["loss"], ligers(head, batch, options)["loss"])
    with pytest.raises(ValueError, match="delta goes only with loss_type"):
        replace(options, delta=0.5)


@with_impl
def test_liger_wrong_nan_in_the_padding_of_given_log_probs_spoils_its_loss(impl):
    head, batch = make_case("ragged")
    options = options_of("grpo", **KL)
    clean = ours(head, batch, options, impl)
    batch.old = batch.old.masked_fill(~batch.mask, torch.nan)
    assert ligers(head, batch, options)["loss"].isnan()
    assert ours(head, batch, options, impl)["loss"] == clean["loss"]
