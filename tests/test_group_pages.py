"""The run over the pages: nothing is read that is not written, the bytes are the formula's, slots
are refilled at once, and a run that is broken off keeps what is complete."""

import heapq
from threading import Event

import numpy as np
import pytest
import torch
from torch import nn

from conftest import FAMILIES, make_model
from grpo_engine import _C, GroupSampler, Rollout, SamplingParams, sampler
from grpo_engine.cache import KVCache
from grpo_engine.decode_ops import PAGE

# A prompt that fills no page, almost one, one, and one more token.
PROMPTS = [[3 + (7 * n + 5 * i * i) % 71 for i in range(n)] for n in (1, PAGE - 1, PAGE, PAGE + 1)]
ENDS = list(range(1, 7))  # ids, so many that samples end by them all over
Step = tuple[list[int], list[int]]  # samples that draw, and those among them that end


def ragged_model(family: str = "llama") -> nn.Module:
    model = make_model(family)
    model.generation_config.eos_token_id = ENDS
    return model


class PoisonedCache(KVCache):
    """NaN stands wherever the model has not written."""

    made: "PoisonedCache"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        PoisonedCache.made = self

    def layer(self, number, like):
        new = number not in self._layers
        pools = super().layer(number, like)
        if new:
            self.poison(slice(None), [pools])
        return pools

    def poison(self, pages, layers=None) -> None:
        for pools in self._layers.values() if layers is None else layers:
            for pool in pools:
                pool[pages] = float("nan")


class PoisoningScheduler(_C.SlotScheduler):
    """A page that goes back to the pool holds NaN at once; counts how many went."""

    made: "PoisoningScheduler"

    def __init__(self, slots, page, pages, *lengths) -> None:
        super().__init__(slots, page, pages, *lengths)
        self.pages, self.freed = pages, 0
        PoisoningScheduler.made = self

    def counts(self) -> np.ndarray:
        return np.array([self.pool.count(page) for page in range(self.pages)])

    def finish(self, slot) -> None:
        before = self.counts()
        super().finish(slot)
        gone = np.flatnonzero((before > 0) & (self.counts() == 0))
        self.freed += len(gone)
        PoisonedCache.made.poison(torch.from_numpy(gone))


