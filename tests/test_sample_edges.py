"""The samplers at their edges: ties, rows of -inf and NaN, sizes around a block, threads."""

import math

import numpy as np
import pytest
import torch

from sample_cases import (
    IMPLEMENTATIONS,
    OFF,
    assert_row,
    assert_rows,
    implementation,
    mixed_rows,
    processed_row,
)

INF = math.inf
BELOW_ONE = 1 - 2**-53


@pytest.fixture(params=IMPLEMENTATIONS)
def sample(request):
    """sample_tokens by one of the implementations."""
    with implementation(request.param) as sample_tokens:
        yield sample_tokens


@pytest.fixture(params=IMPLEMENTATIONS[1:])
def sample_cpp(request):
    with implementation(request.param) as sample_tokens:
        yield sample_tokens


def spread(rows, inside=True):
    """Uniform numbers over all of [0, 1), its ends included."""
    ends = [0.0, BELOW_ONE]
    return torch.tensor([*ends, *((i + 0.5) / (rows - 2) for i in range(rows - 2))]).double()


def same_rows(logits, rows, temperature=1.0, **filters):
    """Arguments for `rows` draws from one row of logits."""
    case = {
        "logits": torch.as_tensor(logits).repeat(rows, 1),
        "uniform": spread(rows),
        "temperature": torch.full((rows,), temperature),
    }
    case["uniform"][1] = BELOW_ONE  # not rounded to float32
    return case | {name: torch.full((rows,), value) for name, value in filters.items()}


# Around 16 lanes and blocks of 512, and none of their multiples.
@pytest.mark.parametrize("vocab", [1, 2, 3, 15, 16, 17, 511, 512, 513, 1000, 1025, 5003])
def test_rows_of_every_length_with_filters_of_their_own(sample, vocab):
    case = mixed_rows(24, vocab, seed=vocab)
    assert_rows(sample(**case), **case)


@pytest.mark.parametrize("std", [0.01, 8.0])
def test_flat_and_peaked_rows(sample_cpp, std):
    case = mixed_rows(24, 3000, std=std)
    assert_rows(sample_cpp(**case), **case)


def test_the_vocabulary_of_a_large_model(sample_cpp):
    case = mixed_rows(4, 151936)
    case["temperature"][:] = torch.tensor([1.0, 0.7, 1.3, 1.0])
    case["top_k"] = torch.tensor([0, 50, 2000, 0])  # 297 blocks have a maximum each
    case["top_p"] = torch.tensor([0.9, 0.95, 0.5, 1.0])
    assert_rows(sample_cpp(**case), **case, atol=2e-5)


FEW_VALUES = torch.arange(700.0) % 4


@pytest.mark.parametrize(
    "filters",
    [
        *({"top_k": k} for k in (1, 2, 174, 175, 176, 350, 353, 699, 700, 701)),
        *({"top_p": p} for p in (1e-6, 0.3115, 0.501, 0.643, 0.651, 0.901, 0.9999)),
        {"top_k": 177, "top_p": 0.902},
        {"top_k": 177, "top_p": 0.999},
        {"top_k": 200, "top_p": 0.993, "min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 1.0, "top_k": 30},
    ],
)
@pytest.mark.parametrize("logits", [FEW_VALUES, FEW_VALUES.flip(0), torch.zeros(700)])
def test_of_equal_logits_the_lowest_ids_stay(sample, filters, logits):
    case = same_rows(logits, 12, **filters)
    result = sample(**case)
    assert_rows(result, **case)
    _, p = processed_row(logits.numpy(), 1.0, **filters)
    kept = np.flatnonzero(p)
    assert result[0][:2].tolist() == [kept[0], kept[-1]]


def test_more_equal_logits_than_are_ever_sorted(sample_cpp):
    for logits in (torch.zeros(5000), -0.0 * (torch.arange(5000) % 2), torch.full((5000,), -3e38)):
        for filters, kept in (
            ({"top_k": 4000}, 4000),
            ({"top_p": 0.29995}, 1500),
            ({"top_k": 1}, 1),
        ):
            tokens, _, processed = sample_cpp(**same_rows(logits, 4, **filters))
            assert tokens[:2].tolist() == [0, kept - 1]
            assert processed.tolist() == pytest.approx([-math.log(kept)] * 4, abs=1e-5)


def test_logits_far_apart(sample):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1300, generator=g) * torch.logspace(-30, 30, 1300)[torch.randperm(1300)]
    for filters in ({"top_k": 3}, {"top_k": 900}, {"top_p": 0.7}, {"min_p": 0.5}, {}):
        case = same_rows(logits, 5, **filters)
        assert_rows(sample(**case), **case)


