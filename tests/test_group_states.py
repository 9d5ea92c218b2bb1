"""What becomes of a sample: its state, its cause, and whether it counts."""

import math

import numpy as np
import pytest

from grpo_engine.groups.states import is_pure_repetition, judge, no_attempt
from grpo_engine.rollout import Rollout, SamplingParams
from grpo_engine.sample_config import GroupsConfig
from samples import rollout

NAN = math.nan
PARAMS = SamplingParams(max_tokens=4)


def of(ids=(3, 4), finish="stop") -> Rollout:
    made = rollout([5], 1, finish)
    made.completion_ids, made.params = list(ids), PARAMS
    return made


def judged(*rollouts, totals=None, texts=None, failures=None, env=None, refused=None, **config):
    nothing = [None] * len(rollouts)
    totals = np.array(totals or [1.0] * len(rollouts))
    return judge(
        rollouts,
        texts or ["t"] * len(rollouts),
        totals,
        totals,
        failures or nothing,
        env or nothing,
        refused or nothing,
        GroupsConfig(**config),
    )


def test_each_state_with_its_cause():
    found = judged(
        *[of()] * 6,
        of(finish="error"),
        of([3] * 4, "length"),
        of([3] * 3, "length"),
        of(finish="budget"),
        totals=[1.0, 0.0, NAN, 1.0, 1e39, 1.0, 1.0, 1.0, 1.0, 1.0],
        texts=["a", "a", "a", " \n", "a", "a", "a", "a", "a", "a"],
        failures=[None, None, "the reward f timed out after 5 s", *[None] * 7],
        env=[*[None] * 5, "the server is down", *[None] * 4],
        invalid=["empty"],
    )
    assert list(zip(found.states, found.causes, strict=True)) == [
        ("scored", None),
        ("low", "reward at most 0"),
        ("invalid", "the reward f timed out after 5 s"),
        ("invalid", "empty"),
        ("invalid", "its reward is no finite float32"),
        ("env_failed", "the server is down"),
        ("env_failed", "sampling was broken off"),
        ("truncated", "max_tokens 4"),
        ("budget", "the context was full"),
        ("budget", "its budget was spent"),
    ]
    assert found.valid.tolist() == [True, True, *[False] * 5, True, True, True]
    assert found.in_loss.tolist() == [True, True, *[False] * 8]  # cut ones: in the statistics alone


def test_low_samples_stay():
    found = judged(of(), of(), totals=[0.2, 0.3], low_at=0.2)
    assert found.states == ["low", "scored"]
    assert found.valid.tolist() == found.in_loss.tolist() == [True, True]


def test_no_reward_and_broken_format():
    found = judged(of(), of(), totals=[NAN, 1.0], refused=[None, "form"])
    assert found.causes == ["no reward applies", "broken format: form"]
    assert found.valid.tolist() == [False, False]


def test_by_default_what_a_function_scored_keeps_its_reward():
    found = judged(of([1]), of([7] * 40), of(), texts=["", "aaaa", "a"], totals=[0.0, -1.0, 1.0])
    assert found.states == ["low", "low", "scored"]
    assert found.valid.tolist() == found.in_loss.tolist() == [True] * 3


@pytest.mark.parametrize("invalid", [[], ["empty"], ["repetition"], ["empty", "repetition"]])
def test_what_counts_as_no_attempt_is_an_option(invalid):
    looping = of([7] * 40)
    found = judged(of(), looping, texts=["", "aaaa"], invalid=invalid)
    assert [state == "invalid" for state in found.states] == [
        "empty" in invalid,
        "repetition" in invalid,
    ]


@pytest.mark.parametrize(
    ("ids", "pure"),
    [
        ([7] * 24, True),
        ([7] * 23, False),  # too short to be sure
        ([1, 2, 3] * 8, True),
        ([1, 2, 3] * 8 + [1, 2], True),  # cut in the middle of a round
        ([1, 2, 3] * 8 + [4], False),
        ([0] + [1, 2, 3] * 8, False),
        ([*range(8)] * 4, True),
        ([*range(8)] * 3, False),
        ([*range(9)] * 5, False),  # a paragraph said again is no loop of a few tokens
        ([], False),
    ],
)
def test_pure_repetition(ids, pure):
    assert is_pure_repetition(ids) is pure


def test_the_end_of_a_completion_is_no_break_in_its_repetition():
    assert no_attempt(of([7] * 24 + [1]), "t") == "repetition"
    assert no_attempt(of([7] * 23 + [1], "length"), "t") is None


def test_declared_rewards_keep_samples_in():
    found = judged(
        *[of()] * 3,
        totals=[1.0, NAN, 1.0],
        env=[None, None, "down"],
        invalid_reward=-1.0,
        env_failed_reward=-0.5,
    )
    assert found.states == ["scored", "invalid", "env_failed"]
    assert found.valid.tolist() == found.in_loss.tolist() == [True] * 3
    assert found.rewards(np.array([1.0, NAN, 1.0])).tolist() == [1.0, -1.0, -0.5]


@pytest.mark.parametrize(
    ("policy", "valid", "in_loss", "reward", "weight"),
    [
        ("mask", True, False, 1.0, 1.0),
        ("drop", False, False, 1.0, 1.0),
        ("keep", True, True, 1.0, 1.0),
        ("penalty", True, True, 0.75, 1.0),
        ("downweight", True, True, 1.0, 0.5),
        ("resample", True, False, 1.0, 1.0),
    ],
)
def test_truncated_samples(policy, valid, in_loss, reward, weight):
    cut = of([3] * 4, "length")
    found = judged(of(), cut, truncated=policy, truncated_penalty=0.25, truncated_weight=0.5)
    assert (found.valid[1], found.in_loss[1], found.weights[1]) == (valid, in_loss, weight)
    assert found.rewards(np.ones(2)).tolist() == [1.0, reward]
    assert (found.valid[0], found.in_loss[0], found.weights[0]) == (True, True, 1.0)
