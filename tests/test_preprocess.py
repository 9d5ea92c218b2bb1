"""Rewards on their way to the statistics: each step by hand, and what must not matter to it."""

import math

import numpy as np
import pytest

from grpo_engine.groups.make import make_batch
from grpo_engine.groups.preprocess import PercentileWindow, rank, scale_over
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.sample_config import ComponentConfig
from samples import batch_of, rules, samples_of

EPS = 1e-4
PLAIN = GRPOOptions(advantage_clip=None)


def advantages(rewards, scoring=None, groups=None, options=PLAIN, **kwargs) -> list[float]:
    made = make_batch(samples_of(rewards, **kwargs), rules(scoring, groups, options))
    return made.advantages.tolist()


TEACHING = [
    ([0, 0, 0, 1], [-0.577, -0.577, -0.577, 1.732]),
    ([0] * 7 + [1], [-0.378] * 7 + [2.645]),
    ([0.5] * 6, [0.0] * 6),
    # Without the None: mean 2/3, standard deviation sqrt(2)/3.
    ([1, None, 1, 0], [0.7071, 0.0, 0.7071, -1.4142]),
]


@pytest.mark.parametrize(("rewards", "expected"), TEACHING)
def test_teaching_groups(rewards, expected):
    assert advantages([rewards], options=GRPOOptions()) == pytest.approx(expected, abs=1e-3)


def test_one_extreme_reward_teaches_as_a_plain_one():
    extreme = advantages([[0.1, 0.1, 0.1, 10]], options=GRPOOptions())
    plain = advantages([[0.1, 0.1, 0.1, 0.9]], options=GRPOOptions())
    assert extreme == pytest.approx(plain, abs=1e-3)
    # (10 - 2.575) / 4.2868
    assert extreme[3] == pytest.approx(1.732, abs=1e-3)


def test_equal_rewards_teach_exactly_nothing():
    assert advantages([[0.1] * 4]) == [0.0] * 4


