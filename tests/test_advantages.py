"""Advantages relative to the group: hand-worked, and against Python's `statistics`."""

import math
import random
import statistics
from itertools import accumulate, pairwise, product

import pytest
import torch

import grpo_engine as ge

NAN, INF = math.nan, math.inf


def advantages(groups, valid=None, dtype=torch.float32, **options):
    """Lists of rewards -> lists of advantages, and the signal flags."""
    cu = [0, *accumulate(map(len, groups))]
    rewards = torch.tensor([r for group in groups for r in group], dtype=dtype)
    valid = None if valid is None else torch.tensor(valid)
    a, signal = ge.group_advantages(
        rewards, torch.tensor(cu, dtype=torch.int32), valid, ge.GRPOOptions(**options)
    )
    return [a.tolist()[start:end] for start, end in pairwise(cu)], signal.tolist()


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        # mean 1/4, std sqrt(3)/4: 0.75 / (0.4330127 + 1e-4) and -0.25 / the same
        ([0, 0, 0, 1], [-0.5772170, -0.5772170, -0.5772170, 1.7316509]),
        # mean 1/8, std sqrt(7)/8: 0.875 / (0.3307189 + 1e-4) and -0.125 / the same
        ([0] * 7 + [1], [-0.3778502] * 7 + [2.6449515]),
        # mean 2, std sqrt(2/3)
        ([1, 2, 3], [-1.2245949, 0.0, 1.2245949]),
    ],
)
def test_default_advantages_of_teaching_groups(group, expected):
    a, signal = advantages([group])
    assert a[0] == pytest.approx(expected, abs=1e-6)
    assert signal == [True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # rewards 0 1 2 5: mean 2, median 1.5, others' means 8/3 7/3 2 1, variance 14/4 or 14/3
        ({}, [-1.0689873, -0.5344937, 0.0, 1.6034810]),
        ({"ddof": 1}, [-0.9257769, -0.4628885, 0.0, 1.3886654]),
        ({"scale_rewards": "none"}, [-2.0, -1.0, 0.0, 3.0]),
        ({"scale_rewards": "none", "baseline": "median"}, [-1.5, -0.5, 0.5, 3.5]),
        ({"scale_rewards": "none", "baseline": "loo"}, [-8 / 3, -4 / 3, 0.0, 4.0]),
        ({"scale_rewards": "none", "advantage_clip": 2.5}, [-2.0, -1.0, 0.0, 2.5]),
        ({"scale_rewards": "none", "advantage_clip": 0.5}, [-0.5, -0.5, 0.0, 0.5]),
        ({"epsilon_std": 1.0}, [-0.6966629, -0.3483315, 0.0, 1.0449944]),
    ],
)
def test_options_on_a_hand_worked_group(options, expected):
    a, signal = advantages([[0, 1, 2, 5]], **options)
    assert a[0] == pytest.approx(expected, abs=1e-6)
    assert signal == [True]


def test_median_of_an_odd_group_is_its_middle_reward():
    a, _ = advantages([[9, 1, 2]], baseline="median", scale_rewards="none", advantage_clip=None)
    assert a[0] == [7.0, -1.0, 0.0]


def test_advantage_clip_bounds_both_signs_and_none_does_not_clip():
    group = [0] * 99 + [1]  # A of the last is 0.99 / (0.0994987 + 1e-4) = 9.9398834
    clipped, _ = advantages([group])
    free, _ = advantages([group], advantage_clip=None)
    mirrored, _ = advantages([[-r for r in group]])
    assert clipped[0][-1] == 5.0
    assert mirrored[0][-1] == -5.0
    assert free[0][-1] == pytest.approx(9.9398834, rel=1e-6)


def test_batch_scaling_divides_by_the_std_of_all_valid_samples():
    # 0 1 2 3 and the invalid 50: variance of 0 1 2 3 is 1.25; group means are 0.5 and 2.5
    a, signal = advantages(
        [[0, 1], [2, 3, 50]], [True, True, True, True, False], scale_rewards="batch"
    )
    expected = 0.5 / (math.sqrt(1.25) + 1e-4)
    assert a[0] == pytest.approx([-expected, expected], rel=1e-6)
    assert a[1] == pytest.approx([-expected, expected, 0.0], rel=1e-6)
    assert signal == [True, True]


def test_batch_scaling_keeps_equal_groups_at_exactly_zero():
    a, signal = advantages([[0.1] * 7, [0.7] * 7, [0, 1]], scale_rewards="batch")
    assert a[0] == a[1] == [0.0] * 7
    assert signal == [False, False, True]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "median", "loo"])
