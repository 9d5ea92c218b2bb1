"""Figures of a step, by hand."""

import pytest

from grpo_engine.guards.figures import (
    length_bucket,
    mean_by,
    repetition,
    reward_length_correlation,
    unique_share,
)


@pytest.mark.parametrize(
    "ids, n, share",
    [
        ([], 4, 0.0),
        ([7, 7, 7], 4, 0.0),
        ([1, 2, 3, 4], 4, 0.0),
        ([7, 7, 7, 7, 7], 4, 0.5),  # two 4-grams, one distinct
        ([1, 2, 1, 2, 1, 2], 2, 0.6),  # 12 21 12 21 12
        ([1, 2, 3, 4, 1, 2, 3, 4], 4, 0.2),  # five, of which 1234 twice
        (["a", "b", "a", "b"], 2, 1 / 3),
    ],
)
def test_repetition(ids, n, share):
    assert repetition(ids, n) == pytest.approx(share, abs=1e-12)


def test_unique_share():
    assert unique_share(["4", "4", "5", "4"]) == 0.5
    assert unique_share([[1, 2], [1, 2], [1, 2], [1, 2]]) == 0.25
    assert unique_share([[], [1], [1, 1]]) == 1.0
    with pytest.raises(ValueError, match="without completions"):
        unique_share([])


def test_reward_and_length_in_one_group():
    # Deviations -1 0 1 and -2 -2 4: 6 / sqrt(2 * 24)
    assert reward_length_correlation([[1, 2, 3]], [[2, 2, 8]]) == pytest.approx(6 / 48**0.5)


def test_reward_and_length_over_groups_whose_means_differ():
    # Longer is worse inside each group, though the longer group has the higher rewards.
    assert reward_length_correlation([[0, 1], [5, 6]], [[4, 3], [9, 8]]) == pytest.approx(-1.0)


def test_reward_and_length_leaves_out_what_says_nothing():
    rewards = [[1, None, 2, float("nan")], [3, 3], [None, None]]
    assert reward_length_correlation(rewards, [[5, 99, 7, 99], [1, 50], [1, 2]]) == 1.0
    assert reward_length_correlation([[1, 1]], [[2, 3]]) is None
    assert reward_length_correlation([[1, 2]], [[3, 3]]) is None
    assert reward_length_correlation([], []) is None


@pytest.mark.parametrize(
    "tokens, bucket",
    [(0, "0"), (1, "1-1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (255, "128-255"), (256, "256-511")],
)
def test_length_bucket(tokens, bucket):
    assert length_bucket(tokens) == bucket


def test_mean_by_key_is_weighted():
    found = mean_by(["b", "a", "b", "c"], [1.0, 5.0, 4.0, 9.0], [1, 2, 2, 0])
    assert found == {"a": 5.0, "b": 3.0}  # (1 + 8) / 3
    assert list(found) == ["a", "b"]
