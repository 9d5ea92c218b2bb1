"""Tiles of raw logits for the tests of the row kernels, and what is expected of them."""

import math

import torch

from grpo_engine.kernels.head_rows import LANES, QUAD, TritonRows
from grpo_engine.kernels.logit_map import LogitMap

BLOCK = LANES * QUAD.value
ROWS = TritonRows()
# Not all of the halves' rounding is the kernel's: the interpreter's bfloat16 rounds towards zero.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 1e-38, torch.float16: 2**-24}
LENSES = {
    "plain": {},
    "temperature": {"temperature": [0.3, 0.6, 1.3, 7.0]},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.125},
    "all": {
        "temperature": [0.3, 0.6, 1.3, 7.0], "bias": True, "softcap": 5.0, "logit_scale": 1.7,
    },
}  # fmt: skip


def make_raw(columns, rows=4, std=3.0, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * std


def make_lens(columns, rows=4, temperature=1.0, bias=False, softcap=None, logit_scale=1.0):
    generator = torch.Generator().manual_seed(1)
    return LogitMap(
        torch.randn(columns, generator=generator) if bias else None,
        (1 / torch.tensor(temperature).expand(4)[:rows]).contiguous(),
        softcap,
        logit_scale,
    )


def make_targets(columns, rows=4):
    """The first column, the last, and some between."""
    return torch.tensor([0, columns - 1, columns // 2, min(columns - 1, BLOCK)])[:rows]


def make_tile(raw):
    """The tile and its memory: NaN in the padding of a row and in a row behind the last."""
    rows, columns = raw.shape
    memory = torch.full((rows + 1, columns + 8 - columns % 4), math.nan)
    memory[:rows, :columns] = raw
    return memory[:rows, :columns], memory


def expected(raw, targets, lens):
    """In float64: logp, entropy, lse [C], and d logp / d raw [C, V]."""
    raw = raw.double().requires_grad_()
    z = raw if lens.bias is None else raw + lens.bias.double()
    z = z * lens.logit_scale
    z = z if lens.softcap is None else lens.softcap * torch.tanh(z / lens.softcap)
    z = z * lens.inv_temperature.double()[:, None]
    log_p = z.log_softmax(-1)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    (slopes,) = torch.autograd.grad(logp.sum(), raw)
    entropy = torch.special.entr(log_p.detach().exp()).sum(-1)
    return logp.detach(), entropy, z.detach().logsumexp(-1), slopes


def softmax(raw, targets, lens, gradient=True, dtype=torch.float32):
    """TritonRows.softmax over a poisoned tile; what lies past the rows must not change."""
    tile, memory = make_tile(raw)
    head = torch.empty(raw.shape[1], 1, dtype=dtype)
    result = ROWS.softmax(tile, head, head, targets, lens, gradient)
    assert memory[-1].isnan().all()
    assert memory[:, -4:].isnan().all()
    return result


def gradient(tile, first, targets, stats, upstream, lens, dtype=torch.float32):
    """TritonRows.gradient; `stats` of the whole rows."""
    head = torch.empty(tile.shape[1], 1, dtype=dtype)
    return ROWS.gradient(tile, first, targets, stats.lse, stats.logp, upstream, head, head, lens)


def close(got, want, rtol, atol=0.0):
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)
