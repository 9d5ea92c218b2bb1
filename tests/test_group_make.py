"""Samples to a batch: anchors, samples drawn again, discarded groups, rewards of steps."""

import dataclasses

import pytest
import torch

from conftest import make_model
from grpo_engine.errors import UserError
from grpo_engine.groups.batch import micro_batches
from grpo_engine.groups.make import Samples, judge_samples, make_batch
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.learn import accumulate_gradient
from grpo_engine.rewards.process import StepReward
from grpo_engine.sample_config import ComponentConfig
from samples import PRINT, rules, samples_of


def test_an_anchor_enters_the_statistics_and_never_the_loss():
    batch = make_batch(samples_of([[1, 1, 1, 0]], anchors=[False, False, False, True]), rules())
    # Without the anchor the group would teach nothing: mean 3/4, deviation sqrt(3)/4.
    assert batch.advantages.tolist() == pytest.approx([0.577] * 3 + [-1.732], abs=1e-3)
    assert batch.in_loss.tolist() == [True] * 3 + [False]
    assert batch.signal.tolist() == [True]
    assert sorted(s for m in micro_batches(batch, 99, without_signal=True) for s in m) == [0, 1, 2]


@pytest.mark.parametrize("texts", [[*[""] * 6, "8"], [""] * 7], ids=["and a wrong one", "alone"])
def test_empty_answers_that_were_scored_are_the_contrast_of_the_right_one(texts):
    made = samples_of([[1, *[0] * 7]], lengths=[[1] * 8], texts=["7", *texts])
    batch = make_batch(made, rules())
    # Mean 1/8, deviation sqrt(7)/8: (7/8) / (sqrt(7)/8) and (-1/8) / (sqrt(7)/8).
    assert batch.advantages.tolist() == pytest.approx([2.6458, *[-0.37796] * 7], abs=1e-3)
    assert batch.in_loss.tolist() == [True] * 8 and batch.signal_causes == [None]
    left = make_batch(made, rules(groups={"invalid": ["empty"]}))
    assert left.in_loss.tolist() == [True, *[text != "" for text in texts]]


def test_an_anchor_that_scores_as_right_is_none():
    batch = make_batch(samples_of([[1, 0, 1]], anchors=[False, False, True]), rules())
    assert (batch.states[2], batch.causes[2]) == ("invalid", "an anchor that scores as right")
    assert batch.advantages.tolist() == pytest.approx([1, -1, 0], abs=1e-3)


def test_only_an_anchor_may_have_another_fingerprint():
    prints = [PRINT, PRINT, dataclasses.replace(PRINT, policy_version=0)]
    anchors = [False, False, True]
    made = samples_of([[1, 0, 0]], fingerprints=prints, anchors=anchors)
    assert make_batch(made, rules()).signal.tolist() == [True]
    with pytest.raises(UserError, match=r"group 0 .*another policy_version"):
        make_batch(dataclasses.replace(made, anchors=[False] * 3), rules())


def test_a_sample_that_was_drawn_again_leaves_both():
    made = samples_of([[1, 0, 0]], [["stop", "length", "stop"]], superseded=[False, True, False])
    batch = make_batch(made, rules(groups={"truncated": "resample"}))
    assert batch.valid.tolist() == batch.in_loss.tolist() == [True, False, True]
    assert batch.advantages.tolist() == pytest.approx([1, 0, -1], abs=1e-3)
    assert batch.causes[1] == "the context was full, drawn again"


def test_a_discarded_group_is_recorded_and_not_learned_from():
    batch = make_batch(samples_of([[1, 1], [1, 0]]), rules(), discarded=[True, False])
    assert batch.in_loss.tolist() == [False, False, True, True]
    assert batch.valid.tolist() == [True] * 4
    assert batch.discarded.tolist() == [True, False]
    assert sorted(s for m in micro_batches(batch, 99, without_signal=True) for s in m) == [2, 3]


def test_joined_draws_are_one_batch():
    first = samples_of([[1, 0]], components={"a": [1.0, 0.0]})
    second = samples_of([[2, 0, 1]], components={"a": [2.0, 0.0, 1.0], "b": [None, 1.0, None]})
    joined = Samples.join([first, second])
    batch = make_batch(joined, rules())
    assert batch.cu_groups.tolist() == [0, 2, 5]
    assert batch.components == {"a": [1, 0, 2, 0, 1], "b": [None, None, None, 1, None]}
    assert batch.rewards.tolist() == [1, 0, 2, 1, 1]
    assert judge_samples(joined, rules()).causes == [None, None]


# Two completions of 2 and 3 tokens. Steps 1 and 3 for the first, 5 for the second: mean 3,
# deviation sqrt(8/3).
STD = (8 / 3) ** 0.5 + 1e-4
STEPS = [[StepReward(0, 1, 1.0), StepReward(1, 2, 3.0)], [StepReward(0, 3, 5.0)]]


def with_steps(rewards=((0, 0),), weight=1.0):
    configs = {"s": ComponentConfig(weight=weight)}
    components = {"f": [float(r) for r in rewards[0]], "s": [2.0, 5.0]}
    return samples_of(
        rewards, components=components, configs=configs, steps={"s": STEPS}, decider="s"
    )


