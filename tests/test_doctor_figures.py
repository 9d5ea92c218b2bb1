"""The doctor's arithmetic: teaching groups, prices of group sizes, figures of a pilot, by hand."""

import math

import numpy as np
import pytest
import torch

from grpo_engine.doctor import FAIL, OK, WARNING, Check, advice, arithmetic, check_lines, pilot
from grpo_engine.groups.batch import Origin
from grpo_engine.groups.fingerprints import Fingerprint
from grpo_engine.groups.make import Samples, make_batch
from grpo_engine.groups.rules import Rules
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.rewards.score import Scores
from grpo_engine.rollout import Rollout, SamplingParams
from grpo_engine.sample_config import ComponentConfig, GroupsConfig, ScoringConfig


def rules(scoring=None, **options) -> Rules:
    return Rules(ScoringConfig(**scoring or {}), GroupsConfig(), GRPOOptions(**options))


# [0, 0, 0, 1]: mean 1/4, deviation sqrt(3)/4.
STD = math.sqrt(3) / 4
WORSE, BETTER = -0.25 / (STD + 1e-4), 0.75 / (STD + 1e-4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (rules(), [WORSE, WORSE, WORSE, BETTER]),
        (rules(scale_rewards="none"), [-0.25, -0.25, -0.25, 0.75]),
        (rules(baseline="median", scale_rewards="none"), [0, 0, 0, 1]),
        # Ranks -1/3 and 1: mean 0, deviation sqrt(1/3).
        (
            rules({"rank": True}),
            [*[-1 / 3 / (math.sqrt(1 / 3) + 1e-4)] * 3, 1 / (math.sqrt(1 / 3) + 1e-4)],
        ),
        (rules(min_std=0.5), [0, 0, 0, 0]),
    ],
)
def test_the_teaching_group_under_options(given, expected):
    assert arithmetic.advantages_of([0, 0, 0, 1], given) == pytest.approx(expected, rel=1e-5)


def statuses(given: Rules) -> list[str]:
    return [check.status for check in arithmetic.check_arithmetic(given)]


@pytest.mark.parametrize(
    "given",
    [
        rules(),
        rules({"rank": True}),
        rules({"clip_percentiles": [5, 95]}),
        rules({"aggregate": "normalize_then_sum"}),
        rules(baseline="median"),
        rules(baseline="loo"),
        rules(ddof=1),
        rules(scale_rewards="batch"),
        rules(scale_rewards="none"),
        rules(advantage_clip=1.0),
    ],
)
def test_sound_options_pass(given):
    assert statuses(given) == [OK] * 4


def test_the_lines_hold_the_figures():
    better, equal, shift, extreme = arithmetic.check_arithmetic(rules())
    assert better.text.endswith("give [-0.5772, -0.5772, -0.5772, 1.732]")
    assert equal.text.endswith("give [0, 0, 0, 0]")
    assert "higher by 10" in shift.text
    assert "[0.1, 0.1, 0.1, 10] gives [-0.5773, -0.5773, -0.5773, 1.732]" in extreme.text


def test_an_outlier_keeps_its_size_where_the_options_say_so():
    # 10 less the mean 2.575 is cut to 5, and 0.9 less the mean 0.3 is 0.6.
    extreme = arithmetic.check_arithmetic(rules(scale_rewards="none"))[3]
    assert (
        "[-2.475, -2.475, -2.475, 5]" in extreme.text and "[-0.2, -0.2, -0.2, 0.6]" in extreme.text
    )
    assert "loss.scale_rewards none" in extreme.text and extreme.status == OK
    extreme = arithmetic.check_arithmetic(rules(epsilon_std=0.1))[3]
    assert "loss.epsilon_std 0.1" in extreme.text and extreme.status == WARNING


def test_a_threshold_above_the_teaching_group_fails():
    # The plain group has a deviation of 0.35 and loses its signal, the extreme one does not.
    better, _, _, extreme = arithmetic.check_arithmetic(rules(min_std=0.45))
    assert better.status == FAIL and "loss.min_std 0.45" in better.text
    assert extreme.status == OK and "loss.min_std 0.45 is between them" in extreme.text


def test_right_and_wrong_are_what_the_config_calls_so():
    given = Rules(
        groups=GroupsConfig(low_at=-1.0, correct_at=3.0), options=GRPOOptions(min_std=0.5)
    )
    better = arithmetic.check_arithmetic(given)[0]
    assert better.status == OK and "rewards [-1, -1, -1, 3] give [-0.5773" in better.text


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda r, _: np.array(r), [FAIL, FAIL, FAIL, FAIL]),  # no baseline
        (lambda r, _: np.mean(r) - np.array(r), [FAIL, OK, OK, FAIL]),  # the other way round
        (lambda r, _: np.array(r) - np.mean(r) + 1e-2, [FAIL, FAIL, OK, FAIL]),  # off centre
    ],
)
def test_wrong_statistics_are_seen(monkeypatch, broken, expected):
    monkeypatch.setattr(arithmetic, "advantages_of", broken)
    assert statuses(rules()) == expected


def test_lines_are_aligned():
    checks = [Check("one", OK, "fine\nhere"), Check("another", FAIL, "x")]
    assert list(check_lines(checks)) == ["ok       one      fine here", "FAIL     another  x"]


@pytest.mark.parametrize(
    ("rate", "size", "chance"),
    [(0.5, 4, 0.875), (0.1, 4, 1 - 0.6561 - 0.0001), (0.0, 8, 0.0), (1.0, 8, 0.0), (0.5, 1, 0.0)],
)
def test_the_chance_of_a_mixed_group(rate, size, chance):
    assert advice.signal_chance(rate, size) == pytest.approx(chance, abs=1e-12)


