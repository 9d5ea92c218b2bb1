"""The row kernels under Triton's interpreter, against autograd of a log-softmax in float64."""

import math

import pytest
import torch

from head_tiles import (
    BLOCK,
    LENSES,
    ROUNDING,
    ROWS,
    SMALLEST,
    close,
    expected,
    make_lens,
    make_raw,
    make_targets,
    make_tile,
    softmax,
)

# numpy, of which the interpreter is made, speaks up also where a value is not selected.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def check_softmax(raw, targets, lens, dtype=torch.float32, atol=4e-6):
    """All outputs, with the target's column apart."""
    logp, entropy, lse, slopes = expected(raw, targets, lens)
    stats, weights = softmax(raw, targets, lens, dtype=dtype)
    close(stats.logp, logp, 2e-6, atol)
    close(stats.entropy, entropy, 2e-6, atol)
    close(stats.lse, lse, 1e-6, atol)
    at = targets[:, None]
    close(stats.target_weight, slopes.gather(1, at).squeeze(1), 1e-5, 1e-30)
    assert weights.dtype == dtype
    assert (weights.gather(1, at) == 0).all()
    rtol = ROUNDING[dtype] + 4 * atol  # the error of z is one of e^z
    close(weights, (-slopes).scatter(1, at, 0.0), rtol, SMALLEST[dtype])


@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize("columns", [1, 7, 1000])
def test_statistics_and_weights(name, columns):
    check_softmax(make_raw(columns), make_targets(columns), make_lens(columns, **LENSES[name]))


@pytest.mark.parametrize("columns", [BLOCK - 1, BLOCK, BLOCK + 1, 32003, 151936])
def test_a_row_of_many_blocks_with_and_without_a_tail(columns):
    lens = make_lens(columns, 2, **LENSES["all"])
    check_softmax(make_raw(columns, 2), make_targets(columns, 2), lens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 7, 1000, 2 * BLOCK + 3])
def test_half_weights_lie_over_the_logits_they_came_from(columns, dtype):
    # Written a block too far, they would be read as logits by the next block.
    check_softmax(make_raw(columns), make_targets(columns), make_lens(columns), dtype)
    tile, _ = make_tile(make_raw(columns))
    head = torch.empty(columns, 1, dtype=dtype)
    lens = make_lens(columns)
    _, weights = ROWS.softmax(tile, head, head, make_targets(columns), lens, True)
    assert weights.data_ptr() == tile.data_ptr()
    assert weights.stride() == (2 * tile.stride(0), 1)


def test_float32_weights_are_the_tile():
    tile, _ = make_tile(make_raw(7))
    head = torch.empty(7, 1)
    _, weights = ROWS.softmax(tile, head, head, make_targets(7), make_lens(7), True)
    assert weights is tile


def test_without_gradient_the_tile_stays_and_the_numbers_are_the_same():
    raw, targets, lens = make_raw(1003), make_targets(1003), make_lens(1003, **LENSES["all"])
    tile, _ = make_tile(raw)
    head = torch.empty(1003, 1)
    stats, weights = ROWS.softmax(tile, head, head, targets, lens, gradient=False)
    assert weights is None
    assert stats.target_weight is None
    assert torch.equal(tile, raw)
    with_gradient, _ = softmax(raw, targets, lens)
    assert all(torch.equal(a, b) for a, b in zip(stats[:3], with_gradient[:3], strict=True))


@pytest.mark.parametrize("shift", [-1000.0, 1000.0, -1e30])
def test_logits_of_one_sign_and_any_size(shift):
    raw = make_raw(BLOCK + 5) + shift
    check_softmax(raw, make_targets(BLOCK + 5), make_lens(BLOCK + 5))


@pytest.mark.parametrize("column", [0, 3, BLOCK + 4])
def test_one_huge_logit(column):
    raw = make_raw(BLOCK + 5)
    raw[:, column] = 1e30
    targets = torch.tensor([column, 1, 2, BLOCK])
    stats, weights = softmax(raw, targets, make_lens(BLOCK + 5))
    assert stats.logp.tolist() == [0.0] + [pytest.approx(-1e30)] * 3
    assert stats.entropy.tolist() == [0.0] * 4
    assert stats.target_weight.tolist() == [0.0, 1.0, 1.0, 1.0]
    hit = torch.zeros_like(raw)
    hit[1:, column] = 1.0
    assert torch.equal(weights, hit)


