"""Groups that teach nothing, by cause; and groups that mix conditions."""

import dataclasses

import numpy as np
import pytest

from grpo_engine.errors import UserError
from grpo_engine.groups.fingerprints import Fingerprint, check_groups
from grpo_engine.groups.signal import signal_causes
from grpo_engine.sample_config import GroupsConfig

GROUP = 4


def cause(
    rewards, states=None, gates=None, min_std=0.0, valid=None, ddof=0, decided=None, **config
) -> str | None:
    states = states or ["scored"] * len(rewards)
    invalid = [s in ("invalid", "env_failed") for s in states]
    (found,) = signal_causes(
        np.array(rewards, float),
        np.array(rewards if decided is None else decided, float),
        np.array(valid) if valid else ~np.array(invalid),
        states,
        gates or [None] * len(rewards),
        [0, len(rewards)],
        GroupsConfig(**config),
        min_std,
        ddof,
    )
    return found


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([0, 0, 0, 1], None),
        ([1, 1, 1, 1], "all_correct"),
        ([1.5, 1.5], "all_correct"),
        ([0, 0, 0, 0], "all_wrong"),
        ([-1, -1], "all_wrong"),
        ([0.4, 0.4, 0.4, 0.4], "low_variance"),  # fault 18: max == min, whatever the mean rounds to
        ([0.1, 0.1, 0.1], "low_variance"),
        ([1], "all_correct"),
    ],
)
def test_causes_of_valid_groups(rewards, found):
    assert cause(rewards) == found


def test_correct_and_wrong_are_declared():
    assert cause([5, 5], correct_at=10.0) == "low_variance"
    assert cause([5, 5], correct_at=5.0) == "all_correct"
    assert cause([-5, -5], low_at=-10.0) == "low_variance"


def test_spread_may_be_wider_than_float32():
    assert cause([3e38, -3e38]) is None


def test_spread_below_min_std_is_none():
    # Standard deviation 0.05.
    assert cause([0.5, 0.6], min_std=0.05 + 1e-6) == "low_variance"
    assert cause([0.5, 0.6], min_std=0.05 - 1e-6) is None
    # With Bessel's correction 0.05 x sqrt(2) = 0.0707.
    assert cause([0.5, 0.6], min_std=0.0706, ddof=1) is None
    assert cause([0.5, 0.6], min_std=0.0708, ddof=1) == "low_variance"


@pytest.mark.parametrize(
    ("states", "found"),
    [
        (["invalid"] * 4, "all_malformed"),
        (["env_failed"] * 4, "environment"),
        (["env_failed", "env_failed", "env_failed", "invalid"], "environment"),
        (["env_failed", "invalid", "invalid", "invalid"], "all_malformed"),
        (["scored", "env_failed", "env_failed", "invalid"], "environment"),
        (["scored", "invalid", "invalid", "env_failed"], "all_malformed"),
        (["scored", "scored", "invalid", "invalid"], "low_variance"),
    ],
)
def test_causes_of_groups_that_lost_samples(states, found):
    assert cause([0.5] * 4, states) == found


def test_group_whose_samples_all_failed_a_gate_is_malformed():
    # Also through the gate's floor, by which their rewards are equal.
    assert cause([0.0] * 4, gates=["form"] * 4) == "all_malformed"
    assert cause([0.0] * 4, ["invalid", *["low"] * 3], [None, *["form"] * 3]) == "all_malformed"
    assert cause([0.0] * 4, gates=["form", "form", "form", None]) == "all_wrong"


def test_only_valid_samples_are_compared():
    assert cause([0, 0, 9], valid=[True, True, False]) == "all_wrong"


PRINT = Fingerprint("p", "data:3", 7, "a", "r", "s", 64, "", "")
OTHER = {
    "prompt": "q",
    "task": "data:4",
    "policy_version": 8,
    "adapter": "b",
    "reward_version": "r2",
    "sampling": "s2",
    "budget": 65,
    "environment": "e",
    "tools": "t",
}


@pytest.mark.parametrize("field", OTHER)
@pytest.mark.parametrize("sample", [0, 2, 3])
def test_a_group_of_mixed_conditions_is_refused_and_the_field_named(field, sample):
    prints = [PRINT] * 8
    prints[GROUP + sample] = dataclasses.replace(PRINT, **{field: OTHER[field]})
    with pytest.raises(UserError, match=f"group 1 .*another {field} ") as caught:
        check_groups(prints, [0, 4, 8])
    assert repr(OTHER[field]) in str(caught.value)


def test_groups_may_differ_from_one_another():
    second = dataclasses.replace(PRINT, **OTHER)
    check_groups([PRINT] * 4 + [second] * 4, [0, 4, 8])
    with pytest.raises(UserError, match="group 0"):
        check_groups([PRINT] * 4 + [second] * 4, [0, 5, 8])


def test_marked_samples_are_exempt():
    prints = [PRINT, dataclasses.replace(PRINT, policy_version=0), PRINT]
    check_groups(prints, [0, 3], [False, True, False])
    with pytest.raises(UserError, match="policy_version 0"):
        check_groups(prints, [0, 3], [False, False, False])


def test_every_condition_is_compared():
    assert set(OTHER) == {f.name for f in dataclasses.fields(Fingerprint)}
