"""The group as unit: who counts, what is learned from, and that no split of the work matters."""

import json
import math

import pytest
import torch

from conftest import make_model
from grpo_engine.groups.batch import micro_batches
from grpo_engine.groups.stored import BY_SAMPLE, PLAIN, TENSORS, batch_from_json, batch_to_json
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.learn import accumulate_gradient, score_logprobs
from samples import CUT, FAILED, STOPS, TEMPERATURE, batch_of

# Rewards 1, 0, 0, 1: mean 1/2, standard deviation 1/2; without the last: mean 1/3, deviation
# sqrt(2)/3. Advantages are divided by the deviation + 1e-4.
WHOLE = 0.5 / (0.5 + 1e-4)
PART_STD = math.sqrt(2) / 3 + 1e-4
PART = [2 / 3 / PART_STD, -1 / 3 / PART_STD, -1 / 3 / PART_STD, 0.0]


@pytest.mark.parametrize(
    ("truncated", "valid", "in_loss", "advantages"),
    [
        ("mask", [1, 1, 1, 1], [1, 1, 1, 0], [WHOLE, -WHOLE, -WHOLE, WHOLE]),
        ("keep", [1, 1, 1, 1], [1, 1, 1, 1], [WHOLE, -WHOLE, -WHOLE, WHOLE]),
        ("drop", [1, 1, 1, 0], [1, 1, 1, 0], PART),
    ],
)
def test_truncated_sample_counts_as_configured(truncated, valid, in_loss, advantages):
    batch = batch_of([[1, 0, 0, 1]], [[STOPS, STOPS, STOPS, CUT]], truncated=truncated)
    assert batch.valid.tolist() == [bool(v) for v in valid]
    assert batch.in_loss.tolist() == [bool(v) for v in in_loss]
    torch.testing.assert_close(batch.advantages, torch.tensor(advantages), rtol=1e-6, atol=0)
    assert batch.signal.tolist() == [True]


@pytest.mark.parametrize(
    ("truncated", "in_statistics"), [("mask", True), ("drop", False), ("keep", True)]
)
def test_group_all_truncated(truncated, in_statistics):
    # Fault 8: nothing in the loss, and no 0/0.
    batch = batch_of([[1, 0, 0, 1]], [[CUT] * 4], truncated=truncated)
    kept = truncated == "keep"
    assert batch.in_loss.tolist() == [kept] * 4
    assert batch.valid.tolist() == [in_statistics] * 4
    expected = [WHOLE, -WHOLE, -WHOLE, WHOLE] if in_statistics else [0.0] * 4
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), rtol=1e-6, atol=0)
    model = make_model()
    micros = micro_batches(batch, 100, without_signal=False)
    metrics = accumulate_gradient(model, batch, micros, GRPOOptions(beta=0.0))
    assert metrics["tokens"] == (2 + 3 + 4 + 5 if kept else 0)
    assert kept or (metrics["loss"], metrics["nonfinite"]) == (0.0, 0)
    assert {p.grad is not None for p in model.parameters()} == {kept}


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, 1e39])
def test_sample_without_a_finite_reward_does_not_move_its_siblings(reward):
    batch = batch_of([[1, 0, 0, reward]])  # 1e39 is finite, but not in float32
    assert batch.valid.tolist() == batch.in_loss.tolist() == [True, True, True, False]
    torch.testing.assert_close(batch.advantages, torch.tensor(PART), rtol=1e-6, atol=0)


