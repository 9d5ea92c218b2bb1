"""Process rewards: DeepSeekMath's advantages per token, worked out by hand."""

import numpy as np
import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.process import StepReward, check_steps, step_advantages

# Rewards 1, 0 | 0, 1: mean 0.5, std 0.5, so each is +-0.5 / (0.5 + 1e-4) = +-0.99980004.
U = 0.5 / 0.5001
GROUP = [
    [StepReward(0, 2, 1.0), StepReward(2, 4, 0.0)],
    [StepReward(0, 1, 0.0), StepReward(1, 3, 1.0)],
]


def close(got: list[np.ndarray], wanted: list[list[float]]) -> None:
    assert [g.dtype for g in got] == [np.float32] * len(wanted)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, np.float32(w), rtol=0, atol=1e-6)


def test_a_token_earns_the_steps_that_end_at_it_or_later():
    # Sample 0: both steps lie ahead of tokens 0 and 1 (+U - U), the second of 2 and 3; token 4
    # comes after all. Sample 1: both ahead of token 0 (-U + U), then the second.
    close(step_advantages(GROUP, [5, 3]), [[0, 0, -U, -U, 0], [0, U, U]])


def test_without_to_go_a_token_earns_the_steps_that_hold_it():
    close(step_advantages(GROUP, [5, 3], to_go=False), [[U, U, -U, -U, 0], [-U, U, U]])


def test_tokens_between_steps():
    # Rewards 3 and 1: mean 2, std 1. Token 1 lies in no step, yet ahead of the second.
    steps, v = [[StepReward(0, 1, 3.0), StepReward(2, 3, 1.0)]], 1 / 1.0001
    close(step_advantages(steps, [3]), [[0, -v, -v]])
    close(step_advantages(steps, [3], to_go=False), [[v, 0, -v]])


def test_normalised_over_all_steps_of_all_samples():
    # Rewards 0, 0, 0, 1 over two samples: mean 0.25, std 0.4330127; 1.732, -0.577 as for GRPO.
    steps = [[StepReward(0, 1, 0.0)], [StepReward(i, i + 1, r) for i, r in enumerate([0, 0, 1])]]
    low, high = -0.25 / 0.4331127, 0.75 / 0.4331127
    got = step_advantages(steps, [1, 3])
    close(got, [[low], [low + low + high, low + high, high]])
    assert got[1][2] == pytest.approx(1.7317, abs=1e-4)


def test_the_standard_deviation_of_a_sample():
    # Rewards 0 and 2: mean 1, std sqrt(2) with ddof 1.
    steps = [[StepReward(0, 1, 0.0)], [StepReward(0, 1, 2.0)]]
    close(step_advantages(steps, [1, 1], ddof=1, epsilon_std=0.0), [[-(0.5**0.5)], [0.5**0.5]])


@pytest.mark.parametrize("reward", [0.1, 1e6, -3.0])
def test_equal_step_rewards_give_exactly_zero(reward):
    steps = [[StepReward(i, i + 1, reward) for i in range(2)], [StepReward(0, 2, reward)]]
    assert [a.tolist() for a in step_advantages(steps, [3, 2])] == [[0.0] * 3, [0.0] * 2]


def test_fewer_than_two_steps_give_zero():
    assert [a.tolist() for a in step_advantages([[StepReward(0, 1, 5.0)], None], [2, 1])] == [
        [0.0, 0.0],
        [0.0],
    ]
    assert [a.tolist() for a in step_advantages([None, []], [2, 0], ddof=1)] == [[0.0, 0.0], []]


def test_a_sample_without_steps_changes_nothing_for_the_others():
    close(
        step_advantages([None, *GROUP, []], [2, 5, 3, 1]),
        [[0, 0], [0, 0, -U, -U, 0], [0, U, U], [0]],
    )


def test_shift_scale_and_order_of_the_group():
    moved = [[StepReward(s.start, s.end, 7 * s.reward - 3) for s in own] for own in GROUP]
    plain = step_advantages(GROUP, [5, 3], epsilon_std=0.0)
    close(step_advantages(moved, [5, 3], epsilon_std=0.0), [a.tolist() for a in plain])
    turned = step_advantages(GROUP[::-1], [3, 5], epsilon_std=0.0)
    close(turned[::-1], [a.tolist() for a in plain])


BAD = [
    (StepReward(-1, 2, 1.0), r"the step \[-1, 2\) is no span of a completion of 4 tokens"),
    (StepReward(2, 2, 1.0), r"the step \[2, 2\) is no span"),
    (StepReward(2, 5, 1.0), r"the step \[2, 5\) is no span"),
    (StepReward(0, 1, float("nan")), "has the reward nan; it must be finite"),
    (0.5, "a list of StepReward is wanted; it holds float"),
]


@pytest.mark.parametrize(("step", "message"), BAD)
def test_a_step_that_can_not_be_names_function_and_sample(step, message):
    with pytest.raises(UserError, match=f"^the reward prm, sample 3: .*{message}"):
        check_steps([StepReward(0, 4, 1.0), step], 4, "prm", 3)


def test_step_advantages_refuses_a_step_outside_its_completion():
    with pytest.raises(UserError, match=r"sample 1: the step \[1, 3\) is no span"):
        step_advantages(GROUP, [5, 2])