def test_the_price_of_a_group_with_signal():
    # Half right: 1 - 2/2^G; the prompt that is never solved halves it.
    found = advice.prices([0.5, 0.0], prompt=100, completion=10, sizes=(4, 8))
    assert found == pytest.approx({4: 140 / 0.4375, 8: 180 / (0.5 * (1 - 2 / 256))})
    assert advice.prices([0.0, 1.0, 1.0], 100, 10) == {}
    assert advice.prices([], 100, 10) == {}


@pytest.mark.parametrize(
    ("by_size", "size"),
    [
        ({4: 970.4, 8: 772.5, 16: 750.2, 32: 918.0}, 8),  # 750.2 / 0.9 = 833.6
        ({4: 1000.0, 8: 900.0}, 4),  # exactly nine tenths
        ({4: 1001.0, 8: 900.0}, 8),
        ({}, None),
    ],
)
def test_the_smallest_group_near_the_best_price(by_size, size):
    assert advice.group_size(by_size) == size


def test_long_prompts_and_hard_tasks_want_larger_groups():
    # One in 20 right: chances 0.1855, 0.3366, 0.5599, 0.8063.
    assert advice.group_size(advice.prices([0.05], prompt=100, completion=10)) == 16
    assert advice.group_size(advice.prices([0.05], prompt=0, completion=10)) == 4


@pytest.mark.parametrize(
    ("now", "unique", "truncated", "invalid", "guess"),
    [
        (1.0, 0.2, 0.0, 0.0, 1.2),
        (1.3, 0.2, 0.0, 0.0, 1.4),
        (1.5, 0.2, 0.0, 0.0, 1.5),
        (1.0, 0.9, 0.6, 0.0, 0.8),
        (0.7, 0.9, 0.0, 0.3, 0.6),
        (0.5, 0.9, 0.6, 0.0, 0.5),
        (1.0, 0.3, 0.5, 0.2, 1.0),  # at the thresholds
        (1.0, math.nan, 0.0, 0.0, 1.0),
        (1.0, 0.2, 0.6, 0.0, None),
    ],
)
def test_the_temperature_follows_what_is_wrong(now, unique, truncated, invalid, guess):
    found = advice.temperature(now, unique, truncated, invalid)
    assert found == (guess if guess is None else pytest.approx(guess))


def made_batch(rewards, completions, finish=None, anchors=None):
    """Groups of two, as make_batch judges them; prompts of 3 tokens."""
    flat = [c for group in completions for c in group]
    count = len(flat)
    finish = finish or ["stop"] * count
    params = SamplingParams(max_tokens=20)
    rollouts = [
        Rollout([5, 6, 7], ids, torch.zeros(len(ids)), torch.zeros(len(ids)), end, 0, 0, params, 0)
        for ids, end in zip(flat, finish, strict=True)
    ]
    config = {"r": ComponentConfig()}
    scores = Scores({"r": rewards}, [None] * count, [None] * count, configs=config, decider="r")
    groups = [rollouts[i : i + 2] for i in range(0, count, 2)]
    same = [Fingerprint("", "", 0, "", "", "", 20)] * count
    anchors = anchors or [False] * count
    samples = Samples(
        [Origin(g, g) for g in range(len(groups))],
        groups, ["x"] * count, scores, same, anchors, [False] * count,
    )  # fmt: skip
    return make_batch(samples, Rules())


def test_the_figures_of_a_pilot():
    batch = made_batch(
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        [[[9] * 2, [8] * 4], [[9] * 6, [9] * 10], [[7] * 8, [7] * 8]],
        ["stop", "length", "stop", "stop", "stop", "stop"],
    )
    found = pilot.figures(batch, seconds=3.0, correct_at=1.0)
    assert (found.groups, found.with_signal) == (3, 1)
    assert found.causes == {"all_correct": 1, "all_wrong": 1}
    # Cut after 4 of 20 tokens: by the context, which is a budget.
    assert found.states == {"scored": 3, "budget": 1, "low": 2}
    assert found.truncated == pytest.approx(1 / 6) and found.invalid == 0
    # Of 2, 4, 6, 8, 8, 10 three quarters of the way from the fifth to the sixth.
    assert found.length_mean == pytest.approx(38 / 6) and found.length_p95 == 9.5
    assert found.prompt_mean == 3
    assert found.reward == found.pass_rate == 0.5
    assert found.pass_rates == [0.5, 1.0, 0.0]
    assert found.unique == 0.75  # 1 and 1/2; the group that is all right does not count
    assert (found.tokens_per_signal, found.seconds_per_signal) == (38, 3.0)


def test_anchors_are_no_samples_of_the_policy():
    batch = made_batch([1.0, 0.0], [[[9] * 2, [8] * 4]], anchors=[False, True])
    found = pilot.figures(batch, seconds=1.0, correct_at=1.0)
    assert found.with_signal == 1 and found.length_mean == 2
    assert found.pass_rates == [1.0] and found.states == {"scored": 1}


def test_a_pilot_without_signal_has_no_price():
    found = pilot.figures(made_batch([0.0, 0.0], [[[9], [8]]]), seconds=1.0, correct_at=1.0)
    assert found.tokens_per_signal is None and found.seconds_per_signal is None
    lines = list(pilot.pilot_lines(found)) + list(advice.advice_lines(found, 2, 1.0, 1.0))
    text = "\n".join(lines)
    assert "signal      0 of 1 groups (0%)" in text and "no signal   all_wrong 1" in text
    assert "no group carried signal" in text
    assert "no prompt had both right and wrong answers" in text