MASKED = {
    "before": torch.tensor([-INF] * 40 + [1.0, 2.0, 3.0]),
    "behind": torch.tensor([1.0, 2.0, 3.0] + [-INF] * 40),
    "blocks": torch.tensor([-INF] * 600 + [1.0, -INF, 3.0] + [-INF] * 1200),
    "one": torch.tensor([-INF] * 700 + [-3.0] + [-INF]),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 2}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01}]
)
def test_minus_infinity_is_never_drawn(sample, name, filters):
    finite = np.flatnonzero(MASKED[name].isfinite())
    case = same_rows(MASKED[name], 9, **filters)
    result = sample(**case)
    assert_rows(result, **case)
    left = finite[-2:] if filters.get("top_k") == 2 else finite
    assert result[0][:2].tolist() == [left[0], left[-1]]
    seen = MASKED[name].isinf().repeat(9, 1)
    case |= {"repetition_penalty": torch.full((9,), 1.5), "seen": seen}
    assert [x.tolist() for x in sample(**case)] == [x.tolist() for x in result]


@pytest.mark.parametrize("temperature", [1e-40, 1e-3, 30.0, 1e4, 1e30])
def test_temperatures_far_from_one(sample_cpp, temperature):
    case = mixed_rows(24, 999)
    logits = case["logits"] = case["logits"].mul(8).round().div(8)  # differences are exact
    case["temperature"].fill_(temperature)
    if temperature > 1:
        return assert_rows(sample_cpp(**case), **case, atol=2e-5)
    alone = {name: case[name] for name in ("logits", "uniform", "temperature")}
    tokens, plain, processed = sample_cpp(**alone)
    best = logits == logits.amax(1, keepdim=True)
    assert best.gather(1, tokens[:, None]).all()
    assert plain.tolist() == pytest.approx((-best.sum(1).log()).tolist(), abs=1e-6)
    assert plain.tolist() == processed.tolist()


