"""The metrics of the loss on hand-worked tokens."""

import math

import pytest
import torch

import grpo_engine as ge
from tensors import f32, offsets


def metrics_by_hand(advantages=None, **options):
    """Six tokens that count with ratios 0.5 1.5 | 1.4 0.5 | 2 2, and two that do not."""
    ratio = f32([0.5, 1.5, 100.0, 1.4, 0.5, 2.0, 2.0, 50.0])
    double = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)  # where ref is twice pi
    logp = torch.full((8,), -2.0, requires_grad=True)
    credit = {"rewards": f32([0.0, 1.0, 0.7, 0.7]), "cu_groups": offsets(0, 2, 4)}
    return ge.grpo_loss(
        logp,
        logp.detach() - ratio.log(),
        logp.detach() + double * math.log(2),
        cu_seqlens=offsets(0, 3, 5, 7, 8),
        mask=torch.tensor([1, 1, 0, 1, 1, 1, 1, 1]),
        in_loss=torch.tensor([True, True, True, False]),
        options=ge.GRPOOptions(**options),
        **(credit if advantages is None else {"advantages": f32(advantages)}),
    ).metrics


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"epsilon": 0.6}, {"clip_low": 0, "clip_high": 0, "clip_region": 0}),
        ({"epsilon_high": 0.45}, {"clip_high": 0, "clip_region": 1 / 6}),
        ({"beta": 0.0}, {"kl": 0}),
        ({"kl_estimator": "k1"}, {"kl": -0.6931472 / 3}),
        ({"loss_type": "sapo"}, {}),
        # ratios sqrt(0.75), sqrt(0.7) and 2: within 0.2 where A is not 0
        (
            {"importance_sampling_level": "sequence"},
            {"ratio_min": 0.8366600, "ratio_mean": (0.8660254 + 0.83666 + 2) / 3}
            | {"clip_low": 0, "clip_high": 0, "clip_region": 0},
        ),
    ],
)
def test_metrics_of_hand_worked_tokens(options, changes):
    expected = {"ratio_min": 0.5, "ratio_max": 2.0, "ratio_mean": 7.9 / 6}
    expected |= {"clip_low": 1 / 6, "clip_high": 1 / 6, "clip_region": 2 / 6}
    expected |= {"tokens": 6, "samples": 3, "no_signal": 0.5, "nonfinite": 0}
    expected |= {"kl": 0.3068528 / 3, "advantage_abs": 4 * 0.99980004 / 6}
    metrics = metrics_by_hand(**options)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(expected | changes, abs=1e-6)
    assert not any(v.requires_grad for v in metrics.values())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_of_the_ratio_leaves_out_masked_tokens(sign):
    # A masked token's ratio, 1, lies outside the range of the others.
    old = f32([-1.0 - sign * math.log(2), -1.0 - sign * math.log(3), -9.0])
    kw = {"mask": torch.tensor([True, True, False]), "options": ge.GRPOOptions(beta=0.0)}
    kw |= {"advantages": f32([1.0]), "cu_seqlens": offsets(0, 3)}
    metrics = ge.grpo_loss(f32([-1.0, -1.0, -1.0]), old, **kw).metrics
    extremes = metrics["ratio_min"].item(), metrics["ratio_max"].item()
    assert extremes == pytest.approx(sorted([2.0**sign, 3.0**sign]), rel=1e-6)


@pytest.mark.parametrize(("cap", "share"), [(1.3, 1 / 6), (1.45, 0)])
def test_clip_region_of_cispo_is_the_share_beyond_its_cap_with_positive_advantage(cap, share):
    metrics = metrics_by_hand(loss_type="cispo", epsilon_high=cap)
    assert metrics["clip_region"].item() == pytest.approx(share)


def test_no_signal_is_reported_only_with_rewards():
    metrics = metrics_by_hand(advantages=[-2.0, 1.0, 0.0, 9.0])
    assert "no_signal" not in metrics
    assert metrics["advantage_abs"].item() == pytest.approx((2 * 2 + 2 * 1) / 6)
