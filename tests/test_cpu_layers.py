"""The parts of a decoder layer in C++ by each instruction set, against formulas in float64.

What is rounded on its way is checked by an interval: the formula in float64, its roundings
included, with the last number before a rounding moved down and up by what float32 may be off.
"""

import math

import pytest
import torch
from torch import Tensor

from grpo_engine import _C
from grpo_engine.cpu_layers import gated, linear, rms_norm, rotate
from sample_cases import ISAS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]
ULP = 2**-23  # of float32
LEAST_LANES = 4  # of a register: a sum of n numbers has at most n / 4 additions one after another


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    """Every test by every instruction set of this CPU, torch.empty full of NaN."""
    _C.use_isa(request.param)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    _C.use_isa(_C.best_isa())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_threads(run) -> list[Tensor]:
    """What `run` gives on one thread, on two and on three."""
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(1)
    return results


def assert_within(out: Tensor, one: Tensor, other: Tensor, atol: float = 0) -> None:
    one, other = one.to(out.dtype).double(), other.to(out.dtype).double()
    low, high = torch.minimum(one, other) - atol, torch.maximum(one, other) + atol
    wrong = ~((out >= low) & (out <= high))
    assert not wrong.any(), (out[wrong][:4], low[wrong][:4], high[wrong][:4])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rounded once, after a float32 sum: of the bound's two parts the second is a whole proof."""
    out = linear(x, weight, bias)
    wanted = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, sizes = wanted + bias.double(), sizes + bias.double().abs()
    additions = weight.shape[1] / LEAST_LANES + 8  # those that join lanes, blocks and the bias
    error = additions * ULP / 2 * sizes
    assert out.dtype == x.dtype
    assert_within(out, wanted - error, wanted + error)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 65])
@pytest.mark.parametrize("width", [1, 7, 33, 1023, 1024, 1025, 2500])
def test_linear_at_the_edges_of_its_blocks(width, columns, dtype):
    x, weight = normal(5, width, dtype=dtype), normal(columns, width, dtype=dtype, seed=1)
    check_linear(x, weight, normal(columns, dtype=dtype, seed=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 511, 512, 513, 1030])