@pytest.mark.parametrize("size", [2, 3, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_get_exactly_zero_though_their_mean_rounds(dtype, size, baseline, scale):
    # Seven times 0.1 is not 0.7 in binary: a look at the std, or at the mean, sees a difference.
    values = [0.1, 0.4, 1 / 3, 1e-30, -0.7, 16777217.0, 1e30, 0.0]
    values += [0.1 * 10.0**k for k in range(-12, 13, 3)]
    groups = [[v] * size for v in values]
    a, signal = advantages(groups, dtype=dtype, baseline=baseline, scale_rewards=scale)
    assert a == [[0.0] * size] * len(values)
    assert signal == [False] * len(values)


def test_a_missing_reward_leaves_the_statistics_and_gets_zero():
    a, signal = advantages([[1, NAN, 1, 0]])  # mean 2/3, std sqrt(2)/3
    assert a[0] == pytest.approx([0.7069568, 0.0, 0.7069568, -1.4139137], abs=1e-6)
    assert a[0][1] == 0.0
    assert signal == [True]


@pytest.mark.parametrize("reward", [NAN, INF, -INF, 1e6])
def test_a_sample_outside_the_statistics_moves_no_sibling(reward):
    # A finite reward is taken out by `valid`, the others by not being finite.
    valid = [True, True, reward != 1e6, True]
    a, _ = advantages([[1, 0, reward, 0]], valid)
    without, _ = advantages([[1, 0, 0]])
    assert a[0] == [*without[0][:2], 0.0, without[0][2]]


def test_valid_cannot_bring_a_reward_that_is_not_finite_back():
    a, _ = advantages([[1, NAN, 0, INF]], [True] * 4)
    without, _ = advantages([[1, 0]])
    assert a[0] == [without[0][0], 0.0, without[0][1], 0.0]


@pytest.mark.parametrize(
    ("group", "valid"),
    [
        ([3.0], [True]),
        ([NAN, 3.0], [True, True]),
        ([1.0, 3.0], [False, True]),
        ([1.0, 3.0], [False, False]),
        ([NAN, INF], [True, True]),
        ([2.0, 2.0, 9.0], [True, True, False]),
        ([], []),
    ],
)
def test_fewer_than_two_different_valid_rewards_carry_no_signal(group, valid):
    a, signal = advantages([group, [0, 1]], [*valid, True, True])
    assert a[0] == [0.0] * len(group)
    assert signal == [False, True]


def test_min_std_silences_a_group_whose_std_is_not_above_it():
    groups = [[0, 0, 1, 1], [0, 0, 1.5, 1.5]]  # std 0.5, exactly, and 0.75
    a, signal = advantages(groups, min_std=0.5)
    assert signal == [False, True]
    assert a[0] == [0.0] * 4
    assert a[1] == pytest.approx([-0.9998667, -0.9998667, 0.9998667, 0.9998667], abs=1e-6)
    # the unbiased std of the first is 0.577
    assert advantages(groups, min_std=0.5, ddof=1)[1] == [True, True]


@pytest.mark.parametrize("baseline", ["mean", "median", "loo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("shift", [-3.0, 1024.0, 1e6])
def test_a_constant_added_to_a_group_changes_nothing(baseline, scale, shift):
    group = [0.0, 0.25, 0.5, 2.0, 0.25]  # exact in float32, shifted too
    options = {"baseline": baseline, "scale_rewards": scale}
    a, _ = advantages([group], **options)
    shifted, _ = advantages([[r + shift for r in group]], **options)
    assert shifted[0] == pytest.approx(a[0], rel=1e-6, abs=1e-7)


def test_a_positive_factor_changes_nothing_but_the_weight_of_epsilon():
    group = [0.0, 0.25, 0.5, 2.0]
    exact = {"epsilon_std": 0.0, "dtype": torch.float64}
    a, _ = advantages([group], **exact)
    scaled, _ = advantages([[64 * r for r in group]], **exact)
    assert scaled[0] == pytest.approx(a[0], rel=1e-12)
    default, _ = advantages([group])
    assert default[0] == pytest.approx(a[0], rel=2e-4)
    assert default[0] != pytest.approx(a[0], rel=1e-5)


def expected_advantages(groups, o):
    """The advantages by the equations, with `statistics`; rewards that are not finite are out."""
    std = statistics.stdev if o.ddof else statistics.pstdev
    kept = [[r for r in group if math.isfinite(r)] for group in groups]
    everyone = [r for group in kept for r in group]
    result, signal = [], []
    for group, x in zip(groups, kept, strict=True):
        speaks = len(x) >= 2 and max(x) > min(x) and std(x) > o.min_std
        signal.append(speaks)
        row = []
        for r in group:
            if not speaks or not math.isfinite(r):
                row.append(0.0)
                continue
            others = (sum(x) - r) / (len(x) - 1)
            centre = {"mean": statistics.mean(x), "median": statistics.median(x), "loo": others}
            divisor = {"group": std(x), "batch": std(everyone), "none": None}[o.scale_rewards]
            a = r - centre[o.baseline]
            a = a if divisor is None else a / (divisor + o.epsilon_std)
            c = INF if o.advantage_clip is None else o.advantage_clip
            row.append(min(max(a, -c), c))
        result.append(row)
    return result, signal


@pytest.mark.parametrize(
    ("baseline", "scale", "ddof", "clip"),
    list(product(["mean", "median", "loo"], ["group", "batch", "none"], [0, 1], [None, 0.8])),
)
def test_random_ragged_groups_match_the_equations(baseline, scale, ddof, clip):
    rng = random.Random(f"{baseline}{scale}{ddof}{clip}")
    o = ge.GRPOOptions(
        baseline=baseline, scale_rewards=scale, ddof=ddof, advantage_clip=clip, min_std=0.3
    )
    draw = [lambda: rng.choice([0.0, 0.5, 1.0, 2.0]), lambda: rng.choice([1.0, NAN, 3.0])]
    groups = [[rng.choice(draw)() for _ in range(rng.choice([0, 1, 2, 3, 8]))] for _ in range(40)]
    a, signal = advantages(groups, **vars(o))
    expected, expected_signal = expected_advantages(groups, o)
    assert signal == expected_signal
    assert 5 < sum(signal) < 40
    for row, expected_row in zip(a, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6, abs=1e-7)
