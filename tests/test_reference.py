"""The loss on hand-worked tokens: values, what lies under the mask, and counts."""

import math

import pytest
import torch

import grpo_engine as ge
from tensors import f32, offsets

NAN, INF = math.nan, math.inf
ALL_LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "max_completion_length": 10},
    {"loss_type": "dapo"},
    {"loss_type": "luspo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
]


def one_token(ratio, advantage, ref=None, **options):
    """Loss and gradient of a single token of log-prob -1."""
    logp = f32([-1.0]).requires_grad_()
    options = {"beta": 0.0, **options}
    out = ge.grpo_loss(
        logp,
        f32([-1.0 - math.log(ratio)]),
        None if ref is None else f32([ref]),
        advantages=f32([advantage]),
        cu_seqlens=offsets(0, 1),
        options=ge.GRPOOptions(**options),
    )
    out.loss.backward()
    return out.loss.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "loss", "gradient"),
    [
        # the clip: beyond 1 +- 0.2 on the side that A pushes to, the gradient ends
        ({}, 1.1, 2.0, -2.2, -2.2),
        ({}, 1.5, 2.0, -2.4, 0.0),
        ({}, 0.5, 2.0, -1.0, -1.0),
        ({}, 0.5, -2.0, 1.6, 0.0),
        ({}, 1.5, -2.0, 3.0, 3.0),
        ({"epsilon_high": 0.3}, 1.5, 2.0, -2.6, 0.0),
        ({"epsilon_high": 0.3}, 0.5, -2.0, 1.6, 0.0),
        # delta bounds what the clip leaves open: a large ratio with A < 0
        ({"delta": 3.0}, 4.0, -2.0, 6.0, 0.0),
        ({"delta": 3.0}, 2.5, -2.0, 5.0, 5.0),
        # cispo: the ratio weights log-prob -1, capped, without a gradient of its own
        ({"loss_type": "cispo", "epsilon_high": 3.0}, 2.0, 1.0, 2.0, -2.0),
        ({"loss_type": "cispo", "epsilon_high": 3.0}, 4.0, -1.0, -3.0, 3.0),
        # sapo: 4 A sigmoid(0.5) at tau 1; slope 4 A s (1 - s) rho
        ({"loss_type": "sapo"}, 1.5, 1.0, -2.4898373, -1.4100223),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, 1.5, -1.0, 1.4621172, 1.1796716),
        # vespo: phi = exp(3 + 2 log 2 - 3 * 2) and exp(2 + 3 log 2 - 2 * 2)
        ({"loss_type": "vespo"}, 2.0, 1.0, 0.1991483, -0.1991483),
        ({"loss_type": "vespo"}, 2.0, -1.0, -1.0826823, 1.0826823),
    ],
)
def test_policy_term_of_one_token(options, ratio, advantage, loss, gradient):
    assert one_token(ratio, advantage, **options) == pytest.approx((loss, gradient), abs=2e-6)


@pytest.mark.parametrize(
    ("estimator", "corrected", "kl", "gradient"),
    [
        # x = ref - logp = ln 2, ratio 3: the correction brings rho kl' + rho kl
        ("k3", False, 0.3068528, -1.0),
        ("k1", False, -0.6931472, 1.0),
        ("k2", False, 0.2402265, -0.6931472),
        ("k3", True, 0.9205584, -2.0794415),
        ("k1", True, -2.0794415, 0.9205585),
        ("k2", True, 0.7206795, -1.3587621),
    ],
)
def test_kl_of_one_token(estimator, corrected, kl, gradient):
    options = {"kl_estimator": estimator, "use_bias_correction_kl": corrected, "beta": 0.5}
    result = one_token(3.0, 0.0, ref=-1.0 + math.log(2), **options)
    assert result == pytest.approx((0.5 * kl, 0.5 * gradient), abs=2e-6)


def test_importance_ratio_weights_the_policy_term_and_not_the_kl():
    kw = {"advantages": f32([2.0]), "cu_seqlens": offsets(0, 1)}
    tokens = f32([-1.0]), None, f32([-1.0 + math.log(2)])
    loss = ge.grpo_loss(
        *tokens, importance_ratio=f32([0.25]), options=ge.GRPOOptions(beta=1.0), **kw
    ).loss
    assert loss.item() == pytest.approx(-0.5 + 0.3068528, abs=1e-6)
    vespo = ge.GRPOOptions(loss_type="vespo", beta=1.0)
    loss = ge.grpo_loss(*tokens, importance_ratio=f32([0.25]), options=vespo, **kw).loss
    # w = 0.25: phi = exp(3 + 2 log 0.25 - 0.75), times A, times -logp
    assert loss.item() == pytest.approx(2 * 0.5929837 + 0.3068528, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("logp", "old"), [(-1.0, -60.0), (-60.0, -1.0)])
