"""Settings of sampling, rewards and groups that have no meaning, and what is said of them."""

import math
import re

import pytest

from grpo_engine.errors import UserError
from grpo_engine.sample_config import (
    ComponentConfig,
    GroupsConfig,
    RewardConfig,
    SamplingConfig,
    ScoringConfig,
)

NAN, INF = math.nan, math.inf


def reward(**keys) -> RewardConfig:
    return RewardConfig("exact", **keys)


@pytest.mark.parametrize(
    ("cls", "keys", "said"),
    [
        (ComponentConfig, {"weight": NAN}, "rewards: weight must be finite; given nan"),
        (ComponentConfig, {"gate": NAN}, "rewards: gate must be finite; given nan"),
        (ComponentConfig, {"valid_from": INF}, "rewards: valid_from must be finite; given inf"),
        (ComponentConfig, {"bounds": [1.0, 1.0]}, "rewards: bounds must be [low, high]"),
        (ComponentConfig, {"bounds": [0.0, INF]}, "rewards: bounds must be [low, high]"),
        (ComponentConfig, {"bounds": [0.0]}, "rewards: bounds must be [low, high]"),
        (ComponentConfig, {"per_tokens": 0}, "rewards: per_tokens must be at least 1; given 0"),
        (reward, {"timeout_s": 0.0}, "rewards: timeout_s must be finite and above 0; given 0.0"),
        (reward, {"timeout_s": INF}, "rewards: timeout_s must be finite and above 0; given inf"),
        (reward, {"gate": INF}, "rewards: gate must be finite"),
        (ScoringConfig, {"clip_percentiles": [5.0, 101.0]}, "scoring.clip_percentiles must be"),
        (ScoringConfig, {"clip_percentiles": [-1.0, 95.0]}, "scoring.clip_percentiles must be"),
        (ScoringConfig, {"clip_percentiles": [NAN, 95.0]}, "scoring.clip_percentiles must be"),
        (ScoringConfig, {"clip_window": 1}, "scoring.clip_window must be at least 2; given 1"),
        (ScoringConfig, {"workers": 0}, "scoring.workers must be at least 1; given 0"),
        (ScoringConfig, {"max_failed": 1.1}, "scoring.max_failed must be between 0 and 1"),
        (ScoringConfig, {"max_failed": NAN}, "scoring.max_failed must be between 0 and 1"),
        (ScoringConfig, {"floor": -INF}, "scoring.floor must be finite; given -inf"),
        (ScoringConfig, {"renormalize": "batch"}, "scoring.renormalize is for aggregate"),
        (GroupsConfig, {"truncated_weight": 1.5}, "groups.truncated_weight must be between 0"),
        (GroupsConfig, {"no_signal_weight": -0.1}, "groups.no_signal_weight must be between 0"),
        (GroupsConfig, {"truncated_penalty": -1.0}, "groups.truncated_penalty must be finite and"),
        (GroupsConfig, {"most_extra": INF}, "groups.most_extra must be finite and not negative"),
        (GroupsConfig, {"truncated_rounds": 0}, "groups.truncated_rounds must be at least 1"),
        (GroupsConfig, {"invalid_reward": NAN}, "groups.invalid_reward must be finite; given nan"),
        (GroupsConfig, {"env_failed_reward": INF}, "groups.env_failed_reward must be finite"),
        (GroupsConfig, {"low_at": 1.0}, "groups.low_at must be below groups.correct_at; given 1.0"),
        (SamplingConfig, {"group_size": 1}, "sampling.group_size must be at least 2"),
        (SamplingConfig, {"temperature": NAN}, "sampling.temperature must be finite and above 0"),
        (SamplingConfig, {"temperature": 0.0}, "sampling.temperature must be finite and above 0"),
        (SamplingConfig, {"top_p": 0.0}, "sampling.top_p must be above 0 and at most 1"),
        (SamplingConfig, {"top_p": 1.1}, "sampling.top_p must be above 0 and at most 1"),
        (SamplingConfig, {"top_k": -1}, "sampling.top_k must be not negative; given -1"),
        (SamplingConfig, {"min_p": 1.1}, "sampling.min_p must be between 0 and 1; given 1.1"),
        (SamplingConfig, {"repetition_penalty": INF}, "sampling.repetition_penalty must be finite"),
        (SamplingConfig, {"max_tokens": 0}, "sampling.max_tokens must be at least 1; given 0"),
        (SamplingConfig, {"stop": ["a", ""]}, "sampling.stop must be without empty strings"),
        (SamplingConfig, {"preset": "late", "top_p": 0.9}, "sampling.preset late says temperature"),
    ],
)
def test_a_setting_without_meaning_is_an_error_that_names_it(cls, keys, said):
    with pytest.raises(UserError, match=re.escape(said)):
        cls(**keys)


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (ComponentConfig, {"bounds": [-1.0, 2.0], "per_tokens": 1, "gate": 0.0, "weight": -2.0}),
        (ScoringConfig, {"clip_percentiles": [0.0, 100.0], "clip_window": 2, "max_failed": 1.0}),
        (ScoringConfig, {"max_failed": 0.0, "workers": 1}),
        (GroupsConfig, {"truncated_weight": 0.0, "no_signal_weight": 1.0, "most_extra": 0.0}),
        (SamplingConfig, {"group_size": 2, "top_p": 1e-9, "min_p": 1.0, "max_tokens": 1}),
    ],
)
def test_the_bounds_themselves_are_allowed(cls, keys):
    made = cls(**keys)
    assert {name: getattr(made, name) for name in keys} == keys