@pytest.mark.parametrize(
    ("family", "slots"), [*((f, 3) for f in FAMILIES), ("llama", 1), ("gemma3", 1), ("llama", 8)]
)
def test_freed_and_fresh_pages_of_nan_change_no_bit(family, slots, monkeypatch):
    model = ragged_model(family)
    params = [SamplingParams(max_tokens=n, temperature=1.3, seed=2) for n in (40, 3, PAGE)]

    def draw() -> list[Rollout]:
        groups = GroupSampler(model, slots=slots).generate(PROMPTS, 4, params)
        return [r for group in groups for r in group]

    clean = draw()
    monkeypatch.setattr(sampler, "KVCache", PoisonedCache)
    monkeypatch.setattr(_C, "SlotScheduler", PoisoningScheduler)
    for a, b in zip(draw(), clean, strict=True):
        assert (a.completion_ids, a.finish_reason) == (b.completion_ids, b.finish_reason)
        assert torch.equal(a.logp_sampler, b.logp_sampler)
        assert torch.equal(a.logp_processed, b.logp_processed)
    plan = PoisoningScheduler.made
    # By group: its prompt's pages, and those of four samples of 40, 3, 32 and 40 tokens.
    assert plan.freed == sum(-(-len(p) // PAGE) + 2 + 1 + 1 + 2 for p in PROMPTS)
    assert not plan.counts().any() and plan.pool.used == 0
    assert plan.freed > plan.pages or slots == 8  # pages were used again


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_are_those_of_one_prompt_and_w_samples(family, slots, monkeypatch):
    monkeypatch.setattr(sampler, "KVCache", PoisonedCache)
    model, prompt, longest = make_model(family), [5] * (2 * PAGE + 1), 30
    engine = GroupSampler(model, slots=slots)
    params = SamplingParams(max_tokens=longest, ignore_eos=True, seed=0)
    engine.generate([prompt], 8, params)
    head_dim = 16 if family in ("qwen3", "gemma2", "gemma3") else 8
    per_token = 2 * 2 * 2 * head_dim * 4  # keys and values, 2 layers, 2 heads of them, float32
    formula = per_token * (len(prompt) + slots * longest)
    page = per_token * PAGE
    held = sum(x.nbytes for pools in PoisonedCache.made._layers.values() for x in pools)
    for found in (held, engine.stats["kv_bytes_peak"]):
        assert formula <= found < formula + (1 + slots) * page
    repeated = per_token * 8 * (len(prompt) + longest)
    assert held < {1: 0.2, 8: 0.5}[slots] * repeated


def list_schedule(lengths: list[int], slots: int) -> list[Step]:
    """What an ideal run does step by step: whoever is next takes a slot in the step it is free."""
    free_at = [0] * slots
    steps: dict[int, Step] = {}
    for sample, length in enumerate(lengths):
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + length)
        for step in range(start, start + length):
            steps.setdefault(step, ([], []))[0].append(sample)
        steps[start + length - 1][1].append(sample)
    return [steps[step] for step in range(len(steps))]


def lognormal_work() -> tuple[GroupSampler, list[list[int]], list[SamplingParams]]:
    """8 groups of 8 in 8 slots, limits lognormal; ids that end cut many of them shorter."""
    rng = np.random.default_rng(0)
    limits = np.clip(rng.lognormal(2.5, 0.8, 8).astype(int), 1, 60).tolist()
    prompts = [rng.integers(3, 74, n).tolist() for n in rng.integers(1, 36, 8)]
    params = [SamplingParams(max_tokens=n, temperature=1.5, seed=4) for n in limits]
    return GroupSampler(ragged_model(), slots=8), prompts, params


def test_decode_steps_are_those_of_the_ideal_list_schedule():
    engine, prompts, params = lognormal_work()
    told: list[tuple[int, int]] = []
    groups = engine.generate(prompts, 8, params, progress=lambda *x: told.append(x))
    lengths = [len(r.completion_ids) for group in groups for r in group]
    assert len(set(lengths)) > 12
    steps = list_schedule(lengths, 8)
    assert engine.stats["decode_steps"] == len(steps)
    assert len(steps) < 1.25 * sum(lengths) / 8
    # Waiting for each group to finish would take much longer.
    assert len(steps) < 0.7 * sum(max(lengths[i : i + 8]) for i in range(0, 64, 8))
    drawn = np.cumsum([len(samples) for samples, _ in steps]).tolist()
    most = 8 * sum(p.max_tokens for p in params)
    assert told == [(n, most) for n in drawn]


@pytest.mark.parametrize("last", [0, 1, 17, 60])
def test_cancel_keeps_finished_samples_and_what_the_others_have(last):
    engine, prompts, params = lognormal_work()
    whole = [r for group in engine.generate(prompts, 8, params) for r in group]
    steps = list_schedule([len(r.completion_ids) for r in whole], 8)[: last + 1]
    cancel, told = Event(), []

    def progress(*counts: int) -> None:
        told.append(counts)
        if len(told) == last + 1:
            cancel.set()

    groups = engine.generate(prompts, 8, params, progress=progress, cancel=cancel)
    assert len(told) == last + 1 and [len(g) for g in groups] == [8] * 8
    ended = {sample for _, ends in steps for sample in ends}
    for number, (r, full) in enumerate(zip((r for g in groups for r in g), whole, strict=True)):
        count = sum(number in samples for samples, _ in steps)
        assert r.finish_reason == (full.finish_reason if number in ended else "error")
        assert r.completion_ids == full.completion_ids[:count]
        assert len(r.logp_sampler) == len(r.logp_processed) == count
        torch.testing.assert_close(r.logp_sampler, full.logp_sampler[:count])
    assert not engine.model.training
    again = [r for group in engine.generate(prompts, 8, params) for r in group]
    assert [r.completion_ids for r in again] == [r.completion_ids for r in whole]
