"""Tokens and log-probs of the sampler against stock forwards, `generate` and numpy."""

import numpy as np
import pytest
import torch

from conftest import FAMILIES, make_model
from grpo_engine import GroupSampler, Rollout, SamplingParams
from oracles import stock_logprobs

# Lengths 1, window - 1, window, window + 1 of the gemma3 here, and well beyond it.
PROMPTS = [[9], *(list(range(3 + n, 3 + 2 * n)) for n in (7, 8, 9, 30))]
LLAMA_KV_BYTES = 2 * 2 * 2 * 8 * 4  # of a token: 2 x layers x kv_heads x head_dim x float32


def sample(model, prompts=PROMPTS, group_size=1, slots="auto", **params) -> list[Rollout]:
    """All samples of all prompts."""
    sampler = GroupSampler(model, slots=slots)
    groups = sampler.generate(prompts, group_size, SamplingParams(**params))
    return [rollout for group in groups for rollout in group]


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.completion_ids for r in rollouts]


def assert_same_samples(given: list[Rollout], wanted: list[Rollout]) -> None:
    assert ids(given) == ids(wanted)
    for a, b in zip(given, wanted, strict=True):
        assert (a.group, a.sample, a.finish_reason) == (b.group, b.sample, b.finish_reason)
        torch.testing.assert_close(a.logp_sampler, b.logp_sampler, atol=1e-5, rtol=0)
        torch.testing.assert_close(a.logp_processed, b.logp_processed, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family):
    model = make_model(family)
    groups = GroupSampler(model).generate(PROMPTS, 2, SamplingParams(temperature=0, max_tokens=24))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        row = torch.tensor([prompt])
        whole = model.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=24
        )
        assert ids(group) == [whole[0, len(prompt) :].tolist()] * 2
        assert [r.prompt_ids for r in group] == [prompt] * 2


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logp_sampler_is_of_the_tempered_logits_of_each_sample(family):
    model = make_model(family)
    cycle = [SamplingParams(temperature=t, max_tokens=16, seed=1) for t in (0.6, 1.0, 1.7, 0.0)]
    groups = GroupSampler(model).generate(PROMPTS, 6, cycle)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert [r.params.temperature for r in group] == [0.6, 1.0, 1.7, 0.0, 0.6, 1.0]
        for r in group:
            wanted = stock_logprobs(model, prompt, r.completion_ids, r.params.temperature or 1.0)
            # Logits of std 10 / T, in float32 on another path: 1e-5 of their own size, too.
            torch.testing.assert_close(r.logp_sampler.double(), wanted, atol=1e-5, rtol=1e-5)
            processed = torch.zeros_like(wanted) if r.params.temperature == 0 else wanted
            torch.testing.assert_close(r.logp_processed.double(), processed, atol=1e-5, rtol=1e-5)