@pytest.mark.parametrize("name", ["plain", "bias", "temperature", "softcap"])
def test_columns_of_minus_infinity_have_no_part(name):
    raw = make_raw(1001)
    raw[:, ::2] = -math.inf  # the last column and whole quads of rows 2 and 3 among them
    raw[2:, 400:900] = -math.inf
    check_softmax(raw, torch.tensor([1, 999, 399, 901]), make_lens(1001, **LENSES[name]))


def test_a_target_of_minus_infinity():
    raw = make_raw(7, 1)
    raw[0, 2] = -math.inf
    stats, weights = softmax(raw, torch.tensor([2]), make_lens(7, 1))
    _, entropy, lse, _ = expected(raw, torch.tensor([0]), make_lens(7, 1))
    assert stats.logp.item() == -math.inf
    assert stats.target_weight.item() == 1.0
    close(stats.entropy, entropy, 2e-6)
    close(stats.lse, lse, 1e-6)
    close(weights, raw.double().softmax(-1), 2e-6)


def test_only_the_target_is_finite():
    raw = torch.full((1, 9), -math.inf)
    raw[0, 4] = -3.0
    stats, weights = softmax(raw, torch.tensor([4]), make_lens(9, 1))
    assert [x.item() for x in stats] == [0.0, 0.0, -3.0, 0.0]
    assert (weights == 0).all()


def test_a_nan_stays_in_its_row_and_is_not_lost():
    raw = make_raw(BLOCK + 5)
    raw[1, BLOCK + 2] = math.nan
    raw[2, 1] = math.inf
    targets = make_targets(BLOCK + 5)
    stats, _ = softmax(raw, targets, make_lens(BLOCK + 5))
    for x in stats:
        assert x.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize("target", [-1, -100, 7, 1 << 40])
def test_a_target_that_is_no_column_gives_nan(target):
    tile, head = make_raw(12)[:, :7], torch.empty(7, 1)  # what lies around the rows is finite
    targets = torch.tensor([2, target, 3, 4])
    stats, _ = ROWS.softmax(tile, head, head, targets, make_lens(7, bias=True), gradient=True)
    for x in (stats.logp, stats.target_weight):
        assert x.isnan().tolist() == [False, True, False, False]


def test_a_softcap_far_above_the_logits_costs_no_digits():
    raw, targets, lens = make_raw(7, std=0.1), make_targets(7), make_lens(7, softcap=50.0)
    stats, _ = softmax(raw, targets, lens)
    close(stats.logp, expected(raw, targets, lens)[0], 0.0, 4e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 8, 1001])
def test_logits_and_products_are_float32_for_any_number_of_columns(columns, dtype):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, 16, generator=generator).to(dtype)
    weight = torch.randn(columns, 16, generator=generator).to(dtype)
    tile = ROWS.logits(hidden, weight)
    close(tile, hidden.double() @ weight.double().T, 1e-5, 1e-5)  # bfloat16 logits: off by 0.03
    assert (tile.dtype, tile.shape) == (torch.float32, (4, columns))
    targets, lens = make_targets(columns), make_lens(columns)
    logp, _, _, slopes = expected(tile, targets, lens)
    stats, weights = ROWS.softmax(tile, hidden, weight, targets, lens, gradient=True)
    close(stats.logp, logp, 2e-6, 2e-6)
    folded = torch.ones(4, 16)
    ROWS.add_product(folded, weights, weight)
    wanted = 1 + (-slopes).scatter(1, targets[:, None], 0.0) @ weight.double()
    close(folded, wanted, 0.0, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    "tile",
    [
        torch.zeros(3, 7),
        torch.zeros(3, 16)[:, 1:9],
        torch.zeros(8, 4).T,
        torch.zeros(2, 8, dtype=torch.float64),
        torch.zeros(1, 8).expand(3, 8),
    ],
    ids=["odd rows", "odd start", "columns first", "float64", "one row thrice"],
)
def test_a_tile_that_no_16_byte_load_can_read_is_refused(tile):
    rows, columns = tile.shape
    head = torch.empty(columns, 1)
    with pytest.raises(ValueError, match="16-byte"):
        ROWS.softmax(tile, head, head, torch.zeros(rows).long(), make_lens(columns, rows), True)


def test_no_rows():
    head = torch.empty(8, 1)
    none = torch.empty(0, dtype=torch.long)
    stats, weights = ROWS.softmax(torch.empty(0, 8), head, head, none, make_lens(8, 0), True)
    assert stats.logp.shape == (0,)
    assert weights.shape == (0, 8)