def test_failed_sample_does_not_move_its_siblings_whatever_its_reward():
    batch = batch_of([[1, 0, 0, 100]], [[STOPS, STOPS, STOPS, FAILED]], truncated="keep")
    assert batch.valid.tolist() == batch.in_loss.tolist() == [True, True, True, False]
    torch.testing.assert_close(batch.advantages, torch.tensor(PART), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reward", [0.4, 0.1, 1 / 3, 0.0, -7.3])
def test_equal_rewards_carry_no_signal(reward):
    # Fault 18: rounding of the mean must not become an advantage.
    batch = batch_of([[reward] * 4, [1, 0, 0, 1], [reward, None]])
    assert batch.signal.tolist() == [False, True, False]
    assert batch.advantages.tolist()[:4] + batch.advantages.tolist()[8:] == [0.0] * 6


@pytest.mark.parametrize("value", [0.5, 0.1, 1 / 3])
def test_reward_std_is_zero_where_only_the_groups_differ(value):
    # Fault 26: over the batch it would be far from 0, and nobody would see that nothing is learned.
    batch = batch_of([[value] * 7, [1.0] * 7, [0.0] * 7])
    assert batch.reward_std() == 0.0


def test_reward_std_is_the_mean_over_groups_of_valid_samples():
    batch = batch_of([[1, 0, None, 1, 0], [5, 5, 5], [2, 8], [None, None]])
    # Deviations 1/2, 0 and 3; a group without valid samples has none.
    assert batch.reward_std() == pytest.approx(3.5 / 3, rel=1e-6)


def test_groups_with_the_same_prompt_are_kept_apart():
    # Fault 17: two draws of one row, or two rows with one text, are two experiments.
    prompt = [5, 6, 7]
    batch = batch_of([[1, 0], [100, 300]], prompts=[prompt, prompt])
    assert [origin.row for origin in batch.origins] == [0, 7]
    assert batch.cu_groups.tolist() == [0, 2, 4]
    assert batch.group_of_sample().tolist() == [0, 0, 1, 1]
    big = 100 / (100 + 1e-4)
    expected = torch.tensor([WHOLE, -WHOLE, -big, big])
    torch.testing.assert_close(batch.advantages, expected, rtol=1e-6, atol=0)


# Prompts of 3, 4 and 5 tokens; group 1 has no signal, one sample of group 2 is truncated and one
# is empty: it counts in the denominators, but has no token to run.
RAGGED = {
    "rewards": [[1, 0, 2], [0.5, 0.5], [1, 0, 0, 3]],
    "finish": [[STOPS] * 3, [STOPS] * 2, [STOPS, CUT, STOPS, STOPS]],
    "lengths": [[4, 1, 2], [3, 6], [2, 9, 0, 7]],
}


@pytest.mark.parametrize(
    ("without_signal", "needed"), [(False, [0, 1, 2, 5, 8]), (True, [0, 1, 2, 3, 4, 5, 8])]
)
@pytest.mark.parametrize("budget", [14, 25, 1000])
def test_micro_batches_hold_each_needed_sample_once_and_groups_whole(
    without_signal, needed, budget
):
    batch = batch_of(**RAGGED)
    micros = micro_batches(batch, budget, without_signal=without_signal)
    assert sorted(s for micro in micros for s in micro) == needed
    group = batch.group_of_sample().tolist()
    for number in range(3):
        assert sum(number in {group[s] for s in micro} for micro in micros) <= 1
    for micro in micros:
        prompts = {group[s]: len(batch.rollouts[s].prompt_ids) for s in micro}
        own = sum(len(batch.rollouts[s].completion_ids) for s in micro)
        assert sum(prompts.values()) + own <= budget


def test_a_prompt_is_paid_for_once_by_its_group():
    # Group 0: 3 + 7 = 10 tokens. Group 2, without two samples: 5 + 9 = 14.
    batch = batch_of(**RAGGED)
    assert micro_batches(batch, 24, without_signal=False) == [[0, 1, 2, 5, 8]]
    assert sorted(micro_batches(batch, 23, without_signal=False)) == [[0, 1, 2], [5, 8]]


def test_sample_above_the_budget_is_an_error():
    with pytest.raises(ValueError, match="budget"):
        micro_batches(batch_of(**RAGGED), 11, without_signal=False)  # 5 + 7 tokens in one


def test_batch_survives_json_bit_for_bit():
    batch = batch_of([[1, None, 0.1], [1 / 3, math.inf]], lengths=[[3, 1, 0], [2, 5]])
    batch.rollouts[0].logp_processed[1] = -math.inf
    batch.old_logp = {s: r.logp_sampler / 3 for s, r in enumerate(batch.rollouts)}
    batch.ref_logp = {4: batch.rollouts[4].logp_sampler * 1e-30}
    batch.token_advantages = {1: torch.tensor([0.1, 1 / 3]), 3: torch.tensor([-1e-30])}
    again = batch_from_json(json.loads(json.dumps(batch_to_json(batch))))
    for name in TENSORS:
        assert_same_bits(getattr(again, name), getattr(batch, name))
    for name in BY_SAMPLE:
        assert getattr(again, name).keys() == getattr(batch, name).keys()
        for sample, values in getattr(batch, name).items():
            assert_same_bits(getattr(again, name)[sample], values)
    for name in ("origins", *PLAIN):
        assert getattr(again, name) == getattr(batch, name), name
    for ours, theirs in zip(again.rollouts, batch.rollouts, strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(getattr(ours, name), value)
            else:
                assert getattr(ours, name) == value, name


def assert_same_bits(x: torch.Tensor, y: torch.Tensor) -> None:
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert x.numpy().tobytes() == y.numpy().tobytes()


# Four groups with signal, one sample truncated. Tokens to run, prompts once: 13, 7, 13, 15 = 48;
# so a budget of 48 makes one micro-batch, 28 two (15 + 13, 13 + 7), 15 four.
LEARNED = {
    "rewards": [[1, 0, 0.5], [0, 1, 1], [2, 2, -1], [0.1, 0.7, 0.2]],
    "finish": [[STOPS] * 3, [CUT, STOPS, STOPS], [STOPS] * 3, [STOPS] * 3],
    "lengths": [[4, 1, 3], [6, 2, 2], [1, 5, 3], [7, 4, 2]],
    "prompts": [[9, 8, 7, 6, 5], [30, 31, 32], [40, 41, 42, 43], [50, 51]],
}
BUDGETS = {48: 1, 28: 2, 15: 4}
SAMPLES, TOKENS = 11, 34  # in the loss
LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 8},
    "dapo": {},
    "cispo": {"epsilon_high": 1.1},
    "sapo": {},
    "luspo": {},
    "vespo": {},
    "grpo, by sequence": {"importance_sampling_level": "sequence"},
    "dapo, batch": {"scale_rewards": "batch", "use_bias_correction_kl": True},
}


