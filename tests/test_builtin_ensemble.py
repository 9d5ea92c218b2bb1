"""Ensembles: the three rules, None and NaN of a member, and the members' arguments."""

import math

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards import load_rewards
from grpo_engine.rewards.builtin import combine_members, ensemble
from grpo_engine.sample_config import RewardConfig

A = [1.0, 0.5, None, None, 0.0]
B = [0.0, 0.75, 0.5, None, 0.25]
C = [0.5, 0.25, 1.0, None, 0.5]


def test_mean_and_min_are_over_the_members_that_have_a_reward():
    assert combine_members([A, B, C], "mean") == [0.5, 0.5, 0.75, None, 0.25]
    assert combine_members([A, B, C], "min") == [0.0, 0.25, 0.5, None, 0.0]


def test_agree_needs_all_members_within_the_tolerance():
    # Spreads: 1, 0.5, a None, none at all, 0.5.
    assert combine_members([A, B, C], "agree", 0.5) == [None, 0.5, None, None, 0.25]
    assert combine_members([A, B, C], "agree", 0.49) == [None] * 5
    assert combine_members([[1.0, 0.0], [1, 0.1]], "agree") == [1.0, None]


@pytest.mark.parametrize("rule", ["mean", "min", "agree"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_member_that_is_not_finite_makes_the_sample_nan(rule, bad):
    got = combine_members([[bad, 1.0], [0.0, 1.0]], rule)
    assert math.isnan(got[0]) and got[1] == 1.0
    assert math.isnan(combine_members([[bad], [None]], rule)[0])


def test_the_order_of_the_members_does_not_matter():
    for rule, tolerance in (("mean", 0.0), ("min", 0.0), ("agree", 0.5)):
        assert combine_members([A, B, C], rule, tolerance) == combine_members(
            [C, A, B], rule, tolerance
        )


def test_members_get_what_they_name():
    def by_length(completion_ids):
        return [float(len(i)) for i in completion_ids]

    def everything(completions, **columns):
        assert columns.keys() == {"completion_ids", "level"}
        return [float(level) for level in columns["level"]]

    combined = ensemble([by_length, everything], "min")
    got = combined(completions=["a", "b"], completion_ids=[[1, 2], [3]], level=[1, 5])
    assert got == [1.0, 1.0]


def test_what_is_no_ensemble_is_refused():
    with pytest.raises(UserError, match="members must name at least one function"):
        ensemble([])
    with pytest.raises(UserError, match="rule must be one of mean, min, agree; given 'max'"):
        ensemble([len], "max")
    with pytest.raises(UserError, match="tolerance must be a number of at least 0; given -1"):
        combine_members([[1.0]], "agree", -1)
    with pytest.raises(UserError, match=r"tolerance must be 0 unless rule is agree; given 0\.5"):
        combine_members([[1.0]], "mean", 0.5)
    with pytest.raises(UserError, match="the members returned 2, 1 values"):
        combine_members([[1.0, 2.0], [1.0]])
    with pytest.raises(UserError, match="a member returned components"):
        combine_members([[{"a": 1.0}]])


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"function": "exact", "timeout_s": "x"}, "timeout_s of a member of an ensemble"),
        ({"function": "exact", "isolate": "no"}, "isolate of a member of an ensemble"),
        ({"function": "exact", "options": [1]}, "options of a member of an ensemble"),
        ({"function": "exact", "weight": 2}, "a member of an ensemble is a function or"),
        ("ensemble", "can't be an ensemble"),
    ],
)
def test_what_can_be_no_member_is_refused_by_its_key(member, said):
    config = RewardConfig("ensemble", options={"members": ["exact", member]})
    with pytest.raises(UserError, match=said):
        load_rewards([config])
