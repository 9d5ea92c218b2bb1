"""`token_logprob` against numpy in float64, and its gradient."""

import math

import numpy as np
import pytest
import torch

import grpo_engine as ge

N, D = 6, 5
TEMPERATURES = [0.3, 0.6, 1.0, 1.3, 2.0, 7.0]


def numpy_logprob(hidden, weight, targets, bias=None, temperature=1.0, softcap=None, scale=1.0):
    """Log-prob of the targets and entropy, [N] each, row by row."""
    logp, entropy = [], []
    for row, target, t in zip(hidden, targets, np.broadcast_to(temperature, N), strict=True):
        z = np.array([sum(h * w for h, w in zip(row, column, strict=True)) for column in weight])
        z = (z if bias is None else z + bias) * scale
        z = (z if softcap is None else softcap * np.tanh(z / softcap)) / t
        log_sum = z.max() + math.log(math.fsum(np.exp(z - z.max())))
        p = np.exp(z - log_sum)
        logp.append(z[target] - log_sum)
        entropy.append(-math.fsum(p_v * math.log(p_v) for p_v in p if p_v > 0))
    return np.array(logp), np.array(entropy)


def make_head(vocab, std=2.0, shift=0.0, seed=0):
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(N, D)), rng.normal(0, std / D**0.5, (vocab, D))
    return hidden, weight, rng.integers(0, vocab, N), rng.normal(size=vocab) + shift


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": TEMPERATURES},
    {"softcap": 1.5},
    {"logit_scale": 0.25},
    {"bias": True},
    {"bias": True, "temperature": TEMPERATURES, "softcap": 3.0, "logit_scale": 1.7},
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize("vocab", [1, 2, 13, 129])  # no power of two, no multiple of a tile
@pytest.mark.parametrize("options", OPTIONS)
def test_log_prob_and_entropy_match_numpy(options, vocab, dtype, tolerance):
    hidden, weight, targets, bias = make_head(vocab)
    options = {**options, "bias": bias if "bias" in options else None}
    given = {**options}
    for name in ("bias", "temperature"):
        if isinstance(options.get(name), list | np.ndarray):
            given[name] = torch.tensor(np.asarray(options[name]), dtype=dtype)
    options["scale"] = options.pop("logit_scale", 1.0)
    result = ge.token_logprob(
        torch.tensor(hidden, dtype=dtype),
        torch.tensor(weight, dtype=dtype),
        torch.tensor(targets),
        impl="torch",
        **given,
    )
    expected = numpy_logprob(hidden, weight, targets, **options)
    for got, want in zip(result, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=tolerance, atol=tolerance)
        assert got.dtype == dtype


@pytest.mark.parametrize("shift", [-500.0, -30.0, 500.0])
def test_log_probs_do_not_depend_on_the_sign_or_size_of_all_logits(shift):
    hidden, weight, targets, bias = make_head(13, shift=shift)
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (hidden, weight)]
    assert (np.sign(hidden @ weight.T + bias) == np.sign(shift)).all()
    result = ge.token_logprob(
        *tensors, torch.tensor(targets), torch.tensor(bias, dtype=torch.float32)
    )
    expected = numpy_logprob(hidden, weight, targets, bias - shift)
    for got, want in zip(result, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=2e-4)  # an ulp at 500 is 3e-5


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        # logits 0 and ln 3, the target is the second
        ({}, math.log(3)),
        ({"temperature": 0.5}, math.log(9)),
        ({"logit_scale": 2.0}, math.log(9)),
        ({"softcap": 1.0}, 0.8),  # tanh(ln 3)
        ({"softcap": 1.0, "logit_scale": 2.0}, 40 / 41),  # the scale first: tanh(ln 9)
        ({"softcap": 1.0, "temperature": 0.4}, 2.0),  # the cap first: 0.8 / 0.4
        ({"bias": torch.tensor([0.0, math.log(3)])}, math.log(9)),
        ({"bias": torch.tensor([0.0, math.log(3)]), "logit_scale": 2.0}, math.log(81)),
    ],
)
def test_two_tokens_by_hand(options, gap):
    weight = torch.tensor([[0.0], [math.log(3)]])
    result = ge.token_logprob(torch.ones(1, 1), weight, torch.tensor([1]), **options)
    p = 1 / (1 + math.exp(-gap))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert [x.item() for x in result] == pytest.approx([math.log(p), entropy], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads_have_float32_logits(dtype):
    rng = np.random.default_rng(3)
    hidden = torch.tensor(rng.normal(size=(N, 64)), dtype=dtype, requires_grad=True)
    weight = torch.tensor(rng.normal(size=(101, 64)), dtype=dtype)  # logits of std 8
    targets = torch.tensor(rng.integers(0, 101, N))
    logp, entropy = ge.token_logprob(hidden, weight, targets)
    exact = [x.detach().double().numpy() for x in (hidden, weight)]
    expected = numpy_logprob(*exact, targets.numpy())
    # logits rounded to bfloat16 are off by up to 0.06, to float16 by 0.008
    np.testing.assert_allclose(logp.detach().numpy(), expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy.numpy(), expected[1], atol=1e-4)
    assert logp.dtype == entropy.dtype == torch.float32


def test_a_token_of_probability_zero_adds_nothing_to_entropy_or_gradient():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)], [7.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf])
    logp, entropy = ge.token_logprob(hidden, weight, torch.tensor([1]), bias)
    logp.sum().backward()
    assert [logp.item(), entropy.item()] == pytest.approx([math.log(0.75), 0.5623351], abs=1e-6)
    assert weight.grad.flatten().tolist() == pytest.approx([-0.25, 0.25, 0.0], abs=1e-6)
    assert hidden.grad.item() == pytest.approx(0.25 * math.log(3), abs=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_of_hidden_weight_and_bias_passes_gradcheck(options):
    hidden, weight, targets, bias = make_head(7)
    options = {**options}
    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, weight)]
    if options.pop("bias", False):
        leaves.append(torch.tensor(bias, requires_grad=True))
    if isinstance(options.get("temperature"), list):
        options["temperature"] = torch.tensor(options["temperature"], dtype=torch.float64)

    def logp(hidden, weight, bias=None):
        return ge.token_logprob(
            hidden, weight, torch.tensor(targets), bias, impl="torch", **options
        )[0]

    assert torch.autograd.gradcheck(logp, leaves)


def test_entropy_carries_no_gradient():
    hidden, weight, targets, _ = make_head(7)
    tensors = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (hidden, weight)]
    logp, entropy = ge.token_logprob(*tensors, torch.tensor(targets))
    assert logp.requires_grad and not entropy.requires_grad


def test_int32_targets_pick_the_same_tokens():
    hidden, weight, targets, _ = make_head(13)
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (hidden, weight)]
    wide, _ = ge.token_logprob(*tensors, torch.tensor(targets))
    narrow, _ = ge.token_logprob(*tensors, torch.tensor(targets, dtype=torch.int32))
    assert narrow.tolist() == wide.tolist()
    assert wide.tolist() == pytest.approx(numpy_logprob(hidden, weight, targets)[0], abs=1e-5)