def test_the_penalty_comes_before_temperature_and_filters(sample):
    logits = torch.tensor([3.0, 2.9, 0.5, -1.0, -1.1, -4.0])
    seen = torch.tensor([[True, False, True, True, False, False]] * 40)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}):
        for penalty in (0.5, 1.3, 4.0):
            case = same_rows(logits, 40, 0.8, **filters, repetition_penalty=penalty)
            assert_rows(sample(**case, seen=seen), **case, seen=seen)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0], [1.0, math.nan], [-math.nan, 1.0], [INF, 1.0], [-INF, -INF]]
)
def test_a_row_that_is_no_distribution_is_named(sample, bad, temperature, filters):
    case = same_rows([0.0, 1.0], 6, temperature, **filters)
    case["logits"][3] = case["logits"][5] = torch.tensor(bad)
    with pytest.raises(ValueError, match=r"row 3 has NaN or \+inf, or only -inf"):
        sample(**case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(sample_cpp, dtype):
    case = mixed_rows(24, 1003)
    case["logits"] = case["logits"].to(dtype)
    want = sample_cpp(**case | {"logits": case["logits"].float()})
    for got, expected in zip(sample_cpp(**case), want, strict=True):
        assert got.tolist() == expected.tolist()
    case["logits"] = torch.stack([case["logits"]] * 2, -1)[..., 0]  # strided
    assert sample_cpp(**case)[0].tolist() == want[0].tolist()


def test_neither_threads_nor_neighbours_change_a_bit(sample_cpp):
    case = mixed_rows(37, 20000)
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append([x.tolist() for x in sample_cpp(**case)])
    finally:
        torch.set_num_threads(1)
    assert all(result == results[0] for result in results)
    for i in range(0, 37, 6):
        alone = sample_cpp(**{name: x[i : i + 1] for name, x in case.items()})
        assert [x.item() for x in alone] == [column[i] for column in results[0]]


def test_ten_thousand_draws_have_the_distribution_of_the_softmax(sample):
    g = torch.Generator().manual_seed(0)
    logits, draws = 1.5 * torch.randn(50, generator=g), 10_000
    uniform = torch.rand(draws, generator=g, dtype=torch.float64)
    tokens, _, _ = sample(logits.expand(draws, 50), uniform, torch.full((draws,), 1.3))
    expected = draws * (logits.double() / 1.3).softmax(0)
    assert expected.min() > 5
    chi_square = (tokens.bincount(minlength=50) - expected).square().div(expected).sum()
    assert chi_square < 85.4  # 49 degrees of freedom: 1 in 1000 is beyond


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3)}, r"logits must be float \[B, V\]; given \[3\]"),
        ({"logits": torch.zeros(2, 3).long()}, "logits must be float.*int64"),
        ({"logits": torch.zeros(2, 0)}, r"logits must have a token; given \[2, 0\]"),
        ({"uniform": torch.tensor([0.5, 1.0])}, "uniform must be from 0 to below 1; given 1.0"),
        ({"uniform": torch.zeros(3)}, r"uniform must be \[2\]; given \[3\]"),
        ({"temperature": torch.tensor([1.0, -0.5])}, "temperature must be .*; given -0.5"),
        ({"temperature": torch.tensor([INF, 1.0])}, "temperature must be finite.*; given inf"),
        ({"top_k": torch.tensor([-1, 3])}, "top_k must be >= 0; given -1"),
        ({"top_k": torch.tensor([1.0, 3.0])}, "top_k must be whole numbers"),
        ({"top_p": torch.tensor([1.0, 0.0])}, "top_p must be above 0, up to 1; given 0.0"),
        ({"min_p": torch.tensor([1.5, 0.0])}, "min_p must be from 0 to 1; given 1.5"),
        ({"min_p": torch.tensor([math.nan, 0.0])}, "min_p must be from 0 to 1; given nan"),
        ({"repetition_penalty": torch.ones(2)}, "seen must be given with repetition_penalty"),
        ({"seen": torch.zeros(2, 3)}, "seen must be bool; given torch.float32"),
        ({"seen": torch.zeros(2, 4).bool()}, r"seen must be \[2, 3\]; given \[2, 4\]"),
    ],
)
def test_arguments_out_of_their_range_are_refused_by_name(sample, changes, message):
    case = {"logits": torch.zeros(2, 3), "uniform": torch.zeros(2), "temperature": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        sample(**case | changes)


def test_no_rows(sample):
    nothing = torch.zeros(0)
    filters = {name: nothing.to(type(value)) for name, value in OFF.items()}
    seen = torch.zeros(0, 7).bool()
    result = sample(torch.zeros(0, 7), nothing, nothing, **filters, seen=seen)
    assert [x.tolist() for x in result] == [[], [], []]
    assert [x.dtype for x in result] == [torch.int64, torch.float32, torch.float32]


def test_a_draw_on_the_line_goes_to_the_next_token(sample):
    # Sums of halves are exact: u = 1/4 is where token 0 ends.
    logits = torch.tensor([0.25, 0.25, 0.5]).log2() * math.log(2)
    case = same_rows(torch.zeros(4), 4)
    case["uniform"] = torch.tensor([0.0, 0.25, 0.5, 0.75]).double()
    assert sample(**case)[0].tolist() == [0, 1, 2, 3]
    plain, p = processed_row(logits.numpy(), 1.0)
    case = same_rows(logits, 3)
    for i, drawn in enumerate(zip(*(x.tolist() for x in sample(**case)), strict=True)):
        assert_row(drawn, case["uniform"][i].item(), plain, p, 1e-6)