def test_linear_for_every_number_of_rows(rows, dtype):
    x, weight = normal(rows, 37, dtype=dtype), normal(45, 37, dtype=dtype, seed=1)
    out = check_linear(x, weight, None)
    assert torch.equal(linear(x, weight, torch.zeros(45, dtype=dtype)), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_views_and_of_no_rows(dtype):
    x, weight = normal(2, 5, 3, 12, dtype=dtype), normal(9, 12, dtype=dtype, seed=1)
    flat = check_linear(x.flatten(0, -2), weight, None)
    assert torch.equal(linear(x, weight), flat.view(2, 5, 3, 9))
    assert torch.equal(linear(x.transpose(0, 2), weight), flat.view(2, 5, 3, 9).transpose(0, 2))
    assert torch.equal(linear(x[:, 1], weight), flat.view(2, 5, 3, 9)[:, 1])
    assert linear(x[:0], weight).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_has_the_same_bits_alone_and_keeps_its_nan(dtype):
    x, weight = normal(530, 1100, dtype=dtype), normal(35, 1100, dtype=dtype, seed=1)
    bias = normal(35, dtype=dtype, seed=2)
    together = linear(x, weight, bias)
    for row in (0, 1, 2, 3, 4, 5, 511, 512, 513, 529):
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], together[row]), row
    x[3, 1050] = math.nan
    changed = linear(x, weight, bias)
    assert changed[3].isnan().all()
    others = torch.arange(530) != 3
    assert torch.equal(changed[others], together[others])
    assert by_threads(lambda: linear(x[others], weight, bias))[0].equal(together[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype):
    x, y = normal(70, 600, dtype=dtype), normal(70, 600, dtype=dtype, seed=1)
    weight = normal(130, 600, dtype=dtype, seed=2)

    def rotated() -> Tensor:
        turned = x.view(70, 10, 60).clone()
        rotate(turned, y[:, :60].contiguous(), y[:, 60:120].contiguous())
        return turned

    for run in (
        lambda: linear(x, weight),
        lambda: rms_norm(x, y[0], 1e-6, False),
        lambda: gated(x.clone(), y, False),
        rotated,
    ):
        first, *others = by_threads(run)
        assert all(torch.equal(other, first) for other in others)


def test_linear_refuses_what_does_not_fit():
    weight = normal(3, 8)
    with pytest.raises(ValueError, match=r"x must be torch.float32 of 8 columns; .* \[2, 7\]"):
        linear(normal(2, 7), weight)
    with pytest.raises(ValueError, match=r"x must be torch.float32 .*; given torch.bfloat16"):
        linear(normal(2, 8).bfloat16(), weight)


def normed(x: Tensor, epsilon: float, error: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + epsilon) ** -0.5 * (1 + error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("width", [1, 7, 33, 64, 1023, 2500])
def test_norms_round_where_their_models_do(width, gemma, dtype):
    x = torch.tensor([0.01, 1.0, 1.0, 30.0])[:, None] * normal(4, width)
    x[2] = 0
    x, weight = x.to(dtype), normal(width, dtype=dtype, seed=1)
    error = (width / LEAST_LANES + 8) / 2 * ULP  # the root halves that of the sum

    def formula(error: float) -> Tensor:
        value = normed(x, 1e-5, error)
        return value * (1 + weight.double()) if gemma else rounded(value, dtype) * weight.double()

    # Then a rounding of 1 + weight, and in float32 of the product.
    rest = 2 * ULP if gemma or dtype == torch.float32 else 0
    out = rms_norm(x, weight, 1e-5, gemma)
    assert_within(out, formula(-error - rest), formula(error + rest))
    assert (out[2] == 0).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_where_a_norm_rounds_is_seen(dtype):
    # Else the intervals above might hold for any order of roundings.
    x, weight = normal(50, 64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    value = normed(x, 1e-5, 0)
    given = rms_norm(x, weight, 1e-5, False)
    twice = (rounded(value, dtype) * weight.double()).to(dtype)
    once = (value * weight.double()).to(dtype)
    assert (given == twice).float().mean() > 0.995
    assert (given == once).float().mean() < 0.9
    given = rms_norm(x, weight, 1e-5, True)
    assert (given == (value * (1 + weight.double())).to(dtype)).float().mean() > 0.995
    twice = (rounded(value, dtype) * rounded(1 + weight.double(), dtype)).to(dtype)
    assert (given == twice).float().mean() < 0.9


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.5])
def test_epsilon_is_added_to_the_mean_square(epsilon):
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0, 0.0]])
    out = rms_norm(x, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), epsilon, False)
    root = math.sqrt(5.0 + epsilon)
    assert out[0].tolist() == pytest.approx([3 / root, 8 / root, 0, 0, 0], rel=4 * ULP)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_norm_has_the_same_bits_alone_and_keeps_its_nan(dtype):
    x, weight = normal(40, 900, dtype=dtype), normal(900, dtype=dtype, seed=1)
    together = rms_norm(x.view(5, 8, 900), weight, 1e-6, False).view(40, 900)
    for row in range(0, 40, 13):
        assert torch.equal(rms_norm(x[row], weight, 1e-6, False), together[row])
    assert torch.equal(rms_norm(x[::3], weight, 1e-6, False), together[::3])
    x[7, 899] = math.nan
    changed = rms_norm(x, weight, 1e-6, False)
    assert changed[7].isnan().all()
    others = torch.arange(40) != 7
    assert torch.equal(changed[others], together[others])


