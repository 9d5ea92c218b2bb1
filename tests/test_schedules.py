"""Schedules: lines between the given steps, what holds until the next, and what is no schedule."""

import pytest

from grpo_engine.curriculum.schedules import (
    are_shares,
    check_schedule,
    hold,
    interpolate,
    interpolate_all,
    is_group_size,
    is_positive,
)
from grpo_engine.errors import UserError

TEMPERATURE = {0: 1.2, 100: 1.0, 300: 0.8}


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 1.2), (25, 1.15), (50, 1.1), (99, 1.002), (100, 1.0), (150, 0.95), (300, 0.8), (999, 0.8)],
)
def test_numbers_go_in_straight_lines(step, value):
    assert interpolate(TEMPERATURE, step) == pytest.approx(value, abs=1e-12)


def test_given_steps_have_exactly_the_given_values():
    # 0.1 + (0.7 - 0.1) * 1 is not 0.7 in floating point.
    schedule = {0: 0.1, 3: 0.7, 7: 0.2}
    assert [interpolate(schedule, step) for step in (0, 3, 7, 8)] == [0.1, 0.7, 0.2, 0.2]


def test_order_of_writing_does_not_matter():
    shuffled = {300: 0.8, 0: 1.2, 100: 1.0}
    for step in (0, 40, 100, 260, 301):
        assert interpolate(shuffled, step) == interpolate(TEMPERATURE, step)
        assert hold(shuffled, step) == hold(TEMPERATURE, step)


def test_shares_move_together_and_keep_their_sum():
    schedule = {0: [0.0, 0.8, 0.2], 100: [0.2, 0.3, 0.5]}
    assert interpolate_all(schedule, 0) == [0.0, 0.8, 0.2]
    # A quarter of the way: 0 + .25 * .2, .8 - .25 * .5, .2 + .25 * .3.
    assert interpolate_all(schedule, 25) == pytest.approx([0.05, 0.675, 0.275], abs=1e-12)
    for step in range(120):
        assert sum(interpolate_all(schedule, step)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("step", "size"), [(0, 16), (99, 16), (100, 8), (101, 8), (5000, 8)])
def test_whole_things_hold_until_the_next_step(step, size):
    assert hold({0: 16, 100: 8}, step) == size


def test_a_single_value_is_constant():
    assert [interpolate({0: 1.3}, step) for step in (0, 1, 77)] == [1.3, 1.3, 1.3]
    assert hold({0: "early"}, 12) == "early"


def test_a_step_before_the_schedule_has_no_value():
    for read in (hold, interpolate):
        with pytest.raises(ValueError, match="step 4 is before the schedule, which begins at 5"):
            read({5: 1.0}, 4)


@pytest.mark.parametrize("step", [-1, 1.5, 2.0, "0", True, None])
def test_steps_that_are_not_whole_are_named(step):
    with pytest.raises(UserError, match=r"^a\.key has a value for step .*whole numbers"):
        check_schedule("a.key", {0: 1.0, step: 1.0} if step is not True else {step: 1.0}, "x", bool)


@pytest.mark.parametrize(("schedule", "where"), [({7: 1.0, 9: 2.0}, "at 7"), ({}, "nowhere")])
def test_a_schedule_that_does_not_begin_at_0_is_refused(schedule, where):
    with pytest.raises(UserError, match=rf"^a\.key begins {where}: give the value for step 0"):
        check_schedule("a.key", schedule, "x", is_positive)


def test_a_wrong_value_names_key_step_and_what_is_wanted():
    with pytest.raises(UserError, match=r"^a\.key must be above 0; given -1 for step 50$"):
        check_schedule("a.key", {0: 1.0, 50: -1}, "above 0", is_positive)
    check_schedule("a.key", {0: 1.0, 50: 2}, "above 0", is_positive)


def test_what_a_value_may_be():
    nan, infinity = float("nan"), float("inf")
    good, bad = [0.1, 1, 64.0], [0, -1, nan, infinity, True, "1", None]
    assert [is_positive(v) for v in good + bad] == [True] * 3 + [False] * 7
    sizes = [2, 64, 1, 65, 8.0, True, "8"]
    assert [is_group_size(v) for v in sizes] == [True, True] + [False] * 5
    good = [[0.2, 0.3, 0.5], [1, 0, 0], (0.1, 0.2, 0.7)]
    bad = [[0.5, 0.5], [0.5, 0.5, 0.1], [-0.5, 1, 0.5], [nan, 0.5, 0.5], 1.0, [True, 0, 0]]
    assert [are_shares(v, 3) for v in good + bad] == [True] * 3 + [False] * 6
