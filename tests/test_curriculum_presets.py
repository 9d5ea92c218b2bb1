"""Presets, and how the settings of a mixture are spread over a group."""

from collections import Counter
from itertools import pairwise
from math import ceil, floor

import pytest

from grpo_engine.curriculum import PRESETS, Setting, draw_settings
from grpo_engine.curriculum.randomness import GRID, apportion, generator

SHARES = [
    [1.0],
    [0.6, 0.4],
    [0.5, 0.5],
    [0.1, 0.2, 0.7],
    [0.0, 1.0, 0.0],
    [1 / 3] * 3,
    [0.05, 0.95],
]


class Offset:
    """In the place of a generator: the one number that rounding draws."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def integers(self, below: int) -> int:
        assert self.offset < below
        return self.offset


def test_presets_are_those_of_practice():
    assert PRESETS["late"] == (Setting(0.85, 0.9, 1.0),)
    assert PRESETS["mid"] == (Setting(1.0, 0.95, 1.0),)
    assert PRESETS["early"] == (Setting(1.3, 0.98, 1.0),)
    mixed = [(s.temperature, s.share) for s in PRESETS["mixed"]]
    assert mixed == [(1.0, 0.6), (1.3, 0.4)]
    assert sorted(PRESETS) == ["early", "late", "mid", "mixed"]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("total", [0, 1, 2, 3, 7, 10, 64])
def test_shares_are_rounded_up_or_down_and_keep_their_total(shares, total):
    for offset in [0, 1, GRID // 3, GRID // 2, GRID - 1]:
        counts = apportion(shares, total, Offset(offset))
        assert sum(counts) == total
        for count, share in zip(counts, shares, strict=True):
            exact = round(share * total, 9)
            assert floor(exact) <= count <= ceil(exact)


def test_the_mean_over_all_offsets_is_the_share():
    # 3 places: shares of .75, .75 and 1.5, in quarters, so 64 even offsets meet them exactly.
    counts = [apportion([0.25, 0.25, 0.5], 3, Offset(k * GRID // 64)) for k in range(64)]
    assert [sum(column) / 64 for column in zip(*counts, strict=True)] == [0.75, 0.75, 1.5]


def test_counts_by_hand():
    # Edges 1.8 and 3: one more than the whole part where the offset is at least 0.2.
    assert apportion([0.6, 0.4], 3, Offset(0)) == [1, 2]
    assert apportion([0.6, 0.4], 3, Offset(GRID // 10)) == [1, 2]
    assert apportion([0.6, 0.4], 3, Offset(GRID // 4)) == [2, 1]
    assert apportion([0.7, 0.1, 0.2], 10, Offset(0)) == [7, 1, 2]  # 0.7 + 0.1 is below 0.8
    assert apportion([3, 2], 3, Offset(GRID // 4)) == [2, 1]  # shares count relative to their sum


def test_shares_that_come_out_even_are_met_at_every_step():
    mixture = PRESETS["mixed"]
    for step in range(50):
        assert Counter(draw_settings(mixture, 10, 3, step)) == {0: 6, 1: 4}
    assert draw_settings(PRESETS["mid"], 4, 3, 9) == [0, 0, 0, 0]


def test_small_groups_have_the_shares_in_the_mean():
    mixture = PRESETS["mixed"]
    first = [draw_settings(mixture, 2, 0, step).count(0) for step in range(2000)]
    # 1.2 of 2: one or two, never none; the standard error of the mean is 0.009.
    assert set(first) == {1, 2}
    assert sum(first) / 2000 == pytest.approx(1.2, abs=0.04)


def test_each_place_of_a_group_sees_each_setting():
    lists = [draw_settings(PRESETS["mixed"], 8, 0, step) for step in range(500)]
    for place in range(8):
        assert 0.5 < sum(row[place] == 0 for row in lists) / 500 < 0.7


def test_settings_are_a_function_of_seed_and_step():
    mixture = PRESETS["mixed"]
    lists = {(s, k): tuple(draw_settings(mixture, 16, s, k)) for s in (0, 1) for k in range(20)}
    again = {(s, k): tuple(draw_settings(mixture, 16, s, k)) for k in range(20) for s in (1, 0)}
    assert lists == again
    # 16 over 10 or 9 is one of thousands of orders: equal ones in a row would be no chance.
    assert all(lists[0, a] != lists[0, b] for a, b in pairwise(range(20)))
    assert all(lists[0, k] != lists[1, k] for k in range(20))


def test_purposes_and_numbers_have_streams_of_their_own():
    drawn = {
        key: generator(*key).integers(2**62)
        for key in [("a", 1, 2), ("b", 1, 2), ("a", 2, 1), ("a", 1, 3), ("a", 0, 2)]
    }
    assert len(set(drawn.values())) == 5
    assert generator("a", 1, 2).integers(2**62) == drawn["a", 1, 2]
