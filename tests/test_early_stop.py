"""The early stop, evaluation by evaluation."""

import json

import pytest

from grpo_engine.errors import UserError
from grpo_engine.guards import EarlyStop, StopConfig


def stops(rewards: list[float], **config: object) -> tuple[list[bool], EarlyStop]:
    stop = EarlyStop(StopConfig(**config))
    return [stop.observe(20 * i, reward) for i, reward in enumerate(rewards)], stop


def test_three_evaluations_without_gain():
    found, stop = stops([0.2, 0.5, 0.4, 0.5, 0.49])
    assert found == [False, False, False, False, True]
    assert (stop.best_step, stop.best) == (20, 0.5)  # the first of equals


def test_a_gain_begins_the_count_anew():
    found, stop = stops([0.5, 0.4, 0.4, 0.51, 0.5, 0.5, 0.5, 0.4])
    assert found == [False] * 6 + [True, True]
    assert (stop.best_step, stop.best) == (60, 0.51)


def test_a_small_gain_is_none_if_more_is_asked_for():
    found, stop = stops([0.5, 0.52, 0.54, 0.56], evaluations=2, min_gain=0.05)
    assert found == [False, False, True, False]  # 0.54 is 0.04 above the best, 0.56 is 0.06
    assert stop.best == 0.56


def test_rewards_below_zero_have_a_best_too():
    found, stop = stops([-3.0, -4.0], evaluations=1)
    assert found == [False, True]
    assert stop.best == -3.0


def test_null_never_stops_and_still_knows_the_best():
    found, stop = stops([0.5] + [0.1] * 30, evaluations=None)
    assert not any(found)
    assert (stop.best_step, stop.best) == (0, 0.5)


def test_it_goes_on_where_it_stopped():
    _, before = stops([0.5, 0.4, 0.4])
    after = EarlyStop(StopConfig())
    after.load(json.loads(json.dumps(before.state())))
    assert (after.best_step, after.best) == (0, 0.5)
    assert after.observe(60, 0.5)


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
