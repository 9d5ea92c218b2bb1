"""Attention of packed groups against autograd through its definition."""

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grouped_cases import MANY, PACKINGS, TOLERANCE, assert_near, found, inputs, wanted
from grpo_engine.kernels import masked_attention
from grpo_engine.kernels.group_layout import GroupLayout
from grpo_engine.kernels.grouped_attention import grouped_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing(packing, dtype):
    case = packing, *inputs(packing, dtype=dtype), 0.4
    assert_near(found(*case), wanted(*case), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "shared", "d"), [(4, 1, 8), (3, 3, 64), (8, 4, 80), (1, 1, 16)])
def test_every_head(heads, shared, d, dtype):
    case = MANY, *inputs(MANY, heads, shared, d, dtype), d**-0.5
    assert_near(found(*case), wanted(*case), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5},
        {"window": 1},
        {"window": 4},
        {"window": 37, "softcap": 2.0},
    ],
    ids=str,
)
def test_softcap_and_windows(packing, options, dtype, monkeypatch):
    monkeypatch.setattr(masked_attention, "BLOCK_ROWS", 32)
    case = packing, *inputs(packing, dtype=dtype), 0.7
    assert_near(found(*case, **options), wanted(*case, **options), TOLERANCE[dtype])


# P = 20, R = 12: from 2 that bites among own tokens to 31 that bites for the last one only.
@pytest.mark.parametrize("window", [1, 2, 11, 12, 13, 20, 31, 32, 33])
@pytest.mark.parametrize("rows", [1, 5, 256])
def test_each_reach_of_a_window(window, rows, monkeypatch):
    monkeypatch.setattr(masked_attention, "BLOCK_ROWS", rows)
    monkeypatch.setitem(PACKINGS, "windowed", ([20, 3], [[12, 1, 5], [12, 2]]))
    case = "windowed", *inputs("windowed"), 0.7
    assert_near(found(*case, window=window), wanted(*case, window=window), 1e-12)


def test_a_window_as_long_as_every_sequence_takes_the_flash_route(monkeypatch):
    monkeypatch.setattr(masked_attention, "MaskedFn", None)
    q, k, v, _ = inputs("one group")
    layout = GroupLayout.make(*PACKINGS["one group"])
    same = [grouped_attention(q, k, v, layout, 0.3, window=w) for w in (None, 12, 13)]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    bitten = grouped_attention(q, k, v, layout, 0.3, window=11)
    assert not torch.allclose(same[0][-1], bitten[-1])


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "d first", "shared"])
def test_strided_inputs(layout, options):
    q, k, v, upstream = (x.detach() for x in inputs(MANY))
    if layout == "heads first":  # a transpose of [1, H, N, d]
        views = [x.transpose(0, 1).contiguous()[None].transpose(1, 2)[0] for x in (q, k, v)]
        upstream = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "d first":
        views = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (q, k, v)]
        upstream = upstream[:1, :1].expand_as(upstream)
    else:  # slices of one projection
        views = torch.cat([q, k, v], 1).split([4, 2, 2], 1)
    case = MANY, *(x.requires_grad_() for x in views), upstream, 0.4
    assert_near(found(*case, **options), wanted(*case, **options), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}], ids=str)
def test_half_precision(options, dtype):
    case = MANY, *inputs(MANY, dtype=dtype), 0.4
    # Values of about 1 are rounded in the parts, in their join and in the sums of gradients.
    assert_near(found(*case, **options), wanted(*case, **options), 6 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 20}], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(options, reentrant):
    q, k, v, upstream = inputs(MANY)
    layout = GroupLayout.make(*PACKINGS[MANY])
    out = checkpoint(
        lambda *x: grouped_attention(*x, layout, 0.4, **options), q, k, v, use_reentrant=reentrant
    )
    out.backward(upstream)
    plain = found(MANY, q, k, v, upstream, 0.4, **options)
    for a, b in zip((out, q.grad, k.grad, v.grad), plain, strict=True):
        assert torch.equal(a, b)


def test_joining_the_parts_under_autograd_is_wrong():
    """Why FlashFn exists: the flash backward drops the gradient of the log-sum-exp."""
    q, k, v, upstream = inputs("one group", shared=1)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    queries, own, prompt = heads[0][..., 7:, :], slice(7, None), slice(0, 7)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    near, near_lse = flash(queries, *(x[..., own, :] for x in heads[1:]), 0.0, True, scale=0.4)
    far, far_lse = flash(queries, *(x[..., prompt, :] for x in heads[1:]), 0.0, False, scale=0.4)
    weight = torch.sigmoid(far_lse - near_lse)[..., None]
    naive = ((1 - weight) * near + weight * far)[0].transpose(0, 1)
    upstream[:7] = 0
    case = "one group", q, k, v, upstream, 0.4
    out, *gradients = wanted(*case)
    assert torch.allclose(naive, out[7:], rtol=0, atol=1e-12)
    naive_dq, naive_dk, _ = torch.autograd.grad(naive, (q, k, v), upstream[7:])
    for wrong, right in zip((naive_dq, naive_dk), gradients, strict=False):
        assert (wrong - right).norm() > 0.01 * right.norm()
    assert_near(found(*case), (out, *gradients), 1e-12)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 9}], ids=str)
def test_a_completion_is_nothing_to_its_siblings(options):
    packing = "eight ragged"
    prompt, (lengths,) = PACKINGS[packing][0][0], PACKINGS[packing][1]
    q, k, v, _ = inputs(packing, dtype=torch.float32)
    layout = GroupLayout.make(*PACKINGS[packing])
    before = grouped_attention(q, k, v, layout, 0.4, **options)
    bounds = list(pairwise([prompt, *(prompt + torch.tensor(lengths).cumsum(0)).tolist()]))
    for start, stop in bounds:
        others = torch.ones(len(q), dtype=torch.bool)
        others[start:stop] = False
        with torch.no_grad():
            changed = [x + 3 * torch.randn_like(x) * ~others[:, None, None] for x in (q, k, v)]
        after = grouped_attention(*changed, layout, 0.4, **options)
        assert torch.equal(after[others], before[others])
        assert not torch.equal(after[start:stop], before[start:stop])

        loss = before[start:stop].square().sum()
        dq, dk, dv = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        siblings = others.clone()
        siblings[:prompt] = False
        assert (dq[others] == 0).all() and (dk[siblings] == 0).all() and (dv[siblings] == 0).all()
        assert dv[start:stop].abs().sum() > 0


def test_saves_inputs_output_and_log_sum_exp_only():
    q, k, v, _ = inputs(MANY)
    layout = GroupLayout.make(*PACKINGS[MANY])
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.update({x.data_ptr(): x.numel()}), lambda x: x
    ):
        grouped_attention(q, k, v, layout, 0.4, softcap=1.0)
        assert sum(saved.values()) == q.numel() + k.numel() + v.numel()
        grouped_attention(q, k, v, layout, 0.4)
        assert sum(saved.values()) == 2 * q.numel() + k.numel() + v.numel() + q[..., 0].numel()
