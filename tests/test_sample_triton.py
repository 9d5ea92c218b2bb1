"""The Triton sampler, interpreted: few rows and small tiles, for a round of a search takes long."""

import math

import pytest
import torch

from grpo_engine import cpu_sampling
from grpo_engine.decode_ops import sample_tokens
from grpo_engine.kernels import sampling
from sample_cases import OFF, assert_rows, mixed_rows, processed_row

INF = math.inf
BELOW_ONE = 1 - 2**-53
FOUR = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Two rows of 16 lanes: a row of logits takes several."""
    monkeypatch.setattr(sampling, "LANES", 16)
    monkeypatch.setattr(sampling, "TALL", 2)


def sample(**case):
    return sample_tokens(**case, impl="triton")


def table(logits, *rows):
    """Arguments for one row of logits, drawn with (uniform, temperature, filters) each."""
    uniform, temperature, filters = zip(*rows, strict=True)
    return {
        "logits": logits.repeat(len(rows), 1),
        "uniform": torch.tensor(uniform, dtype=torch.float64),
        "temperature": torch.tensor(temperature),
        **{name: torch.tensor([f.get(name, OFF[name]) for f in filters]) for name in list(OFF)[:3]},
    }


def test_rows_with_filters_of_their_own():
    case = mixed_rows(8, 75)
    assert_rows(sample(**case), **case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype):
    case = mixed_rows(3, 40, seed=1)
    case["logits"] = case["logits"].to(dtype)
    assert_rows(sample(**case), **case)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_rows_of_every_length(vocab):
    case = mixed_rows(5, vocab, seed=vocab)
    case = {name: case[name] for name in ("logits", "uniform", "temperature")}
    case["uniform"][:2] = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)
    case["temperature"][:2] = 1.0
    assert_rows(sample(**case), **case)


def test_the_tile_of_the_gpu(monkeypatch):
    monkeypatch.undo()
    case = mixed_rows(2, sampling.LANES * sampling.TALL + 900, seed=3)
    case = {name: case[name] for name in ("logits", "uniform", "temperature", "top_p")}
    case["temperature"][:], case["top_p"][:] = 0.9, torch.tensor([0.5, 0.97])
    assert_rows(sample(**case), **case)


def test_filters_keep_the_likeliest_and_renormalise():
    kept = [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 9}, 4),
        ({"top_p": 0.35}, 1),
        ({"top_p": 0.75}, 3),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 0.6}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.55}, 1),
        ({"min_p": 0.6, "top_p": 0.6}, 2),
        ({"top_k": 3, "min_p": 0.6}, 2),
    ]
    case = table(FOUR, *((BELOW_ONE, 1.0, filters) for filters, _ in kept))
    tokens, _, processed = sample(**case)
    last = {1: 1, 2: 3, 3: 3, 4: 3}  # best first: tokens 1, 3, 0, 2
    mass = {1: 0.4, 2: 0.7, 3: 0.9, 4: 1.0}
    assert tokens.tolist() == [last[n] for _, n in kept]
    expected = [FOUR[last[n]].item() - math.log(mass[n]) for _, n in kept]
    assert processed.tolist() == pytest.approx(expected, abs=1e-6)


def test_of_equal_logits_the_lowest_ids_stay():
    filters = [
        {"top_k": 20},
        {"top_k": 36},
        {"top_k": 17},
        {"top_p": 0.65},
        {"top_k": 30, "top_p": 0.97},
        {"min_p": 1.0},
        {"min_p": 1.0, "top_k": 3},
    ]
    logits = torch.arange(70.0) % 4
    case = table(logits, *((BELOW_ONE, 1.0, f) for f in filters))
    tokens, _, _ = result = sample(**case)
    assert_rows(result, **case)
    for token, own in zip(tokens.tolist(), filters, strict=True):
        _, p = processed_row(logits.numpy(), 1.0, **own)
        assert token == p.nonzero()[0][-1]


def test_minus_infinity_is_never_drawn():
    logits = torch.tensor([-INF] * 40 + [1.0, -INF, 2.0] + [-INF] * 33)
    ends = [(u, t, {}) for u in (0.0, 0.26, 0.28, BELOW_ONE) for t in (0.0, 1.0, 1e-3, 1e3)]
    case = table(logits, *ends, (0.0, 1.0, {"top_k": 50}), (BELOW_ONE, 1.0, {"top_p": 0.99}))
    case["temperature"][-2:] = 1.0
    assert_rows(sample(**case), **case)


def test_the_penalty_comes_first():
    logits = torch.tensor([3.0, 2.9, 0.5, -1.0, -1.1, -4.0])
    seen = torch.tensor([[True, False, True, True, False, False]] * 9)
    case = table(logits, *(((i + 0.5) / 9, 0.8 * (i % 3), {}) for i in range(9)))
    case["repetition_penalty"] = torch.tensor([0.5, 1.0, 1.3, 4.0, 1.7, 0.9, 2.0, 3.0, 0.1])
    case = {name: x for name, x in case.items() if not name.startswith(("top", "min"))}
    assert_rows(sample(**case, seen=seen), **case, seen=seen)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, INF, None])
def test_a_row_that_is_no_distribution_has_no_token_and_spoils_no_other(bad):
    case = mixed_rows(4, 50)
    case = {name: case[name] for name in ("logits", "uniform", "temperature")}
    case["temperature"][:] = torch.tensor([1.0, 1.0, 0.0, 0.7])
    want = [x.tolist() for x in sample(**case)]
    for row in (1, 2):
        case["logits"][row, 37 if bad else slice(None)] = bad or -INF
    tokens, plain, processed = (x.tolist() for x in sample(**case))
    assert tokens == [want[0][0], -1, -1, want[0][3]]
    for got, expected in ((plain, want[1]), (processed, want[2])):
        assert got[::3] == expected[::3]
        assert math.isnan(got[1]) and math.isnan(got[2])


def test_logits_that_lie_apart_are_read_where_they_are():
    case = mixed_rows(4, 50)
    case = {name: case[name] for name in ("logits", "uniform", "temperature", "seen")}
    case["repetition_penalty"] = torch.full((4,), 1.4)
    want = [x.tolist() for x in sample(**case)]
    wide, tall = torch.full((4, 64), 9.0), torch.full((50, 4), 9.0).T
    for logits in (wide[:, :50], tall):
        got = sample(**case | {"logits": logits.copy_(case["logits"]), "seen": case["seen"]})
        assert [x.tolist() for x in got] == want


def test_each_implementation_is_reached_by_its_name(monkeypatch):
    def reached(name):
        def stop(*_):
            raise LookupError(name)

        return stop

    monkeypatch.setattr(sampling, "sample_tokens", reached("triton"))
    monkeypatch.setattr(cpu_sampling, "sample_tokens", reached("cpp"))
    one = torch.zeros(1)
    for impl, name in (("auto", "cpp"), ("cpp", "cpp"), ("triton", "triton")):
        with pytest.raises(LookupError, match=name):
            sample_tokens(torch.zeros(1, 3), one, one, impl=impl)
    with pytest.raises(ValueError, match=r"float64.*'torch'.*'triton'"):
        sample_tokens(torch.zeros(1, 3).double(), one, one, impl="triton")
    assert sample_tokens(torch.zeros(1, 3).double(), one, one)[1].item() == pytest.approx(
        -math.log(3), abs=1e-15
    )
