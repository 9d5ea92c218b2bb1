"""The line of a step, from batches made by hand: every figure worked out in the test."""

import dataclasses
import math

import pytest
import torch

from grpo_engine.clock import Clock
from grpo_engine.groups.batch import Batch, Origin
from grpo_engine.metrics import step_metrics
from grpo_engine.sample_config import ComponentConfig
from samples import batch_of, rollout


def line(batch: Batch, micros=(), learned=None, clock=None, tasks=None) -> dict:
    learned = learned or {"loss": 0.5, "kl": 0.0}
    return step_metrics(7, batch, micros, learned, clock or Clock(), 1.0, tasks)


def test_rewards_by_band_and_component():
    origins = [Origin(0, 0, band="easy"), Origin(1, 7), Origin(2, 14, band="hard")]
    batch = batch_of(
        [[1, 0], [3, 1], [None, 0]],
        components={"a": [1.0, 0.0, 3.0, 1.0, None, 0.0], "b": [None] * 6, "c": [2.0] + [None] * 5},
        configs={"c": ComponentConfig(weight=0.0)},
        origins=origins,
        decider="a",
    )
    found = line(batch)
    assert found["step"] == 7 and found["loss"] == 0.5 and found["policy_version"] == 3
    assert found["reward"] == 1.0  # (1 + 0 + 3 + 1 + 0) / 5
    assert found["reward_std"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found["reward_by_band"] == {"easy": 0.5, "hard": 0.0, "medium": 2.0}
    assert found["components"] == {"a": 1.0, "c": 2.0}
    assert found["components_over"] == {"a": 5, "b": 0, "c": 1}
    assert found["valid_by_band"] == {"easy": 2, "medium": 2, "hard": 1}
    assert (found["samples"], found["valid"], found["in_loss"]) == (6, 5, 5)
    assert found["invalid"] == 1 / 6 and found["env_failed"] == 0.0
    assert found["states"] == {"scored": 3, "low": 2, "invalid": 1}


def test_a_step_without_a_valid_sample_has_no_reward_instead_of_0():
    batch = batch_of([[None, None]])
    found = line(batch, learned={"loss": 0.0, "tokens": 0.0})
    assert math.isnan(found["reward"]) and math.isnan(found["reward_std"])
    assert found["reward_by_band"] == {} and found["no_signal"] == 1.0
    assert found["no_signal_causes"]["all_malformed"] == 1
    assert found["tokens_per_signal_group"] is None


def test_anchors_are_counted_apart():
    anchors = [False, False, True, False, False]
    batch = batch_of([[1, 1, 0], [1, 1]], anchors=anchors, lengths=[[2, 6, 50], [3, 5]])
    found = line(batch)
    assert (found["anchors"], found["reward"], found["samples"]) == (1, 1.0, 4)
    assert found["states"] == {"scored": 4}
    assert found["completion_length"] == 4.0  # (2 + 6 + 3 + 5) / 4
    assert found["group_size"] == found["effective_group_size"] == 2.0
    assert (found["tokens_sampled"], found["tokens_per_signal_group"]) == (16, 16.0)


def test_shapes_of_completions():
    same = rollout([5], 3, seed=1)
    groups = [[same, same, rollout([5], 4, "length")], [rollout([6], 2, seed=s) for s in range(2)]]
    batch = batch_of([[1, 2, 3], [0, 0]], groups=groups)
    found = line(batch)
    assert found["unique"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["truncated"] == 1 / 5
    assert found["temperature"] == pytest.approx(0.7) and found["max_tokens"] == 256
    # Rewards -1, 0, 1 about their mean, lengths -1/3, -1/3, 2/3: 1 / sqrt(2 x 2/3).
    assert found["reward_length"] == pytest.approx(math.sqrt(3) / 2)
    assert "reward_length" not in line(batch_of([[1, 1]]))


def test_empty_answers_and_loops_are_counted_though_they_are_valid():
    loop = dataclasses.replace(rollout([5], 25), completion_ids=[9] * 24 + [1])  # 1 ends it
    groups = [[loop, rollout([5], 1), rollout([5], 1), rollout([5], 40), rollout([5], 1)]]
    made = {"groups": groups, "texts": ["aa", "", " \n", "b", ""]}
    found = line(batch_of([[0, 0, 0, 1, 0]], anchors=[*[False] * 4, True], **made))
    assert (found["empty"], found["loops"], found["invalid"]) == (2 / 4, 1 / 4, 0.0)


def test_repetition_and_failed_environments_are_shares_of_the_samples():
    loop = dataclasses.replace(rollout([5], 8), completion_ids=[9] * 8)
    plain = [
        dataclasses.replace(rollout([5], 8), completion_ids=[*range(i, i + 8)]) for i in (0, 9)
    ]
    groups, failed = [[loop, *plain]], [None, "down", None]
    found = line(batch_of([[1, 1, 0]], groups=groups, env_failures=failed))
    assert found["repetition"] == pytest.approx(0.8 / 3)  # of its 5 4-grams 4 were there before
    assert found["env_failed"] == pytest.approx(1 / 3)


def test_price_of_a_group_with_signal():
    found = line(batch_of([[1, 0], [0, 1], [1, 1]], lengths=[[2, 2], [3, 3], [4, 4]]))
    assert found["tokens_per_signal_group"] == 9.0  # 18 / 2


def test_further_draws_are_a_cost():
    origins = [Origin(0, 0), Origin(1, 7, round=1), Origin(2, 14, round=2)]
    batch = batch_of([[1, 1], [1, 0], [0, 0]], origins=origins, lengths=[[2, 2], [3, 3], [4, 4]])
    found = line(batch)
    assert (found["groups_drawn"], found["groups_extra"]) == (3, 2)
    assert found["no_signal"] == pytest.approx(2 / 3)
    causes = {cause: count for cause, count in found["no_signal_causes"].items() if count}
    assert causes == {"all_correct": 1, "all_wrong": 1}
    assert (found["tokens_sampled"], found["tokens_per_signal_group"]) == (18, 18.0)


def test_kl_by_length_band_and_task():
    origins = [Origin(0, 0, band="easy"), Origin(1, 7)]
    batch = batch_of([[1, 0], [1, 0]], lengths=[[1, 3], [2, 6]], origins=origins)
    batch.kl = {3: 0.3, 0: 0.1, 1: 0.5}  # sample 2 had no forward
    found = line(batch, tasks=["sum", "sort"])
    assert found["kl_by_length"] == pytest.approx({"1-1": 0.1, "2-3": 0.5, "4-7": 0.3})
    # Weighted by tokens: (0.1 x 1 + 0.5 x 3) / 4.
    assert found["kl_by_band"] == pytest.approx({"easy": 0.4, "medium": 0.3})
    assert found["kl_by_task"] == pytest.approx({"sort": 0.3, "sum": 0.4})
    assert "kl_by_task" not in line(batch)


def test_speed_counts_what_was_sampled_and_what_was_forwarded():
    clock = Clock()
    clock.ms = {"sample": 500.0, "train": 200.0, "update": 50.0}
    batch = batch_of([[1, 0]], lengths=[[2, 6]])
    found = line(batch, micros=[[1]], clock=clock)
    assert found["tokens_per_s_sample"] == pytest.approx(16.0)  # 8 in half a second
    assert found["tokens_per_s_train"] == pytest.approx((3 + 6) / 0.25)
    assert line(batch)["tokens_per_s_sample"] == 0.0


def test_discarded_groups_are_in_the_figures_of_what_was_sampled():
    batch = batch_of([[1, 1], [1, 0]])
    batch.discarded = torch.tensor([True, False])
    assert line(batch)["reward"] == 0.75


def test_right_goes_by_the_reward_that_decides():
    format_pays = {"f": [1.0, 0.0, 0.0, None], "form": [1.0, 1.0, 1.0, 1.0]}
    batch = batch_of([[2, 1], [1, 1]], components=format_pays)
    found = line(batch)
    assert found["reward"] == 1.25 and found["right"] == pytest.approx(1 / 3)
    assert math.isnan(line(batch_of([[2, 1]], components={"form": [1.0, 1.0]}))["right"])


def test_a_kl_without_a_reference_is_no_figure():
    batch = batch_of([[1, 0]])
    assert math.isnan(line(batch)["kl"])
    batch.ref_logp = {0: torch.zeros(2)}
    assert line(batch)["kl"] == 0.0


def test_cut_by_the_context_or_a_budget_is_cut_and_anchors_are_not_sampled():
    finish = [["length", "budget", "stop", "stop"], ["stop", "stop"]]
    anchors = [False, False, False, True, False, False]
    found = line(batch_of([[1, 0, 1, 0], [1, 0]], finish=finish, anchors=anchors))
    assert found["truncated"] == 2 / 5