def test_ranks_share_ties():
    assert rank(np.array([3.0, 1.0, 2.0, 5.0, 4.0])).tolist() == [0.0, -1.0, -0.5, 1.0, 0.5]
    # 0 and 0 share the places 0 and 1 of 3: (0.5 * 2 / 3) - 1
    assert rank(np.array([7.0, 0.0, 0.0, 1.0])) == pytest.approx([1, -2 / 3, -2 / 3, 1 / 3])
    assert rank(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert rank(np.array([2.0])).tolist() == [0.0]


def test_ranked_group():
    # Ranks -1, -1/3, 1/3, 1: mean 0, standard deviation sqrt(5)/3.
    found = advantages([[0.0, 100.0, 0.2, 0.1]], {"rank": True})
    std = math.sqrt(5) / 3 + EPS
    assert found == pytest.approx([-1 / std, 1 / std, 1 / 3 / std, -1 / 3 / std])


def test_signal_is_judged_before_ranks_make_spread_of_noise():
    # The ranks of noise of 0.001 are as far apart as any.
    options = GRPOOptions(min_std=0.01)
    noise = [0.5, 0.501, 0.5, 0.5]
    assert advantages([noise], {"rank": True}, options=options) == [0.0] * 4
    batch = make_batch(samples_of([noise]), rules({"rank": True}, options=options))
    assert (batch.signal.tolist(), batch.signal_causes) == ([False], ["low_variance"])
    assert max(advantages([[0.5, 0.6, 0.5, 0.5]], {"rank": True}, options=options)) > 1.5


def test_ranks_are_not_held_to_min_std():
    # Rewards of a standard deviation of 4, ranks of 1: a threshold of 2 is for the rewards.
    found = advantages([[0, 8]], {"rank": True}, options=GRPOOptions(min_std=2.0))
    assert found == pytest.approx([-1 / (1 + EPS), 1 / (1 + EPS)])


def test_running_percentiles_cut_outliers():
    window = PercentileWindow(5)
    window.add(np.array([9.0, 0.0, 1.0, 2.0, 3.0, 4.0]))  # the 9 has left
    # The 25th and 75th percentile of 0, 1, 2, 3, 4.
    assert window.cut(np.array([-7.0, 1.5, 50.0]), [25, 75]).tolist() == [1.0, 1.5, 3.0]
    window.add(np.array([10.0]))
    assert window.values == [1.0, 2.0, 3.0, 4.0, 10.0]
    assert PercentileWindow(5).cut(np.array([7.0]), [5, 95]).tolist() == [7.0]


def test_step_is_cut_to_percentiles_of_a_window_that_holds_it():
    # 0, 1, 2, 3, 100: the 75th percentile is 3, so the group is 0, 1, 2, 3, 3 cut below at 1.
    scoring = {"clip_percentiles": [25.0, 75.0], "clip_window": 5}
    found = advantages([[0, 1, 2, 3, 100]], scoring)
    cut = np.array([1, 1, 2, 3, 3.0])
    assert found == pytest.approx(((cut - cut.mean()) / (cut.std() + EPS)).tolist(), rel=1e-5)


def test_window_looks_back_and_takes_in_valid_totals_alone():
    window = PercentileWindow(100)
    window.add(np.arange(10.0))
    made = samples_of([[2, None, 50]])
    scoring = {"clip_percentiles": [0.0, 90.0]}
    batch = make_batch(made, rules(scoring, options=PLAIN), window)
    assert window.values == [*range(10), 2.0, 50.0]
    # The 90th percentile of twelve values is 0.9 * 11 = 9.9 places up: 0.1 * 8 + 0.9 * 9.
    assert batch.advantages.tolist() == pytest.approx([-1, 0, 1], abs=1e-3)
    assert batch.rewards.tolist()[2] == 50.0  # the record has what was earned
    high = 0.1 * 8 + 0.9 * 9
    assert window.copy().cut(np.array([50.0]), [0, 90])[0] == pytest.approx(high)


def test_z_scores_in_parts():
    values = np.array([1.0, 3.0, np.nan, 10.0, 10.0, 5.0])
    parts = [np.array([0, 1, 2]), np.array([3, 4])]
    found = scale_over(values, parts, GRPOOptions())
    assert found[:2] == pytest.approx([-1 / (1 + EPS), 1 / (1 + EPS)])
    assert found[3:5].tolist() == [0.0, 0.0]
    assert np.isnan(found[[2, 5]]).all()
    # With ddof 1 the deviation of 1 and 3 is sqrt(2); one value alone has none.
    found = scale_over(values, [np.array([0, 1]), np.array([5])], GRPOOptions(ddof=1))
    assert found[[0, 1, 5]] == pytest.approx([-1 / (2**0.5 + EPS), 1 / (2**0.5 + EPS), 0.0])


def test_component_scaled_over_the_step_and_one_over_the_group():
    rewards = [[0, 0], [0, 0]]
    components = {"a": [0.0, 2.0, 4.0, 6.0], "b": [1.0, 0.0, 0.0, 100.0]}
    configs = {"a": ComponentConfig(scale="batch"), "b": ComponentConfig(scale="group", weight=0.5)}
    options = GRPOOptions(scale_rewards="none", advantage_clip=None)
    found = advantages(rewards, options=options, components=components, configs=configs)
    # a: mean 3, deviation sqrt(5); b: +1, -1 in the first group and -1, +1 in the second.
    a = [x / (5**0.5 + EPS) for x in (-3, -1, 1, 3)]
    b = [0.5 / (0.5 + EPS) * 0.5, -0.5 / (0.5 + EPS) * 0.5]
    b += [-50 / (50 + EPS) * 0.5, 50 / (50 + EPS) * 0.5]
    totals = np.array(a) + b
    expected = totals - np.repeat(totals.reshape(2, 2).mean(1), 2)
    assert found == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_failed_gate_is_never_above_an_answer_among_z_scores():
    # z-scores -1.22, 0, 1.22: a raw floor of 0 would be a middling one.
    components = {"a": [1.0, 2.0, 3.0, 9.0], "g": [1.0, 1.0, 1.0, 0.0]}
    configs = {"a": ComponentConfig(scale="group"), "g": ComponentConfig(weight=0.0, gate=0.5)}
    found = advantages([[0] * 4], components=components, configs=configs)
    assert found[3] == min(found) and found[3] == found[0]


def gdpo(components, configs=None, sizes=(4,), **scoring) -> list[float]:
    scoring = {"aggregate": "normalize_then_sum", **scoring}
    rewards = [[0.0] * size for size in sizes]
    return advantages(rewards, scoring, components=components, configs=configs)


def test_normalize_then_sum_keeps_apart_what_a_sum_cannot():
    # (0, 10) and (1, 0) weigh alike here, however far apart the components' units are.
    components = {"right": [0.0, 0.0, 0.0, 1.0], "style": [10.0, 0.0, 0.0, 0.0]}
    found = gdpo(components)
    # Each component is a teaching group: 1.732 for the one, -0.577 for the others.
    assert found == pytest.approx([1.155, -1.155, -1.155, 1.155], abs=1e-3)
    summed = advantages([[0] * 4], components=components)
    assert summed[3] < 0 < summed[0]  # 10 against 1


def test_normalize_then_sum_is_weighted_and_not_normalised_again():
    components = {"a": [0.0, 1.0], "b": [1.0, 0.0]}
    configs = {"a": ComponentConfig(weight=3.0)}
    one = 0.5 / (0.5 + EPS)
    assert gdpo(components, configs, (2,)) == pytest.approx([-2 * one, 2 * one])
    again = gdpo(components, configs, (2,), renormalize="group")
    assert again == pytest.approx([-1, 1], abs=1e-4)


def test_normalize_then_sum_renormalised_over_the_batch():
    components = {"a": [0.0, 1.0, 0.0, 1.0], "b": [0.0, 1.0, 1.0, 0.0]}
    configs = {"b": ComponentConfig(weight=0.5)}
    # Sums -1.5, 1.5, -0.5, 0.5; over all four the deviation is sqrt((2.25 + 0.25) / 2).
    found = gdpo(components, configs, (2, 2), renormalize="batch")
    std = 1.25**0.5
    assert found == pytest.approx([-1.5 / std, 1.5 / std, -0.5 / std, 0.5 / std], abs=1e-3)


def test_normalize_then_sum_leaves_out_what_does_not_apply():
    components = {"a": [0.0, 1.0, None, None], "b": [None, None, 0.0, 2.0]}
    assert gdpo(components) == pytest.approx([-1, 1, -1, 1], abs=1e-3)


SCORINGS = {
    "sum": {},
    "rank": {"rank": True},
    "gdpo": {"aggregate": "normalize_then_sum"},
    "gdpo, batch": {"aggregate": "normalize_then_sum", "renormalize": "batch"},
}
RNG = np.random.default_rng(3)
TWO = {"a": RNG.normal(size=10), "b": RNG.normal(size=10)}
SIZES = (4, 6)


def of_two(values: dict[str, np.ndarray], scoring: dict, configs=None, sizes=SIZES, **kwargs):
    components = {name: column.tolist() for name, column in values.items()}
    rewards = [[0.0] * size for size in sizes]
    return advantages(rewards, scoring, components=components, configs=configs, **kwargs)


@pytest.mark.parametrize("name", SCORINGS)
def test_shift_changes_nothing(name):
    whole = of_two(TWO, SCORINGS[name])
    moved = of_two({"a": TWO["a"] + 5, "b": TWO["b"] - 3}, SCORINGS[name])
    assert moved == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("name", SCORINGS)
def test_a_positive_factor_changes_nothing(name):
    whole = of_two(TWO, SCORINGS[name])
    scaled = of_two({n: x * 50 for n, x in TWO.items()}, SCORINGS[name])
    assert scaled == pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize("name", SCORINGS)
def test_order_in_a_group_does_not_matter(name):
    order = np.concatenate([RNG.permutation(4), 4 + RNG.permutation(6)])
    whole = np.array(of_two(TWO, SCORINGS[name]))
    moved = of_two({n: x[order] for n, x in TWO.items()}, SCORINGS[name])
    assert moved == pytest.approx(whole[order].tolist(), abs=1e-6)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("name", SCORINGS)
def test_an_invalid_sample_changes_nothing_for_the_others(name, scale):
    configs = {"a": ComponentConfig(scale=scale)}
    whole = of_two(TWO, SCORINGS[name], configs)
    extra = {n: np.insert(x, 2, 77.0) for n, x in TWO.items()}
    failures = [None] * 11
    failures[2] = "timed out"
    found = of_two(extra, SCORINGS[name], configs, (5, 6), failures=failures)
    assert found.pop(2) == 0.0
    assert found == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("policy", ["keep", "downweight", "skip"])
def test_groups_of_low_variance(policy):
    options = GRPOOptions(min_std=0.1, advantage_clip=None)
    groups = {"no_signal": policy, "no_signal_weight": 0.25}
    found = advantages([[0.5, 0.6], [0, 1], [0.3, 0.3]], None, groups, options)
    factor = {"keep": 1.0, "downweight": 0.25, "skip": 0.0}[policy]
    small, big = 0.05 / (0.05 + EPS) * factor, 0.5 / (0.5 + EPS)
    assert found == pytest.approx([-small, small, -big, big, 0, 0], rel=1e-5)
    batch = make_batch(samples_of([[0.5, 0.6], [0, 1]]), rules(None, groups, options))
    assert batch.signal.tolist() == [factor > 0, True]
    assert batch.signal_causes == ["low_variance", None]


def test_truncated_samples_with_a_penalty_or_less_weight():
    cut = {"finish": [["stop", "length"]]}
    found = advantages([[0, 1]], None, {"truncated": "penalty", "truncated_penalty": 1.5}, **cut)
    assert found == pytest.approx([1, -1], abs=1e-3)  # 0 against -0.5
    found = advantages([[0, 1]], None, {"truncated": "downweight", "truncated_weight": 0.2}, **cut)
    assert found == pytest.approx([-1, 0.2], abs=1e-3)


def test_batch_records_raw_totals_whatever_is_made_of_them():
    batch = make_batch(samples_of([[3, 1, 2]]), rules({"rank": True}))
    assert batch.rewards.tolist() == [3.0, 1.0, 2.0]
    assert batch_of([[3, 1, None]]).components == {"f": [3.0, 1.0, None]}


@pytest.mark.parametrize("ddof", [0, 1])
def test_z_scores_of_none_one_and_equal_ones(ddof):
    options = GRPOOptions(ddof=ddof)
    for count in range(30):
        values = np.array([math.nan, *[0.1] * count])
        found = scale_over(values, [np.arange(count + 1)], options)
        assert math.isnan(found[0]) and found[1:].tolist() == [0.0] * count
