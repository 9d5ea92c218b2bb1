"""TRL's own way from rewards to advantages, against ge.group_advantages with preset "trl"."""

import pytest
import torch
from torch import Tensor

import grpo_engine as ge
from batches import (
    IMPLEMENTATIONS,
    KL,
    LAYOUTS,
    assert_close,
    assert_same,
    make_batch,
    options_of,
    ours,
    trls,
)
from grpo_engine import GRPOOptions
from grpo_engine.benchmarks.peers import trl_trainer
from grpo_engine.kernels import reference

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # inside TRL

NAN = float("nan")
REWARDS = {
    "binary": [1.0, 0, 0, 1, 0, 0, 0, 1],
    "graded": [0.3, -2.0, 7.5, 0.25, 1e-3, 12.0, -0.7, 3.0],
    "unscored": [NAN, 1, 0, 0.5, 2, NAN, NAN, 4],
    "one_scored": [NAN, 3, NAN, NAN, 0, 1, 1, 2],
    "none_scored": [NAN, NAN, NAN, NAN, 0, 1, 1, 2],
}
with_op = pytest.mark.parametrize(
    "op", [ge.group_advantages, reference.group_advantages], ids=["public", "reference"]
)
with_scaling = pytest.mark.parametrize("scaling", ["group", "batch", "none"])


def trl_advantages(rewards: Tensor, group_size: int, options: GRPOOptions) -> Tensor:
    """What GRPOTrainer makes of rewards [S], NaN for a completion that no function scored.

    Only generating and calling the reward functions are stood in for.
    """
    sizes = {"num_generations": group_size, "per_device_train_batch_size": group_size}
    trainer = trl_trainer(options, **sizes)
    ids = [[2]] * len(rewards)
    texts = ["a"] * len(rewards)
    trainer._generate = lambda _: (ids, ids, None, texts, None, {}, None, None)
    trainer._calculate_rewards = lambda *_: rewards[:, None]
    return trainer._generate_and_score_completions([{"prompt": "a"}] * len(rewards))["advantages"]


def offsets(rewards: Tensor, group_size: int) -> Tensor:
    return torch.arange(0, len(rewards) + 1, group_size, dtype=torch.int32)


@with_op
@with_scaling
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_advantages_are_trls(rewards, group_size, scaling, op):
    rewards = torch.tensor(rewards)
    options = GRPOOptions.preset("trl", scale_rewards=scaling)
    given, _ = op(rewards, offsets(rewards, group_size), None, options)
    assert_close(given, trl_advantages(rewards, group_size, options))
    assert not given[rewards.isnan()].any()


@with_op
@with_scaling
def test_many_groups_of_many_samples_are_trls(scaling, op):
    rewards = torch.randn(512, generator=torch.Generator().manual_seed(0)) * 3 + 10
    options = GRPOOptions.preset("trl", scale_rewards=scaling)
    given, signal = op(rewards, offsets(rewards, 64), None, options)
    assert_close(given, trl_advantages(rewards, 64, options))
    assert signal.all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
@with_scaling
def test_from_rewards_to_loss_and_gradient_it_is_trl(scaling, loss_type, layout, impl):
    batch, rewards = make_batch("holes"), torch.tensor(REWARDS["graded"])
    options = options_of(loss_type, scale_rewards=scaling, **KL)
    credit = {"advantages": None, "rewards": rewards, "cu_groups": offsets(rewards, 4)}
    given = ours(batch, options, layout, impl, **credit)
    batch.advantages = trl_advantages(rewards, 4, options)
    assert_same(given, trls(batch, options), options)


@with_op
def test_trl_makes_an_advantage_of_the_rounding_of_equal_rewards(op):
    rewards, options = torch.full((7,), 1000.1), GRPOOptions.preset("trl")
    assert trl_advantages(rewards, 7, options).abs().max() > 0.1
    given, signal = op(rewards, offsets(rewards, 7), None, options)
    assert not given.any() and not signal.any()
