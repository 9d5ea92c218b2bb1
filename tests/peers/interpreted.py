"""Triton on the CPU against the peers; test_interpreted.py runs this under Triton's interpreter.

Ours against TRL, and Liger-Kernel's second loss, `triton_grpo_loss` over logits, against ours.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import grpo_engine as ge
from batches import (
    LAYOUTS,
    OPTIONS,
    Batch,
    assert_close,
    assert_same,
    make_batch,
    options_of,
    ours,
    trls,
)
from grpo_engine import GRPOOptions, ops
from grpo_engine.benchmarks.peers import LIGER_NAMES
from heads import VARIANTS, make_head, scored
from heads import trls as trls_head

FEW = (  # a token term, a level, a reduction each
    "grpo-corrected_kl",
    "bnpo-two_sided",
    "dr_grpo-plain",
    "dapo-sequence-two_sided",
    "luspo-sequence-kl",
    "cispo-kl",
    "sapo-temperatures",
    "vespo-kl",
)
LENGTH, VOCAB = 6, 13  # the interpreter runs one program a token
with_triton = pytest.mark.parametrize("impl", [x for x in ops.IMPLEMENTATIONS if x == "triton"])


@with_triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FEW)
def test_loss_gradient_and_kl_are_trls(name, layout, impl):
    batch, options = make_batch("holes"), OPTIONS[name]
    given = ours(batch, options, layout, impl, importance=True)
    assert_same(given, trls(batch, options, importance=True), options)


@with_triton
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_head_is_trls(variant, frozen, impl):
    head, arguments = make_head(), VARIANTS[variant]
    given = scored(ge.token_logprob, head, torch.float32, frozen=frozen, impl=impl, **arguments)
    expected = scored(trls_head, head, torch.float32, frozen=frozen, **arguments)
    assert (given.pop("entropy") - expected.pop("entropy")).abs().max() < 1e-5
    for name, x in expected.items():
        assert_close(given[name], x, 3e-6)


def from_logits(masked: str) -> tuple[Batch, Tensor, Tensor]:
    """A batch whose log-probs are those of logits [S, T+1, V] and targets [S, T]."""
    whole, rng = make_batch(masked), torch.Generator().manual_seed(1)
    cut = {name: x[:, :LENGTH] for name, x in vars(whole).items() if x.dim() == 2}
    batch = replace(whole, **cut)
    logits = torch.randn(8, LENGTH + 1, VOCAB, generator=rng)
    targets = torch.randint(VOCAB, (8, LENGTH), generator=rng)
    shift = gathered(logits, targets) - batch.logp
    moved = {name: getattr(batch, name) + shift for name in ("logp", "old", "ref")}
    return replace(batch, **moved), logits, targets


def gathered(logits: Tensor, targets: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def liger_triton(
    batch: Batch, logits: Tensor, targets: Tensor, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """The loss and its gradient in the logits; Liger's own default is a temperature of 0.9."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = logits.clone().requires_grad_()
    loss, _ = triton_grpo_loss(
        logits,
        batch.old,
        batch.ref,
        targets,
        batch.advantages,
        batch.mask.long(),
        temperature=1.0,
        eps_low=options.epsilon,
        eps_high=options.clip_high,
        inplace=False,
        reduce=True,
        vllm_is_ratio=batch.importance,
        **{name: getattr(options, name) for name in LIGER_NAMES},
    )
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def ours_from_logits(
    batch: Batch, logits: Tensor, targets: Tensor, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    out = ge.grpo_loss(
        gathered(logits, targets),
        batch.old,
        batch.ref,
        advantages=batch.advantages,
        mask=batch.mask,
        importance_ratio=batch.importance,
        options=options,
        impl="torch",
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, logits)[0]


@pytest.mark.parametrize("name", [x for x in FEW if "luspo" not in x])
def test_ligers_loss_over_logits_is_ours(name):
    case = from_logits("holes")
    given, expected = ours_from_logits(*case, OPTIONS[name]), liger_triton(*case, OPTIONS[name])
    for x, y in zip(given, expected, strict=True):
        assert_close(x, y, 5e-6)


def luspo_terms(batch: Batch, options: GRPOOptions) -> Tensor:
    """[S, T], 0 where masked: - min(rho A, clamp(rho, 0.8, 1.2) A) times the importance ratio."""
    log_ratio = torch.where(batch.mask, batch.logp - batch.old, 0.0)
    if options.importance_sampling_level == "sequence":
        mean = log_ratio.sum(-1) / batch.mask.sum(-1).clamp(min=1)
        log_ratio = mean[:, None]
    ratio, a = log_ratio.exp(), batch.advantages[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * batch.importance * batch.mask


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_liger_wrong_its_luspo_over_logits_weights_samples_by_their_share_of_the_padded_length(
    level,
):
    options = options_of("luspo", importance_sampling_level=level)
    case = from_logits("ragged")
    batch = case[0]
    per_sample = luspo_terms(batch, options).sum(-1)
    assert_close(ours_from_logits(*case, options)[0], per_sample.mean(), 2e-6)
    share = batch.mask.sum(-1) / LENGTH
    assert_close(liger_triton(*case, options)[0], (per_sample * share).mean(), 2e-6)


def test_liger_wrong_its_luspo_over_logits_takes_the_gradients_weight_of_another_sample():
    options = options_of("luspo")
    batch, logits, targets = case = from_logits("ragged")
    _, wrong = liger_triton(*case, options)
    lengths = batch.mask.sum(-1).clamp(min=1)
    logits = logits.requires_grad_()
    # The weight of token t of sample s is read at s + t: of a later sample, and past the last.
    sample, token = torch.arange(8)[:, None], torch.arange(LENGTH)
    inside = sample + token < 8
    weight = lengths[(sample + token).clamp(max=7)] / (8 * LENGTH)
    logp = gathered(logits, targets)
    a, ratio = batch.advantages[:, None], (logp - batch.old).exp()
    terms = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * batch.importance
    loss = torch.where(batch.mask & inside, terms * weight, 0.0).sum()
    (expected,) = torch.autograd.grad(loss, logits)
    assert_close(wrong[:, :-1][inside], expected[:, :-1][inside], 5e-6)
