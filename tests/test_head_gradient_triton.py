"""Gradients of the row kernels, and targets of probability almost one, under the interpreter."""

import math

import pytest
import torch

from grpo_engine.kernels.logit_map import LogitMap
from head_tiles import (
    BLOCK,
    LENSES,
    ROUNDING,
    SMALLEST,
    close,
    expected,
    gradient,
    make_lens,
    make_raw,
    make_targets,
    make_tile,
    softmax,
)

# numpy, of which the interpreter is made, speaks up also where a value is not selected.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("width", [7, 64, 100])
def test_gradients_of_column_blocks_make_up_the_whole(width, name, dtype):
    columns, upstream = 100, torch.tensor([1.0, -2.5, 0.0, 0.01])
    raw, targets = make_raw(columns), make_targets(columns)
    lens = make_lens(columns, **LENSES[name])
    stats, _ = softmax(raw, targets, lens, gradient=False)
    blocks = []
    for first in range(0, columns, width):
        part = slice(first, first + width)
        tile, memory = make_tile(raw[:, part])
        bias = None if lens.bias is None else lens.bias[part]
        part_lens = LogitMap(bias, lens.inv_temperature, lens.softcap, lens.logit_scale)
        blocks.append(gradient(tile, first, targets, stats, upstream, part_lens, dtype))
        assert blocks[-1].data_ptr() == tile.data_ptr()
        assert blocks[-1].dtype == dtype
        assert memory[-1].isnan().all()
        assert memory[:, -4:].isnan().all()
    slopes = expected(raw, targets, lens)[3]
    rtol = ROUNDING[dtype] + 2e-5
    close(torch.cat(blocks, 1), upstream[:, None] * slopes, rtol, SMALLEST[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradient_of_a_row_of_several_blocks(dtype):
    columns = 2 * BLOCK + 3
    raw, targets = make_raw(columns, 2), make_targets(columns, 2)
    lens, upstream = make_lens(columns, 2), torch.tensor([3.0, -1.0])
    stats, _ = softmax(raw, targets, lens, gradient=False)
    made = gradient(make_tile(raw)[0], 0, targets, stats, upstream, lens, dtype)
    wanted = upstream[:, None] * expected(raw, targets, lens)[3]
    close(made, wanted, ROUNDING[dtype] + 2e-5, SMALLEST[dtype] * 3)


def test_gradient_where_columns_are_minus_infinity():
    raw, targets, lens = make_raw(1001), torch.tensor([1, 999, 399, 901]), make_lens(1001)
    raw[:, ::2] = -math.inf
    stats, _ = softmax(raw, targets, lens, gradient=False)
    made = gradient(make_tile(raw)[0], 0, targets, stats, torch.ones(4), lens)
    assert (made[:, ::2] == 0).all()
    close(made, expected(raw, targets, lens)[3], 2e-5)


def test_gradient_at_a_target_of_probability_zero_is_the_whole_upstream():
    raw, targets = make_raw(9), torch.tensor([4, 4, 4, 4])
    raw[:, 4] = torch.tensor([-80.0, -200.0, -1e30, -math.inf])
    stats, _ = softmax(raw, targets, make_lens(9), gradient=False)
    made = gradient(make_tile(raw)[0], 0, targets, stats, torch.full((4,), 0.7), make_lens(9))
    assert made[:, 4].tolist() == [pytest.approx(0.7)] * 4


def test_vectors_may_have_any_stride():
    # The upstream gradient of a sum is one number, expanded.
    raw, targets, lens = make_raw(50), make_targets(50), make_lens(50, bias=True)
    stats, _ = softmax(raw, targets, lens)
    spaced = [torch.stack([x, x + 1], 1)[:, 0] for x in (targets, lens.bias, lens.inv_temperature)]
    spaced_lens = LogitMap(*spaced[1:], None, 1.0)
    again, _ = softmax(raw, spaced[0], spaced_lens)
    assert all(torch.equal(a, b) for a, b in zip(stats, again, strict=True))
    upstream = torch.tensor(2.0).expand(4)
    made = gradient(make_tile(raw)[0], 0, spaced[0], stats, upstream, spaced_lens)
    close(made, 2 * expected(raw, targets, lens)[3], 2e-5)


@pytest.mark.parametrize("nines", [2, 6, 9, 15])
def test_a_target_of_probability_almost_one(nines):
    raw, targets = make_raw(1000, std=1.0), make_targets(1000)
    at = targets[:, None]
    rest = raw.scatter(1, at, -math.inf).logsumexp(1, keepdim=True)
    raw.scatter_(1, at, rest + nines * math.log(10))
    lens = make_lens(1000, temperature=[1.0, 1.0, 0.9, 1.1])
    logp, entropy, weight = near_one(raw, at, lens)
    assert weight[0].item() == pytest.approx(10.0**-nines, rel=0.01)
    stats, _ = softmax(raw, targets, lens)
    # Right in its own digits, up to the rounding of z_y: an ulp at |z| >= 16 is 2e-6.
    close(stats.logp, logp, 5e-6)
    close(stats.entropy, entropy, 5e-6)
    close(stats.target_weight, weight, 5e-6)
    made = gradient(make_tile(raw)[0], 0, targets, stats, torch.ones(4), lens)
    close(made.gather(1, at).squeeze(1), weight, 5e-6)


def near_one(raw, at, lens):
    """logp, entropy, slope_y (1 - p_y) from the odds: a log-softmax in float64 has no digits."""
    z = raw.double() * lens.inv_temperature.double()[:, None]
    others = z.scatter(1, at, -math.inf)
    odds = (z.gather(1, at).squeeze(1) - others.logsumexp(1)).exp()
    logp, q = -torch.log1p(1 / odds), 1 / (1 + odds)
    inner = torch.special.entr(others.softmax(1)).sum(1)
    entropy = -(1 - q) * logp - q * q.log() + q * inner
    return logp, entropy, q * lens.inv_temperature.double()