def test_rewards_of_steps_become_advantages_of_tokens():
    batch = make_batch(with_steps(), rules())
    # Of the steps that end at a token or later: (1 - 3) + (3 - 3), then 0; 5 - 3 for all three.
    assert batch.token_advantages[0].tolist() == pytest.approx([-2 / STD, 0.0])
    assert batch.token_advantages[1].tolist() == pytest.approx([2 / STD] * 3)
    assert batch.advantages.tolist() == [0.0, 0.0]
    assert batch.signal.tolist() == [True]  # though the outcomes are equal


def test_what_steps_earn_counts_as_reward_and_makes_a_group_worth_keeping():
    found = judge_samples(with_steps(), rules())
    assert found.rewards.tolist() == [2.0, 5.0]
    assert found.judged.states == ["scored", "scored"]
    assert found.causes == [None]  # or groups.no_signal resample would discard it
    # The means are equal, the steps are not; of a component of weight 0 they are nothing.
    equal = samples_of([[0, 0]], components={"s": [2.0, 2.0]}, steps={"s": STEPS}, decider="s")
    assert judge_samples(equal, rules()).causes == [None]
    equal.scores.configs = {"s": ComponentConfig(weight=0.0)}
    assert judge_samples(equal, rules()).causes == ["all_correct"]
    same = [[StepReward(0, 1, 2.0)], [StepReward(0, 3, 2.0)]]
    alike = samples_of([[0, 0]], components={"s": [2.0, 2.0]}, steps={"s": same}, decider="s")
    assert judge_samples(alike, rules()).causes == ["all_correct"]


def test_a_failed_gate_takes_what_steps_earned_too():
    components = {"f": [1.0, 1.0, 0.0], "s": [2.0, 5.0, 9.0]}
    made = samples_of(
        [[0, 0, 0]],
        components=components,
        configs={"f": ComponentConfig(gate=0.5)},
        steps={"s": [*STEPS, [StepReward(0, 4, 9.0)]]},
    )
    batch = make_batch(made, rules())
    assert batch.rewards.tolist() == [3.0, 6.0, 0.0]
    # Outcomes 1, 1, 0: mean 2/3, deviation sqrt(2)/3. Of the steps those of the first two alone.
    good, bad = (1 / 3) / (2**0.5 / 3 + 1e-4), (-2 / 3) / (2**0.5 / 3 + 1e-4)
    assert batch.token_advantages[0].tolist() == pytest.approx([good - 2 / STD, good])
    assert batch.token_advantages[1].tolist() == pytest.approx([good + 2 / STD] * 3)
    assert batch.token_advantages[2].tolist() == pytest.approx([bad] * 4)
    gated = samples_of(
        [[0, 0]],
        components={"f": [1.0, 0.0], "s": [1.0, 9.0]},
        configs={"f": ComponentConfig(gate=0.5, weight=0.0), "s": ComponentConfig(weight=0.5)},
        steps={"s": [[StepReward(0, 2, 1.0)], [StepReward(0, 3, 9.0)]]},
    )
    assert judge_samples(gated, rules(scoring={"floor": 0.5})).causes == ["low_variance"]


def test_they_are_added_to_the_outcome_s_by_their_weight():
    batch = make_batch(with_steps(rewards=((1, 0),), weight=0.5), rules())
    one = 0.5 / (0.5 + 1e-4)
    assert batch.token_advantages[0].tolist() == pytest.approx([one - 1 / STD, one])
    assert batch.token_advantages[1].tolist() == pytest.approx([-one + 1 / STD] * 3)


def test_the_loss_weighs_each_token_by_its_own():
    options = GRPOOptions(loss_type="bnpo", beta=0.0)
    model, batch = make_model(), make_batch(with_steps(), rules(options=options))
    micros = micro_batches(batch, 99, without_signal=False)
    accumulate_gradient(model, batch, micros, options)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for r, worth in zip(batch.rollouts, ([-2 / STD, 0.0], [2 / STD] * 3), strict=True):
        logits = model(torch.tensor([r.prompt_ids + r.completion_ids])).logits[0].double()
        start, targets = len(r.prompt_ids) - 1, torch.tensor(r.completion_ids)
        logp = (logits[start:-1] / r.params.temperature).log_softmax(-1)
        chosen = logp.gather(1, targets[:, None])[:, 0]
        (-(torch.tensor(worth).double() * chosen).sum() / 5).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_loss_of_one_advantage_a_sample_refuses_them():
    options = GRPOOptions(loss_type="vespo")
    batch = make_batch(with_steps(), rules(options=options))
    with pytest.raises(UserError, match=r"vespo takes one advantage a sample"):
        accumulate_gradient(make_model(), batch, [[0, 1]], options)


def test_min_std_is_held_against_the_deviation_that_the_loss_takes():
    options = GRPOOptions(ddof=1, min_std=0.6)  # [1, 0]: 0.707, of the population 0.5
    assert make_batch(samples_of([[1, 0]]), rules(options=options)).signal.tolist() == [True]
