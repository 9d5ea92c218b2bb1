"""TRL's real _ChunkedLogProbFunction gives our log-probs, entropy and gradients."""

import pytest
import torch

import grpo_engine as ge
from batches import IMPLEMENTATIONS, assert_close
from heads import VARIANTS, make_head, scored, trls

BF16_LOGIT_ULP = 0.125  # of the largest logits here, from 16 to 32
with_impl = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
with_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
with_training = pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])


@with_impl
@with_training
@with_variant
def test_float32_is_trls(variant, frozen, impl):
    head = make_head()
    given = scored(ge.token_logprob, head, torch.float32, frozen=frozen, impl=impl, **variant)
    expected = scored(trls, head, torch.float32, frozen=frozen, **variant)
    assert given.keys() == expected.keys()
    assert_close(given.pop("logp"), expected.pop("logp"), 1e-6)
    # Entropy is a difference of numbers as large as the logits.
    assert (given.pop("entropy") - expected.pop("entropy")).abs().max() < 1e-5
    for name, gradient in expected.items():
        assert_close(given[name], gradient, 3e-6)


@with_impl
@with_training
@with_variant
def test_bfloat16_is_trls_to_the_rounding_of_its_logits(variant, frozen, impl):
    head = make_head()
    given = scored(ge.token_logprob, head, torch.bfloat16, frozen=frozen, impl=impl, **variant)
    expected = scored(trls, head, torch.bfloat16, frozen=frozen, **variant)
    # Half a unit in the logit of the target, half a unit in the log-sum-exp.
    bound = BF16_LOGIT_ULP * variant.get("logit_scale", 1.0) / variant.get("temperature", 1.0)
    for name in ("logp", "entropy"):
        assert (given.pop(name) - expected.pop(name)).abs().max() < bound
    for name, gradient in expected.items():
        assert given[name].dtype == torch.bfloat16
        assert_close(given[name], gradient, 3e-2)  # probabilities off by up to 6 %


@with_impl
def test_on_the_cpu_trl_rounds_logits_to_bfloat16_and_we_do_not(impl):
    head = make_head()
    exact = scored(ge.token_logprob, head, torch.bfloat16, exact=True, impl="torch")["logp"]
    given = scored(ge.token_logprob, head, torch.bfloat16, impl=impl)["logp"]
    trl = scored(trls, head, torch.bfloat16)["logp"]
    assert (given - exact).abs().max() < 5e-3
    assert (trl - exact).abs().max() > 2e-2


def test_trls_entropy_has_a_gradient_and_ours_has_none():
    head = make_head()
    for logprob_of, differentiable in ((trls, True), (ge.token_logprob, False)):
        hidden = head.hidden.clone().requires_grad_()
        logp, entropy = logprob_of(hidden, head.weight, head.targets)
        assert logp.requires_grad and entropy.requires_grad == differentiable