def options_of(loss: str, beta: float) -> GRPOOptions:
    return GRPOOptions(loss_type=loss.partition(",")[0], beta=beta, **LOSSES[loss])


def gradient(model, batch, budget, options) -> torch.Tensor:
    model.zero_grad()
    micros = micro_batches(batch, budget, without_signal=options.beta > 0)
    accumulate_gradient(model, batch, micros, options)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_gap(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / y.norm())


def noisy(model, batch, seed: int) -> dict[int, torch.Tensor]:
    """Log-probs near those of the model, some beyond the clip range."""
    generator = torch.Generator().manual_seed(seed)
    scored = score_logprobs(model, batch, [[s] for s in range(len(batch.rollouts))])
    return {s: x + 0.3 * torch.randn(len(x), generator=generator) for s, x in scored.items()}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_the_micro_batches(loss, beta):
    # Fault 7.
    options = options_of(loss, beta)
    model, batch = make_model().double(), batch_of(**LEARNED, options=options)
    batch.old_logp = noisy(model, batch, 1)
    batch.ref_logp = noisy(model, batch, 2) if beta else {}
    for budget, count in BUDGETS.items():
        assert len(micro_batches(batch, budget, without_signal=beta > 0)) == count
    one, *others = [gradient(model, batch, budget, options) for budget in BUDGETS]
    assert one.norm() > 1e-3
    for other in others:
        assert relative_gap(other, one) < 1e-6


def weight_of(loss: str, length: int) -> float:
    """What a token of a sample of `length` tokens weighs in the batch above."""
    if loss in ("grpo", "sapo"):
        return 1 / length / SAMPLES
    if loss == "luspo":
        return 1 / SAMPLES
    return 1 / (8 * SAMPLES) if loss == "dr_grpo" else 1 / TOKENS


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", [name for name in LOSSES if "," not in name])
def test_gradient_on_policy_is_that_of_the_policy_gradient_by_hand(loss, beta):
    # At ratio 1 every loss type has the gradient -A grad logp; only the weights of tokens differ.
    model, batch = make_model(), batch_of(**LEARNED)
    batch.ref_logp = noisy(model, batch, 2) if beta else {}
    found = gradient(model, batch, 28, options_of(loss, beta))
    model.zero_grad()
    for s, r in enumerate(batch.rollouts):
        if not batch.in_loss[s]:
            continue
        logits = model(torch.tensor([r.prompt_ids + r.completion_ids])).logits[0].double()
        start, targets = len(r.prompt_ids) - 1, torch.tensor(r.completion_ids)
        logp = (logits[start:-1] / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        per_token = -float(batch.advantages[s]) * logp
        if beta:
            x = batch.ref_logp[s] - logp
            per_token = per_token + beta * (x.exp() - x - 1)
        (per_token.sum() * weight_of(loss, len(r.completion_ids))).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative_gap(found, expected) < 1e-5


@pytest.mark.parametrize(("beta", "runs"), [(0.0, [0, 1, 2, 5, 8]), (0.1, [0, 1, 2, 3, 4, 5, 8])])
def test_samples_without_signal_get_a_forward_only_for_the_kl(beta, runs):
    model, batch = make_model(), batch_of(**RAGGED)
    batch.ref_logp = noisy(model, batch, 2) if beta else {}
    rows: list[list[int]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, inputs: rows.extend(inputs["input_ids"].tolist()), with_kwargs=True
    )
    gradient(model, batch, 1000, GRPOOptions(beta=beta))
    packed, group = [], batch.group_of_sample().tolist()
    for before, s in zip([None, *runs], runs, strict=False):
        if before is None or group[s] != group[before]:
            packed += batch.rollouts[s].prompt_ids
        packed += batch.rollouts[s].completion_ids
    assert rows == [packed]