def activated(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """SiLU or GELU's tanh form in float64, and by how much float32 may be off."""
    x = x.double()
    if not gelu:
        y = x / (1 + (-x).exp())
        return y, 6 * ULP * y.abs()
    y = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    # 1 + tanh cancels: what is left of it is off by what its summands are off.
    return y, 6 * ULP * y.abs() + 2 * ULP * x.abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("count", [1, 7, 33, 4096, 4097, 40_000])
def test_gates_are_rounded_before_the_product_and_written_over(count, gelu, dtype):
    gate, up = 3 * normal(count, dtype=dtype), normal(count, dtype=dtype, seed=1)
    y, error = activated(gate, gelu)
    kept, address = up.clone(), gate.data_ptr()
    out = gated(gate, up, gelu)
    assert out.data_ptr() == address == gate.data_ptr()
    assert torch.equal(up, kept)
    rest = ULP * y.abs() if dtype == torch.float32 else 0
    products = (rounded(y + e, dtype) * up.double() for e in (-error - rest, error + rest))
    assert_within(out, *products)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("gelu", [False, True])
def test_where_a_gate_is_rounded_is_seen(gelu, dtype):
    # Above 0, where no cancellation makes float32 coarse.
    gate, up = 3 * normal(5000, dtype=dtype).abs(), normal(5000, dtype=dtype, seed=1)
    y, _ = activated(gate, gelu)
    out = gated(gate, up, gelu)
    assert (out == (rounded(y, dtype) * up.double()).to(dtype)).float().mean() > 0.99
    assert (out == (y * up.double()).to(dtype)).float().mean() < 0.9


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_far_from_zero_and_nan(gelu):
    gate = torch.tensor([0.0, -0.0, 20.0, 90.0, 3e4, -20.0, -90.0, -3e4, math.nan, 1.0])
    out = gated(gate, torch.full((10,), 2.0), gelu)
    # Below -88 the exponential stays where it is, so what should vanish is some 1e-34 at most.
    silu_of_minus_20 = -20 / (1 + math.exp(20))
    small = [0.0, 0, 0] if gelu else [2 * silu_of_minus_20, 0, 0]
    gelu_of_1 = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    last = gelu_of_1 if gelu else 1 / (1 + math.exp(-1))
    assert out[8].isnan()
    wanted = [0, 0, 40, 180, 6e4, *small]
    assert out[:8].tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-33)
    assert out[9].item() == pytest.approx(2 * last, rel=1e-6)


def test_a_product_of_float16_beyond_its_range_is_infinite():
    out = gated(torch.full((3,), 300.0).half(), torch.tensor([300.0, -300.0, 1.0]).half(), False)
    assert out.tolist() == [math.inf, -math.inf, 300.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [2, 4, 16, 20, 64, 80, 96, 256])
def test_each_product_of_a_rotation_is_rounded(dim, heads, dtype):
    # The halves of cos and sin differ, as they do in no model: which one is read is seen.
    x, half = normal(6, heads, dim, dtype=dtype), dim // 2
    cos, sin = (normal(6, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    wide, c, s = x.double(), cos.double()[:, None], sin.double()[:, None]
    across = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    wanted = rounded(wide * c, dtype) + rounded(across * s, dtype)
    kept = cos.clone(), sin.clone()
    assert rotate(x, cos, sin) is None
    if dtype == torch.float32:  # its products may be joined by one rounding
        assert ((x - wanted).abs() <= ULP * ((wide * c).abs() + (across * s).abs())).all()
    else:
        assert torch.equal(x, wanted.to(dtype))
        once = (wide * c + across * s).to(dtype)
        assert (x == once).float().mean() < 0.9 or dim < 16
    assert torch.equal(cos, kept[0]) and torch.equal(sin, kept[1])


def test_a_quarter_turn_swaps_the_halves_of_each_head():
    x = torch.arange(12.0).view(1, 2, 6)
    rotate(x, torch.zeros(1, 6), torch.ones(1, 6))
    assert x.tolist() == [[[-3, -4, -5, 0, 1, 2], [-9, -10, -11, 6, 7, 8]]]
