"""The gates of drawing a token and of the training forward, and what autograd is said to keep."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import grpo_engine as ge
from bench_fakes import CPU
from grpo_engine import ops
from grpo_engine.benchmarks import sampler_suite
from grpo_engine.benchmarks.harness import Case, Row, admit
from grpo_engine.benchmarks.prompt_once_cases import saved_bytes
from grpo_engine.benchmarks.sampler_suite import Shape
from grpo_engine.benchmarks.token_cases import truncated


def gate(case: Case, name: str) -> Row:
    provider = next(p for p in case.providers if p.name == name)
    return admit(case, provider, case.inputs(), case.expected())[0]


def token_case(name: str, rows: int = 6, vocab: int = 300) -> Case:
    cases = sampler_suite.cases(Shape("token", rows=rows, vocab=vocab), CPU)
    return next(case for case in cases if case.name == name)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.3, 0), (1.0, 1), (1.0, 5)])
def test_the_truncated_distribution_is_that_of_a_loop_over_words(top_p, top_k):
    logits = 3 * torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).double()
    for row, found in zip(logits.numpy(), truncated(logits, top_p, top_k).numpy(), strict=True):
        p, kept = np.exp(row) / np.exp(row).sum(), []
        for word in np.argsort(-row):
            enough = sum(p[i] for i in kept) >= top_p or (top_k and len(kept) == top_k)
            if not enough:
                kept.append(word)
        wanted = np.zeros(40)
        wanted[kept] = p[kept] / sum(p[i] for i in kept)
        assert np.abs(found - wanted).max() < 1e-12


@pytest.mark.parametrize("name", ["token-top-p", "token-temperature", "token-top-k"])
@pytest.mark.parametrize("provider", ["ours-cpp", "ours-torch", "transformers"])
def test_drawing_as_it_is_passes_its_gate(name, provider):
    row = gate(token_case(name), provider)
    assert row.status == "ok", row.note
    assert max(row.errors.values()) < 1e-5


def unfiltered(draw: Callable, logits: Tensor, uniform: Tensor, t: Tensor, **filters: object):
    return draw(logits, uniform, t, impl=filters["impl"])


def untempered(draw: Callable, logits: Tensor, uniform: Tensor, t: Tensor, **filters: object):
    return draw(logits, uniform, torch.ones_like(t), **filters)


def neighbour(draw: Callable, logits: Tensor, uniform: Tensor, t: Tensor, **filters: object):
    tokens, logp, _ = draw(logits, uniform, t, **filters)
    order = logits.argsort(-1, descending=True)
    place = (order == tokens[:, None]).int().argmax(-1)
    other = order.gather(-1, torch.where(place == 0, 1, place - 1)[:, None]).squeeze(-1)
    chosen = (logits / t[:, None]).log_softmax(-1).gather(-1, other[:, None]).squeeze(-1)
    return other, logp, chosen


@pytest.mark.parametrize(
    ("name", "wrong", "output"),
    [
        ("token-top-p", unfiltered, "logp_gap"),
        ("token-top-k", unfiltered, "logp_gap"),
        ("token-temperature", untempered, "logp_gap"),
        ("token-temperature", neighbour, "draw_gap"),  # a token of another number, its own logp
    ],
)
def test_a_wrong_draw_is_named(monkeypatch, name, wrong, output):
    draw = ops.sample_tokens
    monkeypatch.setattr(ops, "sample_tokens", lambda *a, **k: wrong(draw, *a, **k))
    row = gate(token_case(name), "ours-cpp")
    assert row.status == "wrong" and f"{output} is off by" in row.note
    others = {"logp_gap", "draw_gap"} - {output}
    assert wrong is not neighbour or all(row.errors[o] < 1e-3 for o in others)


def test_a_wrong_warper_is_named(monkeypatch):
    monkeypatch.setattr("transformers.TopPLogitsWarper.__call__", lambda self, ids, scores: scores)
    row = gate(token_case("token-top-p"), "transformers")
    assert row.status == "wrong" and row.note.startswith("probabilities is off by")


def one_by_one(
    model: nn.Module,
    prompts: list[list[int]],
    completions: list[list[list[int]]],
    shared_prompt: object,
) -> tuple[Tensor, None]:
    """group_hidden by a forward for every sample."""
    rows = []
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion])
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            rows.append(hidden[len(prompt) - 1 : -1])
    return torch.cat(rows), None


def prompt_detached(model, prompts, completions, shared_prompt):
    """The first token of every sample lets no gradient through."""
    hidden, index = one_by_one(model, prompts, completions, shared_prompt)
    first = torch.arange(len(hidden)) % len(completions[0][0]) == 0
    return torch.where(first[:, None], hidden.detach(), hidden), index


def samples_swapped(model, prompts, completions, shared_prompt):
    hidden, index = one_by_one(model, prompts, completions, shared_prompt)
    return hidden.unflatten(0, (-1, len(completions[0][0]))).flip(0).flatten(0, 1), index


def slightly_off(model, prompts, completions, shared_prompt):
    hidden, index = one_by_one(model, prompts, completions, shared_prompt)
    return hidden * (1 + 3e-4), index


TWO_GROUPS = Shape("prompt-once", "tiny", prompts=2, prompt=9, group=3, new=4)


@pytest.mark.parametrize(
    ("group_hidden", "note"),
    [
        (one_by_one, ""),
        (prompt_detached, "gradient is off by"),
        (samples_swapped, "hidden is off by"),
        (slightly_off, "hidden is off by 0.0003 > 0.0001, gradient is off by 0.0003 > 0.0001"),
    ],
)
def test_the_training_forward_is_held_to_whole_sequences(monkeypatch, group_hidden, note):
    monkeypatch.setattr(ge, "group_hidden", group_hidden, raising=False)
    (case,) = sampler_suite.cases(TWO_GROUPS, CPU)
    row = gate(case, "ours-prompt-once")
    assert row.status == ("wrong" if note else "ok") and row.note.startswith(note)
    assert note or (math.isfinite(row.errors["gradient"]) and row.errors["gradient"] < 1e-5)


def test_each_way_asks_for_what_its_name_says(monkeypatch):
    asked = []

    def group_hidden(model, prompts, completions, shared_prompt):
        asked.append((shared_prompt, len(prompts), [len(group) for group in completions]))
        return one_by_one(model, prompts, completions, shared_prompt)

    monkeypatch.setattr(ge, "group_hidden", group_hidden, raising=False)
    (case,) = sampler_suite.cases(TWO_GROUPS, CPU)
    for name in ("ours-prompt-once", "ours-packed"):
        gate(case, name)
    assert asked == [(True, 2, [3, 3]), (False, 2, [3, 3])]
    assert gate(case, "whole").figures["saved_of_whole"] == 1.0


class Scaled(nn.Module):
    """x * weight, then exp: autograd keeps x, and the result of exp; the weight is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp()


def test_saved_bytes_count_a_storage_once_and_no_parameter():
    model, x = Scaled(), torch.ones(8, 1000)
    result, nbytes = saved_bytes(lambda: model(x), model)
    assert torch.equal(result, torch.full((8, 1000), math.exp(0.5)))
    assert nbytes == 2 * 8 * 1000 * 4
    # Views of x share its storage: it counts with all of it, and only once.
    _, nbytes = saved_bytes(lambda: model(x[:2]) + model(x[2:4]), model)
    assert nbytes == 8 * 1000 * 4 + 2 * (2 * 1000 * 4)