def filtered(logits: np.ndarray, seen: list[int], params: SamplingParams) -> np.ndarray:
    """Log-probs [V] after penalty, temperature, min-p, top-k and top-p, by their definitions."""
    z = logits.copy()
    for token in set(seen):
        z[token] = z[token] * params.repetition_penalty ** (-1 if z[token] > 0 else 1)
    p = np.exp(z / params.temperature - np.max(z / params.temperature))
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    reached = int(np.searchsorted(np.cumsum(p[order]), params.top_p)) + 1
    p[order[reached:]] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"top_p": 0.9, "top_k": 6, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids="+".join,
)
def test_truncation_is_in_logp_processed_and_never_in_logp_sampler(changes):
    model = make_model()
    params = SamplingParams(temperature=1.3, max_tokens=20, seed=2, ignore_eos=True, **changes)
    # Beside samples without truncation: the filters are of a sample, not of the batch.
    groups = GroupSampler(model).generate(PROMPTS, 4, [params, SamplingParams(seed=2)])
    moved = 0.0
    for r in (r for group in groups for r in group[::2]):
        row = [*r.prompt_ids, *r.completion_ids]
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].double().numpy()
        for t, token in enumerate(r.completion_ids):
            read = len(r.prompt_ids) + t
            wanted = filtered(logits[read - 1], row[:read], params)[token]
            assert float(r.logp_processed[t]) == pytest.approx(wanted, abs=2e-5)
        untruncated = stock_logprobs(model, r.prompt_ids, r.completion_ids, 1.3)
        torch.testing.assert_close(r.logp_sampler.double(), untruncated, atol=2e-5, rtol=0)
        moved = max(moved, float((r.logp_processed - r.logp_sampler).abs().max()))
    assert moved > 0.1
    for r in (r for group in groups for r in group[1::2]):
        torch.testing.assert_close(r.logp_processed, r.logp_sampler, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_does_not_depend_on_what_it_is_batched_with(family):
    model = make_model(family)
    short, long = list(range(20, 25)), list(range(10, 60))
    alone = sample(model, [short], 3, max_tokens=20, seed=3)
    beside = sample(model, [short, long], 3, max_tokens=20, seed=3)
    assert_same_samples(beside[:3], alone)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_a_sample_does_not_depend_on_the_slots(family, slots):
    model = make_model(family)
    model.generation_config.eos_token_id = list(range(1, 9))  # so that samples end all over
    options = {"group_size": 5, "temperature": 1.5, "max_tokens": 20, "seed": 4}
    automatic = sample(model, **options)
    lengths = {len(r.completion_ids) for r in automatic}
    assert len(lengths) > 4 and {r.finish_reason for r in automatic} == {"stop", "length"}
    assert_same_samples(sample(model, slots=slots, **options), automatic)


@pytest.mark.parametrize("slots", [1, 2, 6, "auto"])
def test_a_prompt_goes_through_the_model_once_for_its_group(slots):
    model = make_model()
    sampler = GroupSampler(model, slots=slots)
    passed = []
    model.get_input_embeddings().register_forward_hook(lambda _, x, __: passed.append(x[0].numel()))
    prompts = [list(range(3, 15)), list(range(20, 32))]  # of one length: no padding is passed
    params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    rollouts = [r for group in sampler.generate(prompts, 3, params) for r in group]
    # The last token of a completion is drawn, but nothing follows from it.
    assert sum(passed) == 2 * 12 + sum(len(r.completion_ids) - 1 for r in rollouts)


@pytest.mark.parametrize("slots", [1, "auto"])
def test_stats_count_each_prompt_once_and_each_drawn_token(slots):
    sampler = GroupSampler(make_model(), slots=slots)
    for calls in (1, 2):
        groups = sampler.generate(PROMPTS, 4, SamplingParams(max_tokens=9, seed=1))
        drawn = sum(len(r.completion_ids) for group in groups for r in group)
        assert sampler.stats["prefill_tokens"] == calls * sum(map(len, PROMPTS))
        assert sampler.stats["decode_tokens"] == calls * drawn


@pytest.mark.parametrize(("prompt_lengths", "group_size"), [((20,), 6), ((5, 5, 5, 50), 1)])
def test_automatic_slots_keep_to_the_kv_bytes(prompt_lengths, group_size):
    prompts = [list(range(3, 3 + n)) for n in prompt_lengths]
    budget = 4 * 96 * LLAMA_KV_BYTES  # four samples that fill the context
    sampler = GroupSampler(make_model(), kv_bytes=budget)
    sampler.generate(prompts, group_size, SamplingParams(max_tokens=96, seed=0, ignore_eos=True))
    assert budget / 3 < sampler.stats["kv_bytes_peak"] <= budget


def test_siblings_and_groups_of_one_prompt_differ():
    rollouts = sample(make_model(), [[5, 6, 7]] * 3, 8, max_tokens=12, seed=5, ignore_eos=True)
    assert len({tuple(row) for row in ids(rollouts)}) == 24


def test_the_seed_decides():
    model = make_model()
    options = {"group_size": 4, "max_tokens": 12}
    first = sample(model, seed=6, **options)
    assert_same_samples(sample(model, seed=6, **options), first)
    others = [sample(model, seed=seed, **options) for seed in (7, None, None)]
    for other in others:
        assert ids(other) != ids(first)
    # In every group; asked only of the fixed seed, for short unseeded groups may coincide.
    for start in range(0, len(first), 4):
        assert ids(others[0][start : start + 4]) != ids(first[start : start + 4])
    assert ids(others[1]) != ids(others[2])


def test_a_lower_limit_gives_the_beginning_of_the_same_sample():
    model = make_model()
    longer = sample(model, group_size=3, max_tokens=12, seed=8, ignore_eos=True)
    shorter = sample(model, group_size=3, max_tokens=5, seed=8, ignore_eos=True)
    assert ids(shorter) == [row[:5] for row in ids(longer)]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_are_drawn_from_the_softmax(temperature):
    model, prompt, draws = make_model(), [4, 40, 12], 10_000
    rollouts = sample(model, [prompt], draws, max_tokens=1, seed=9, temperature=temperature)
    counts = np.bincount([r.completion_ids[0] for r in rollouts], minlength=75)
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = draws * (logits / temperature).softmax(-1).numpy()
    rare = expected < 5  # chi-square needs cells of at least 5; the rare share one
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert len(counts) > 15 and expected[-1] >= 5
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    half_df = torch.tensor((len(counts) - 1) / 2)
    assert torch.special.gammaincc(half_df, torch.tensor(chi2 / 2)) > 0.01
