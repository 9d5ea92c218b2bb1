"""The early stop, evaluation by evaluation."""

import json

import numpy as np
import pytest

from grpo_engine.errors import UserError
from grpo_engine.guards import EarlyStop, StopConfig

HEALTHY = [(0.005, 0.01, 100), (0.005, 0.02, 100), (0.01, 0.02, 50), (0.02, 0.02, 25)]
RISES = [0.1, 0.2, 0.3]


def stops(rewards: list[float], **config: object) -> tuple[list[bool], EarlyStop]:
    stop = EarlyStop(StopConfig(**config))
    return [stop.observe(20 * i, reward) for i, reward in enumerate(rewards)], stop


def test_a_run_that_gained_ends_when_nine_evaluations_brought_no_better_mean_of_three():
    found, stop = stops([*RISES, *[0.6, 0.6, 0.6], *[0.5, 0.6, 0.6] * 4])
    # The mean of three is at its best after the sixth; the sixth is followed by twelve.
    assert found == [False] * 14 + [True] * 4
    assert (stop.best_step, stop.best) == (60, 0.6)  # the first of equals


def test_a_lucky_evaluation_is_no_bar_for_the_next_ones():
    found, stop = stops([*RISES, 0.9, *[0.4 + 0.03 * i for i in range(15)]])
    # The best mean of three is that of 0.9, 0.4 and 0.41, 0.57, until nine evaluations later.
    assert not any(found) and stop.without_gain == 0
    assert (stop.best_step, stop.best) == (60, 0.9)


def test_a_better_mean_begins_the_count_anew():
    found, stop = stops([*RISES, *[0.6] * 8, 0.7, *[0.6] * 9])
    assert found == [False] * 20 + [True]  # 0.633 at the twelfth, nine before the last
    assert stop.without_gain == 9


def test_a_task_that_shows_nothing_yet_is_given_time():
    for rewards in ([0.0] * 100, [0.3, *[0.2] * 50], [*[0.0] * 10, 0.005, *[0.0] * 50]):
        found, stop = stops(rewards)
        assert not any(found) and stop.without_gain == 0
    assert stop.best_step == 200


@pytest.mark.parametrize("gain, noise, evaluations", HEALTHY)
def test_a_run_that_gains_slowly_is_left_alone(gain, noise, evaluations):
    chance, steps = np.random.default_rng(0), np.arange(evaluations)
    runs = [0.3 + gain * steps + noise * chance.standard_normal(evaluations) for _ in range(60)]
    assert sum(any(stops(list(run))[0]) for run in runs) <= 3  # 5 %


def test_a_run_that_has_risen_and_is_flat_ends():
    chance = np.random.default_rng(0)
    rise = 0.3 * np.minimum(1, np.arange(80) / 20)
    ends = [stops(list(rise + 0.01 * chance.standard_normal(80)))[0].index(True) for _ in range(30)]
    assert min(ends) >= 20 and max(ends) < 79


def test_a_small_gain_is_none_if_more_is_asked_for():
    slow = [0.5 + 0.01 * i for i in range(12)]
    assert not any(stops(slow, evaluations=1)[0])
    found, stop = stops(slow, evaluations=1, min_gain=0.045)
    assert found.index(True) == 8 and stop.best == 0.6  # 0.55 is a gain, 0.56 to 0.58 are none


def test_rewards_below_zero_have_a_best_too():
    found, stop = stops([-5.0, -3.0, -4.0, -4.0, -4.0], evaluations=1)
    assert found == [False, False, False, False, True]
    assert (stop.best_step, stop.best) == (20, -3.0)


def test_null_never_stops_and_still_knows_the_best():
    found, stop = stops([0.5] + [0.1] * 30, evaluations=None)
    assert not any(found)
    assert (stop.best_step, stop.best) == (0, 0.5)


def test_it_goes_on_where_it_stopped():
    rewards = [*RISES, *[0.6] * 3, *[0.5] * 8]
    _, before = stops(rewards)
    after = EarlyStop(StopConfig())
    after.load(json.loads(json.dumps(before.state())))
    assert (after.best_step, after.best) == (60, 0.6)
    assert not after.exhausted and after.observe(280, 0.5)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="the held-out reward of step 40 is nan"):
        EarlyStop(StopConfig()).observe(40, float("nan"))


@pytest.mark.parametrize(
    "config, words",
    [
        ({"evaluations": 0}, "early_stop.evaluations must be at least 1, or null; given 0"),
        ({"min_gain": -0.1}, "early_stop.min_gain must be finite and not negative; given -0.1"),
        ({"min_gain": float("nan")}, "early_stop.min_gain must be finite"),
    ],
)
def test_a_config_without_a_meaning_is_refused(config, words):
    with pytest.raises(UserError, match=words):
        StopConfig(**config)