def test_a_log_ratio_is_bounded_at_20_and_stops_its_gradient_there(level, logp, old):
    lp = f32([logp]).requires_grad_()
    kw = {"advantages": f32([-1.0 if logp > old else 1.0]), "cu_seqlens": offsets(0, 1)}
    options = ge.GRPOOptions(beta=0.0, importance_sampling_level=level)
    out = ge.grpo_loss(lp, f32([old]), options=options, **kw)
    out.loss.backward()
    bound = math.exp(20) if logp > old else -math.exp(-20)
    assert out.loss.item() == pytest.approx(bound, rel=1e-5)
    assert lp.grad.item() == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # ratio 1, so l = -A: tokens 1 and 3 with A 1 and 2, and an empty third sample
        ({"loss_type": "grpo"}, -(1 + 2) / 3),
        ({"loss_type": "luspo"}, -(1 + 6) / 3),
        ({"loss_type": "dr_grpo", "max_completion_length": 10}, -7 / 30),
        ({"loss_type": "bnpo"}, -7 / 4),
        ({"loss_type": "dapo"}, -7 / 4),
        ({"loss_type": "sapo"}, -(2 + 4) / 3),
        # these are - A logp, with log-probs -1 | -2 -3 -4
        ({"loss_type": "cispo", "epsilon_high": 5.0}, (1 + 2 * 9) / 4),
        ({"loss_type": "vespo"}, (1 + 2 * 9) / 4),
    ],
)
def test_reduction_and_its_default_normaliser(options, expected):
    kw = {"options": ge.GRPOOptions(beta=0.0, **options), "advantages": f32([1.0, 2.0, 9.0])}
    kw["cu_seqlens"] = offsets(0, 1, 4, 4)
    logp = f32([-1.0, -2.0, -3.0, -4.0])
    assert ge.grpo_loss(logp, **kw).loss.item() == pytest.approx(expected, rel=1e-6)
    halved = ge.grpo_loss(logp, normalizer=f32(8.0), **kw).loss.item()
    counts = {"bnpo": 4, "dapo": 4, "cispo": 4, "vespo": 4, "dr_grpo": 30}
    count = counts.get(options["loss_type"], 3)
    assert halved == pytest.approx(expected * count / 8, rel=1e-6)


# As many tokens as samples: the two cannot be told apart by their number.
AS_MANY = {"cu_seqlens": offsets(0, 2, 2, 3)}


def test_rewards_stay_per_sample_with_as_many_tokens_as_samples():
    options = ge.GRPOOptions(loss_type="dapo", beta=0.0)
    kw = {"rewards": f32([1.0, 0.0, 1.0]), "cu_groups": offsets(0, 3), "options": options}
    loss = ge.grpo_loss(f32([-1.0, -1.0, -1.0]), **AS_MANY, **kw).loss
    assert loss.item() == pytest.approx(-0.7069568, abs=1e-6)  # A = (1/3) / (sqrt(2)/3 + 1e-4)


@pytest.mark.parametrize(("loss_type", "sign"), [("dapo", -1), ("vespo", 1)])
def test_advantages_stay_per_sample_with_as_many_tokens_as_samples(loss_type, sign):
    kw = {"options": ge.GRPOOptions(loss_type=loss_type, beta=0.0), "advantages": f32([3, 5, 7])}
    loss = ge.grpo_loss(f32([-1.0, -1.0, -1.0]), **AS_MANY, **kw).loss
    assert loss.item() == pytest.approx(sign * (3 + 3 + 7) / 3)


def test_half_precision_log_probs_are_widened():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    old = torch.tensor([-1.125, -1.875], dtype=torch.bfloat16)
    kw = {"advantages": f32([1.0]), "cu_seqlens": offsets(0, 2)}
    out = ge.grpo_loss(logp, old, options=ge.GRPOOptions(beta=0.0), **kw)
    out.loss.backward()
    expected = [-math.exp(0.125) / 2, -math.exp(-0.125) / 2]
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(sum(expected), rel=1e-6)
    assert logp.grad.tolist() == pytest.approx(expected, rel=4e-3)


def masked_call(how, logp, old, ref, ratio, options):
    """Samples of 2, 1 and 2 tokens; the last two tokens, or the last sample, masked by `how`."""
    logp = f32(logp).requires_grad_()
    kw = {"mask": torch.tensor([True, True, True, how != "mask", how != "mask"])}
    kw["in_loss"] = torch.tensor([True, True, how != "in_loss"])
    kw["rewards"] = f32([1.0, 0.0, NAN if how == "reward" else 0.5])
    kw["valid"] = torch.tensor([True, True, how != "valid"])
    out = ge.grpo_loss(
        logp,
        *(None if x is None else f32(x) for x in (old, ref)),
        cu_seqlens=offsets(0, 2, 3, 5),
        cu_groups=offsets(0, 3),
        importance_ratio=f32(ratio),
        options=ge.GRPOOptions(**options),
        **kw,
    )
    out.loss.backward()
    return out, logp.grad.tolist()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -200.0, 1e30])
