"""The group statistics in Triton under the interpreter: by hand, and against the reference.

The sizes of chunks are made small, so that groups of a few samples take several of them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton.language as tl

from grpo_engine.kernels import group_stats, reference
from grpo_engine.kernels.group_loss import group_advantages, grpo_loss
from grpo_engine.kernels.options import GRPOOptions
from loss_cases import assert_same, expected, make_case, make_options, offsets, outcome

NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 0 / 0 in the interpreter


def advantages(groups, valid=None, **options):
    """Lists of rewards -> lists of advantages, and the signal flags."""
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float32)
    valid = None if valid is None else torch.tensor(valid)
    cu = offsets(list(map(len, groups)))
    a, signal = group_advantages(rewards, cu, valid, GRPOOptions(**options))
    return [a.tolist()[start:end] for start, end in pairwise(cu.tolist())], signal.tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # rewards 0 1 2 5: mean 2, median 1.5, others' means 8/3 7/3 2 1, variance 14/4 or 14/3
        ({}, [-1.0689873, -0.5344937, 0.0, 1.6034810]),
        ({"ddof": 1}, [-0.9257769, -0.4628885, 0.0, 1.3886654]),
        ({"epsilon_std": 1.0}, [-0.6966629, -0.3483315, 0.0, 1.0449944]),
        ({"scale_rewards": "none"}, [-2.0, -1.0, 0.0, 3.0]),
        ({"scale_rewards": "none", "baseline": "median"}, [-1.5, -0.5, 0.5, 3.5]),
        ({"scale_rewards": "none", "baseline": "loo"}, [-8 / 3, -4 / 3, 0.0, 4.0]),
        ({"scale_rewards": "none", "advantage_clip": None}, [-2.0, -1.0, 0.0, 3.0]),
        ({"scale_rewards": "none", "advantage_clip": 1.5}, [-1.5, -1.0, 0.0, 1.5]),
        (
            {"scale_rewards": "none", "advantage_clip": None, "baseline": "loo"},
            [-8 / 3, -4 / 3, 0, 4],
        ),
        # with the group of 7 7 9: the valid rewards 0 1 2 5 7 7 9, variance 209/7 - (31/7)^2
        ({"scale_rewards": "batch"}, [-0.6248311, -0.3124155, 0.0, 0.9372466]),
    ],
)
def test_options_on_hand_worked_groups(options, expected):
    a, signal = advantages([[0, 1, 2, 5], [7, 7, 9]], **options)
    assert a[0] == pytest.approx(expected, abs=2e-6)
    assert signal == [True, True]


@pytest.mark.parametrize(("clip", "chunk"), [(None, 4), (0.9, 64)])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "median", "loo"])
def test_every_combination(monkeypatch, baseline, scale, ddof, clip, chunk):
    for name in ("OFFSET_BLOCK", "GROUP_BLOCK", "OTHERS_BLOCK", "BATCH_BLOCK"):
        monkeypatch.setattr(group_stats, name, tl.constexpr(chunk))
    o = GRPOOptions(baseline=baseline, scale_rewards=scale, ddof=ddof, advantage_clip=clip)
    rewards = torch.tensor([0.3, 1.0, 0.25, NAN, 0.7, 0.7, 9.0, 0.1])
    valid = torch.tensor([True] * 6 + [False, True])
    assert_is_the_reference(rewards, [2, 0, 5, 1], valid, o)


def assert_is_the_reference(rewards, sizes, valid, o):
    a, signal = group_advantages(rewards, offsets(sizes), valid, o)
    expected_a, expected_signal = reference.group_advantages(
        rewards.double(), offsets(sizes), valid, o
    )
    np.testing.assert_allclose(a, expected_a, rtol=2e-6, atol=1e-7)
    assert torch.equal(signal, expected_signal)
    assert (a[expected_a == 0] == 0).all() and expected_signal.any()


@pytest.mark.parametrize("baseline", ["mean", "median", "loo"])
def test_equal_rewards_get_exactly_zero_though_their_mean_rounds(baseline):
    groups = [[0.1] * 7, [1 / 3] * 3, [16777217.0] * 2, [1e30] * 3, [0, 1]]
    a, signal = advantages(groups, baseline=baseline, scale_rewards="batch")
    assert a[:4] == [[0.0] * len(group) for group in groups[:4]]
    assert signal == [False] * 4 + [True]


def test_a_constant_added_to_the_rewards_changes_no_bit():
    assert advantages([[0, 1, 0.5, 0.25]]) == advantages([[8192, 8193, 8192.5, 8192.25]])


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_squares_of_rewards_neither_overflow_nor_vanish(size):
    a, signal = advantages([[0, size, 0, size]])
    assert a[0][1] == pytest.approx(size / 2 / (size / 2 + 1e-4), rel=1e-5)
    assert signal == [True]


@pytest.mark.parametrize("reward", [NAN, INF, -INF, 1e6])
def test_a_sample_outside_the_statistics_moves_no_sibling(reward):
    # A finite reward is taken out by `valid`, the others by not being finite.
    a, _ = advantages([[1, 0, reward, 0]], [True, True, reward != 1e6, True])
    without, _ = advantages([[1, 0, 0]])
    assert a[0] == [*without[0][:2], 0.0, without[0][2]]


@pytest.mark.parametrize(
    ("group", "valid"),
    [
        ([3.0], [True]),
        ([NAN, 3.0], [True, True]),
        ([1.0, 3.0], [False, True]),
        ([1.0, 3.0], [False, False]),
        ([2.0, 2.0, 9.0], [True, True, False]),
        ([], []),
    ],
)
def test_fewer_than_two_different_valid_rewards_carry_no_signal(group, valid):
    a, signal = advantages([group, [0, 1]], [*valid, True, True])
    assert a[0] == [0.0] * len(group)
    assert signal == [False, True]


def test_a_std_that_is_not_above_min_std_carries_no_signal():
    assert advantages([[0, 1]], min_std=0.5) == ([[0.0, 0.0]], [False])
    assert advantages([[0, 1]], min_std=0.4999, epsilon_std=0) == ([[-1.0, 1.0]], [True])


def test_no_sample_and_slices():
    assert advantages([[], []]) == ([[], []], [False, False])
    twice = torch.tensor([0.0, 9.0, 1.0, 9.0])
    valid = torch.tensor([True, False, True, False])
    a, _ = group_advantages(twice[::2], offsets([2]), valid[::2], GRPOOptions(epsilon_std=0))
    assert a.tolist() == [-1.0, 1.0]


def test_groups_of_1_2_7_16_and_64():
    # The last sum takes two blocks; one group is empty, one of equal and one of invalid rewards.
    sizes = [64, 1, 0, 2, 7, 16, 2]
    rng = np.random.default_rng(10)
    lengths = rng.integers(0, 6, sum(sizes))
    rewards = torch.tensor(rng.random(sum(sizes)), dtype=torch.float32)
    cu = offsets(sizes)
    rewards[cu[4] : cu[5]] = 0.1
    rewards[cu[6] :] = torch.tensor([NAN, INF])
    rewards[[3, 70]] = torch.tensor([-INF, NAN])
    in_loss = torch.tensor(rng.random(sum(sizes)) < 0.8)
    valid = torch.tensor(rng.random(sum(sizes)) < 0.9)
    kw = {"rewards": rewards, "cu_groups": cu, "in_loss": in_loss, "valid": valid}
    statistics = {"baseline": "median", "scale_rewards": "batch", "ddof": 1}
    o = make_options("grpo", kl=("k3", False), **statistics)
    case = make_case(o, lengths, 0.1, seed=11, **kw)
    out, truth = outcome(grpo_loss, case), expected(case)
    assert_same(out, truth)
    assert truth.metrics["no_signal"] == pytest.approx(4 / 7)
    assert truth.metrics["samples"] < 80


@pytest.mark.parametrize(
    ("samples", "flags"),
    [
        (3, {"valid": [True, True, False, True]}),
        (3, {"in_loss": [True, True, False, True]}),
        (2, {"valid": [False, True, True, True], "in_loss": [True, False, True, True]}),
    ],
)
@pytest.mark.parametrize("credit", ["advantages", "rewards"])
def test_who_is_in_the_loss(samples, flags, credit):
    flags = {name: torch.tensor(x) for name, x in flags.items()}
    if credit == "rewards":
        flags |= {"rewards": torch.tensor([0.5, 1.0, 0.0, 0.2]), "cu_groups": offsets([4])}
    case = make_case(make_options("grpo", kl=("k3", False)), seed=12, **flags)
    out = outcome(grpo_loss, case)
    assert_same(out, expected(case))
    assert out.metrics["samples"] == samples
