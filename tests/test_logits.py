"""The logits that tokens are drawn from, against their formula in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine import _C
from grpo_engine.forward import Head
from grpo_engine.logits import LogitHead

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def cpu_without_bfloat16_units(monkeypatch):
    monkeypatch.setattr(_C, "has_bfloat16_units", lambda: False)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_head(
    dtype: torch.dtype, vocab: int = 75, width: int = 90, bias: bool = False, **extra: float
) -> Head:
    weight = normal(vocab, width, dtype=dtype, seed=1)
    shift = 3 * normal(vocab, dtype=dtype, seed=2) if bias else None
    return Head(weight, shift, extra.get("softcap"), extra.get("logit_scale", 1.0))


def check_logits(head: Head, hidden: Tensor) -> Tensor:
    """Within what one float32 sum may be off: no product, sum or bias was rounded to half."""
    logits = LogitHead(head)(hidden)
    x, w = hidden.double(), head.weight.double()
    wanted, sizes = x @ w.T, x.abs() @ w.abs().T
    if head.bias is not None:
        wanted, sizes = wanted + head.bias.double(), sizes + head.bias.double().abs()
    wanted, sizes = head.logit_scale * wanted, head.logit_scale * sizes
    if head.softcap is not None:
        wanted = head.softcap * torch.tanh(wanted / head.softcap)
    error = (w.shape[1] / 4 + 12) * 2**-24 * sizes  # 4: the least numbers that are added at once
    assert logits.dtype == torch.float32
    assert logits.shape == wanted.shape
    assert ((logits - wanted).abs() <= error).all()
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 6.0}, {"logit_scale": 0.25}, {"softcap": 30.0, "logit_scale": 2.0}]
)
def test_scale_softcap_and_bias(extra, bias, dtype):
    head = make_head(dtype, bias=bias, **extra)
    plain = LogitHead(make_head(dtype))(normal(5, 90, dtype=dtype, seed=0))
    logits = check_logits(head, normal(5, 90, dtype=dtype, seed=0))
    assert ((logits - plain).abs().max() > 1) == bool(bias or extra)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 1, 1), (7, 33, 1025), (70, 301, 64)])
def test_sizes(rows, vocab, width, dtype):
    check_logits(make_head(dtype, vocab, width), normal(rows, width, dtype=dtype, seed=0))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_hidden_states_of_float32_are_not_rounded_to_the_dtype_of_the_head(dtype):
    check_logits(make_head(dtype), normal(5, 90, dtype=torch.float32, seed=0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone(dtype):
    head, hidden = LogitHead(make_head(dtype)), normal(9, 90, dtype=dtype, seed=0)
    together = head(hidden)
    for row in range(9):
        assert torch.equal(head(hidden[row : row + 1])[0], together[row])


def test_bfloat16_units_multiply_what_came_from_bfloat16_and_nothing_else(monkeypatch):
    monkeypatch.setattr(_C, "has_bfloat16_units", lambda: True)
    matmul, seen = torch.backends.mkldnn.matmul, []
    before = matmul.fp32_precision

    def linear(*args):
        seen.append(matmul.fp32_precision)
        return stock(*args)

    stock = functional.linear
    monkeypatch.setattr(functional, "linear", linear)
    for dtype in DTYPES:
        check_logits(make_head(dtype, bias=True), normal(5, 90, dtype=dtype, seed=0))
    assert seen == ["bf16"]
    assert matmul.fp32_precision == before


def test_the_precision_of_matmul_is_put_back_after_an_error(monkeypatch):
    monkeypatch.setattr(_C, "has_bfloat16_units", lambda: True)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with pytest.raises(RuntimeError, match="shapes"):
        LogitHead(make_head(torch.bfloat16))(normal(5, 91, dtype=torch.bfloat16, seed=0))
    assert matmul.fp32_precision == before