@pytest.mark.parametrize("how", ["mask", "in_loss", "reward", "valid"])
@pytest.mark.parametrize("options", ALL_LOSSES)
def test_garbage_in_masked_positions_reaches_neither_value_nor_gradient(options, how, garbage):
    logp, old, ref = [-1.0, -2.0, -1.5], [-1.1, -1.9, -1.4], [-1.0, -2.2, -1.7]
    ratio = [1.0, 0.9, 1.1]
    options = {**options, "use_bias_correction_kl": True}
    clean, expected = masked_call(
        how, [*logp, -1.0, -1.0], [*old, -1.0, -1.0], [*ref, -1.0, -1.0], [*ratio, 1, 1], options
    )
    dirty, gradient = masked_call(
        how, [*logp, garbage, -200], [*old, 0, garbage], [*ref, -INF, garbage],
        [*ratio, garbage, NAN], options,
    )  # fmt: skip
    assert math.isfinite(clean.loss.item()) and any(expected)
    assert dirty.loss.item() == clean.loss.item()
    assert gradient == expected and gradient[3:] == [0, 0]
    assert {k: v.item() for k, v in dirty.metrics.items()} == {
        k: v.item() for k, v in clean.metrics.items()
    }
    assert dirty.metrics["nonfinite"] == 0


@pytest.mark.parametrize("how", ["mask", "in_loss", "valid", "rewards", "no tokens"])
@pytest.mark.parametrize("options", ALL_LOSSES)
def test_everything_masked_gives_exactly_zero(options, how):
    n = 0 if how == "no tokens" else 4
    logp = torch.full((n,), NAN if how == "mask" else -1.0, requires_grad=True)
    kw = {"mask": torch.full((n,), how != "mask")}
    kw |= {name: torch.full((2,), how != name) for name in ("in_loss", "valid")}
    out = ge.grpo_loss(
        logp,
        f32([-1.5] * n),
        f32([-2.0] * n),
        rewards=f32([NAN, NAN] if how == "rewards" else [0.0, 1.0]),
        cu_groups=offsets(0, 2),
        cu_seqlens=offsets(0, n // 2, n),
        options=ge.GRPOOptions(**options),
        **kw,
    )
    out.loss.backward()
    assert out.loss.item() == 0
    assert logp.grad.tolist() == [0] * n
    assert out.metrics["nonfinite"] == out.metrics["tokens"] == 0


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("options", ALL_LOSSES)
def test_one_nan_that_counts_makes_the_loss_nan_and_is_counted(options, where):
    tokens = [f32([-1.0, -2.0, -1.5]), f32([-1.1, -1.9, -1.4]), f32([-1.0, -2.2, -1.7])]
    tokens[where][1] = NAN
    kw = {"cu_seqlens": offsets(0, 2, 3), "options": ge.GRPOOptions(**options)}
    out = ge.grpo_loss(*tokens, advantages=f32([1.0, -1.0]), **kw)
    assert math.isnan(out.loss)
    assert out.metrics["nonfinite"] == 1


def test_a_nan_importance_ratio_that_counts_is_counted():
    kw = {"cu_seqlens": offsets(0, 2), "options": ge.GRPOOptions(beta=0.0)}
    kw |= {"advantages": f32([1.0]), "importance_ratio": f32([1.0, NAN])}
    out = ge.grpo_loss(f32([-1.0, -2.0]), **kw)
    assert math.isnan(out.loss)
    assert out.metrics["nonfinite"] == 1


def test_an_infinite_log_prob_that_counts_is_counted():
    kw = {"advantages": f32([1.0]), "cu_seqlens": offsets(0, 2)}
    out = ge.grpo_loss(f32([-1.0, -INF]), f32([-1.0, -2.0]), f32([-1.0, -2.0]), **kw)
    assert out.metrics["nonfinite"] == 1


def test_with_beta_zero_the_reference_is_never_read():
    kw = {"cu_seqlens": offsets(0, 2), "options": ge.GRPOOptions(beta=0.0)}
    kw["advantages"] = f32([1.0])
    out = ge.grpo_loss(f32([-1.0, -2.0]), None, f32([NAN, -INF]), **kw)
    assert out.loss.item() == -1
    assert out.metrics["kl"] == 0
    assert out.metrics["nonfinite"] == 0
