"""The samplers against numpy in float64: filters in vLLM's order, then the inverse CDF."""

import math

import numpy as np
import pytest
import torch

from sample_cases import IMPLEMENTATIONS, OFF, assert_rows, implementation, log_softmax

FOUR = [0.4, 0.3, 0.2, 0.1]


@pytest.fixture(params=IMPLEMENTATIONS)
def sample(request):
    """sample_tokens by one of the implementations."""
    with implementation(request.param) as sample_tokens:
        yield sample_tokens


def draw(sample, p, uniform, temperature=1.0, **filters):
    """One row per number in `uniform`, all with probabilities `p`; lists of the three results."""
    logits = torch.tensor(p).log().repeat(len(uniform), 1)
    filters = {name: torch.full((len(uniform),), x) for name, x in filters.items()}
    rows = torch.full((len(uniform),), temperature)
    return [x.tolist() for x in sample(logits, torch.tensor(uniform), rows, **filters)]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("on", [(), *((name,) for name in OFF), tuple(OFF)[:3], tuple(OFF)])
def test_random_rows_match_numpy(sample, on, temperature):
    rng = np.random.default_rng(len(on))
    rows, vocab = 60, 31
    logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    values = {
        "top_k": rng.integers(0, 12, rows),  # 0: off in that row
        "top_p": rng.uniform(0.1, 0.99, rows).astype(np.float32),
        "min_p": rng.uniform(0.0, 0.4, rows).astype(np.float32),
        "repetition_penalty": rng.uniform(0.7, 2.5, rows).astype(np.float32),
    }
    temperatures = np.where(rng.random(rows) < 0.8, temperature, 1.3).astype(np.float32)
    case = [torch.tensor(x) for x in (logits, rng.random(rows).astype(np.float32), temperatures)]
    filters = {name: torch.tensor(values[name]) for name in on}
    if "repetition_penalty" in on:
        filters["seen"] = torch.tensor(rng.random((rows, vocab)) < 0.3)
    assert_rows(sample(*case, **filters), *case, **filters)


def test_uniform_numbers_fall_into_the_intervals_of_the_distribution(sample):
    tokens, plain, processed = draw(
        sample, FOUR, [0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.99999994]
    )
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plain == pytest.approx([math.log(FOUR[t]) for t in tokens], abs=1e-6)
    assert processed == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "counts"),
    [(1.0, [400, 300, 200, 100]), (0.5, [533, 300, 133, 34]), (2.0, [325, 282, 230, 163])],
)
def test_evenly_spread_uniforms_reproduce_the_tempered_distribution(sample, temperature, counts):
    # p ** (1 / T), normalised: 16 9 4 1 of 30 at 0.5; square roots at 2
    tokens, _, _ = draw(sample, FOUR, [(i + 0.5) / 1000 for i in range(1000)], temperature)
    assert np.bincount(tokens) == pytest.approx(counts, abs=1)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 9}, 4),
        ({"top_p": 0.35}, 1),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.75}, 3),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 0.6}, 2),  # at least 0.6 * 0.4
        ({"min_p": 1.0}, 1),
        # top-p sees what top-k left, at 4/7 and 3/7; and that what min-p left
        ({"top_k": 2, "top_p": 0.55}, 1),
        ({"min_p": 0.6, "top_p": 0.55}, 1),
        ({"top_k": 2, "top_p": 0.6}, 2),
        ({"top_k": 3, "min_p": 0.6}, 2),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_filters_keep_the_likeliest_and_renormalise(sample, filters, kept, order):
    p = [FOUR[i] for i in order]
    tokens, plain, processed = draw(sample, p, [0.0, 0.25, 0.5, 0.75, 0.99999994], **filters)
    mass = sum(FOUR[:kept])
    assert {order[t] for t in tokens} <= set(range(kept))
    assert {tokens[0], tokens[-1]} == {
        min(i for i in range(4) if order[i] < kept),
        max(i for i in range(4) if order[i] < kept),
    }
    assert plain == pytest.approx([math.log(p[t]) for t in tokens], abs=1e-6)
    assert processed == pytest.approx([math.log(p[t] / mass) for t in tokens], abs=1e-6)


def test_top_k_of_equal_logits_keeps_the_lowest_ids(sample):
    tokens, _, processed = draw(sample, [0.2] * 5, [0.0, 0.3, 0.6, 0.99], top_k=2)
    assert tokens == [0, 0, 1, 1]
    assert processed == pytest.approx([math.log(0.5)] * 4, abs=1e-6)


def test_repetition_penalty_shrinks_positive_and_stretches_negative_logits_of_seen_tokens(sample):
    logits = torch.tensor([[2.0, 1.0, -1.0, -2.0]] * 2)
    seen = torch.tensor([[True, False, True, False]] * 2)
    tokens, plain, processed = sample(
        logits,
        torch.tensor([0.99999994, 0.5]),
        torch.tensor([1.0, 0.0]),
        repetition_penalty=torch.tensor([4.0, 4.0]),
        seen=seen,
    )
    penalised = log_softmax(np.array([0.5, 1.0, -4.0, -2.0]))
    untouched = log_softmax(np.array([2.0, 1.0, -1.0, -2.0]))
    assert tokens.tolist() == [3, 1]  # greedy, too, follows the penalised logits
    assert plain.tolist() == pytest.approx([untouched[3], untouched[1]], abs=1e-6)
    assert processed.tolist() == pytest.approx([penalised[3], 0.0], abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_its_log_prob_at_temperature_one(sample):
    tokens, plain, processed = draw(
        sample, FOUR[::-1], [0.0, 0.5, 0.99], temperature=0.0, top_p=0.9
    )
    assert tokens == [3, 3, 3]
    assert plain == pytest.approx([math.log(0.4)] * 3, abs=1e-6)
    assert processed == [0.0] * 3


@pytest.mark.parametrize("off", [{name: value} for name, value in OFF.items()])
def test_a_filter_that_is_off_in_a_row_leaves_that_row_alone(sample, off):
    # Rows share one call, so a sample must not depend on whether a neighbour uses the filter.
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(8, 5000, generator=generator)
    rows = torch.rand(8, generator=generator), torch.ones(8)
    filters = {name: torch.full((8,), value) for name, value in off.items()}
    if "repetition_penalty" in off:
        filters["seen"] = torch.ones(8, 5000, dtype=torch.bool)
    alone, beside = sample(logits, *rows), sample(logits, *rows, **filters)
    for a, b in zip(alone, beside, strict=True):
        assert a.tolist() == b.tolist()
