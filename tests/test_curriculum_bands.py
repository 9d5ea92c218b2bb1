"""Running pass rates and the bands that come of them, by hand."""

import json

import numpy as np
import pytest

from grpo_engine.curriculum import PassRates, TaskRecord

NAN = float("nan")


def test_the_first_group_sets_the_rate_and_the_next_move_it():
    rates = PassRates(newest_weight=0.5)
    rates.update(7, [1, 1, 1, 0], 1.0)
    assert rates.record(7) == TaskRecord(0.75, 1, 0, None)
    rates.update(7, [0, 0, 0, 1], 1.0)  # (0.75 + 0.25) / 2
    assert rates.record(7) == TaskRecord(0.5, 2, 0, None)
    rates.update(7, [1, 1], 1.0)  # (0.5 + 1) / 2
    assert rates.record(7) == TaskRecord(0.75, 3, 1, None)


def test_the_weight_is_that_of_the_newest_group():
    rates = PassRates(newest_weight=0.25)
    rates.update(0, [1.0, 1.0], 1.0)
    rates.update(0, [0.0, 0.0], 1.0)
    assert rates.record(0).rate == 0.75
    only_newest = PassRates(newest_weight=1.0)
    only_newest.update(0, [1.0, 1.0], 1.0)
    only_newest.update(0, [0.0, 1.0], 1.0)
    assert only_newest.record(0).rate == 0.5


def test_a_sample_is_right_from_the_threshold_on():
    rates = PassRates()
    rates.update(0, [0.49, 0.5, 0.9, 0.0], 0.5)
    assert rates.record(0).rate == 0.5


def test_samples_without_a_reward_are_no_sign_of_difficulty():
    rates = PassRates()
    rates.update(0, [1.0, None, NAN, 1.0, float("inf"), 0.0], 1.0)
    assert rates.record(0).rate == pytest.approx(2 / 3)
    rates.update(0, [None, NAN], 1.0, "env_failed")
    assert rates.record(0) == TaskRecord(pytest.approx(2 / 3), 1, 0, "env_failed")
    rates.update(1, [], 1.0, "env_failed")
    assert rates.record(1) == TaskRecord(None, 0, 0, "env_failed")
    assert rates.band(1) == "medium"


def test_solved_counts_groups_in_a_row():
    rates = PassRates()
    seen = []
    for rewards in ([1, 1], [1, 1], [None], [1, None], [1, 0], [1, 1]):
        rates.update(3, rewards, 1.0)
        seen.append(rates.record(3).solved)
    # A group without a valid sample neither counts nor breaks the row.
    assert seen == [1, 2, 2, 3, 0, 1]


def test_the_last_cause_of_failure_is_kept():
    rates = PassRates()
    causes = []
    for cause in (None, "all_wrong", None, "truncated", None):
        rates.update(0, [1.0], 1.0, cause)
        causes.append(rates.record(0).cause)
    assert causes == [None, "all_wrong", "all_wrong", "truncated", "truncated"]
    rates.update(1, [0.0], 1.0, "all_wrong")
    rates.update(2, [0.0], 1.0, "all_wrong")
    rates.update(3, [1.0], 1.0)
    assert rates.causes() == {"truncated": 1, "all_wrong": 2}


@pytest.mark.parametrize(
    ("right", "band"),
    [(10, "easy"), (8, "easy"), (7, "medium"), (3, "medium"), (2, "hard"), (0, "hard")],
)
def test_bands_hold_their_bounds(right, band):
    rates = PassRates(easy_at=0.8, hard_at=0.2)
    rates.update(5, [1.0] * right + [0.0] * (10 - right), 1.0)
    assert rates.band(5) == band
    assert rates.band(6) == "medium"  # not seen


def test_counts_follow_tasks_from_band_to_band():
    rates = PassRates()
    for task, reward in [(0, 1.0), (1, 1.0), (2, 0.0)]:
        rates.update(task, [reward], 1.0)
    assert rates.counts(10) == {"easy": 2, "medium": 7, "hard": 1}
    rates.update(0, [0.0], 1.0)  # 0.5
    assert rates.counts(10) == {"easy": 1, "medium": 8, "hard": 1}
    rates.update(0, [0.0], 1.0)  # 0.25
    rates.update(0, [0.0], 1.0)  # 0.125
    assert rates.counts(10) == {"easy": 1, "medium": 7, "hard": 2}
    assert (set(rates.outside("easy")), set(rates.outside("hard"))) == ({1}, {0, 2})


def feed(rates: PassRates, steps: range) -> None:
    for step in steps:
        chance = np.random.default_rng(step)
        for task in chance.integers(40, size=8):
            rewards = [float(r) for r in chance.integers(2, size=4)]
            rates.update(int(task), rewards, 1.0, "all_wrong" if not any(rewards) else None)


def test_resumed_in_the_middle_it_goes_on_as_if_unbroken():
    whole, first, resumed = PassRates(), PassRates(), PassRates()
    feed(whole, range(60))
    feed(first, range(23))
    resumed.update(45, [1.0], 1.0)  # what was there before is forgotten
    resumed.load(json.loads(json.dumps(first.state())))
    feed(resumed, range(23, 60))
    assert resumed.state()["tasks"] == whole.state()["tasks"]
    assert resumed.counts(50) == whole.counts(50)
    assert [resumed.record(t) for t in range(50)] == [whole.record(t) for t in range(50)]


def test_other_thresholds_after_a_resume_give_other_bands():
    rates = PassRates(easy_at=0.8)
    rates.update(0, [1.0, 1.0, 1.0, 0.0], 1.0)
    assert rates.band(0) == "medium"
    resumed = PassRates(easy_at=0.7)
    resumed.load(rates.state())
    assert resumed.band(0) == "easy" and set(resumed.outside("easy")) == {0}


def test_only_tasks_that_were_seen_are_stored():
    rates = PassRates()
    rates.update(99_999, [1.0], 1.0)
    rates.band(5), rates.record(6)
    assert rates.state() == {"tasks": [[99_999, 1.0, 1, 1, None]]}
