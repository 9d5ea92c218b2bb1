"""Attention of packed groups: the calls of its CUDA route, its layout, what it refuses."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from grouped_cases import PACKINGS, assert_near, inputs, wanted
from grpo_engine.kernels import flash_parts
from grpo_engine.kernels.flash_parts import CpuFlash, CudaFlash
from grpo_engine.kernels.group_layout import GroupLayout
from grpo_engine.kernels.grouped_attention import FlashFn, _has_flash, grouped_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class SchemaFlash:
    """The CUDA ops as documented, for CPU tensors: arguments by the names of their schema."""

    def __init__(self):
        self.calls = 0

    def bind(self, op, args, kwargs):
        self.calls += 1
        names = [argument.name for argument in op.default._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        assert given.keys() <= set(names) and given["dropout_p"] == 0.0
        for side, length in (("q", "query"), ("k", "key")):
            offsets = given[f"cum_seq_{side}"]
            assert offsets.dtype == torch.int32 and offsets.is_contiguous()
            assert offsets[-1] == len(given[length]) and given[length].stride(-1) == 1
            assert given[f"max_{side}"] == offsets.diff().max() and offsets.diff().min() > 0
        return given

    def sequences(self, given):
        for (a, b), (c, d) in zip(
            pairwise(given["cum_seq_q"].tolist()),
            pairwise(given["cum_seq_k"].tolist()),
            strict=True,
        ):
            q, k, v = given["query"][a:b], given["key"][c:d], given["value"][c:d]
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = given["scale"] * torch.einsum("qhd,khd->hqk", q, k)
            if given["is_causal"]:
                assert b - a == d - c
                scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
            yield slice(a, b), slice(c, d), scores, q, k, v

    def forward(self, *args, **kwargs):
        given = self.bind(torch.ops.aten._flash_attention_forward, args, kwargs)
        assert given["return_debug_mask"] is False
        out, lse = [], []
        for _, _, scores, _, _, v in self.sequences(given):
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            lse.append(scores.logsumexp(-1))
        nothing = torch.empty(0)
        return torch.cat(out), torch.cat(lse, 1), nothing, nothing, nothing

    def backward(self, *args, **kwargs):
        given = self.bind(torch.ops.aten._flash_attention_backward, args, kwargs)
        lse, grad, out = given["logsumexp"], given["grad_out"], given["out"]
        assert lse.shape == given["query"].shape[1::-1] and lse.is_contiguous()
        dq, dk, dv = (torch.empty_like(given[name]) for name in ("query", "key", "value"))
        for rows, keys, scores, q, k, v in self.sequences(given):
            p = (scores - lse[:, rows, None]).exp()
            dp = torch.einsum("qhd,khd->hqk", grad[rows], v)
            ds = given["scale"] * p * (dp - (grad[rows] * out[rows]).sum(-1).T[..., None])
            shared = (dk.shape[1], -1)
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, k)
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, shared).sum(2)
            dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[rows]).unflatten(1, shared).sum(2)
        return dq, dk, dv


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_calls_of_the_cuda_route(packing, monkeypatch):
    fake = SchemaFlash()
    monkeypatch.setattr(flash_parts, "_cuda_forward", fake.forward)
    monkeypatch.setattr(flash_parts, "_cuda_backward", fake.backward)
    q, k, v, upstream = inputs(packing)
    out = FlashFn.apply(q, k, v, GroupLayout.make(*PACKINGS[packing]), 0.4, CudaFlash)
    got = out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)
    assert_near(got, wanted(packing, q, k, v, upstream, 0.4), 1e-12)
    assert fake.calls == (4 if any(map(sum, PACKINGS[packing][1])) else 2)


@pytest.mark.parametrize(
    ("device", "dtype", "head", "capability", "flash"),
    [
        ("cpu", torch.float64, 80, None, True),
        ("cuda", torch.bfloat16, 256, (8, 0), True),
        ("cuda", torch.float16, 80, (12, 0), True),
        ("cuda", torch.float32, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 264, (9, 0), False),
        ("cuda", torch.bfloat16, 60, (9, 0), False),
        ("cuda", torch.float16, 64, (7, 5), False),
        ("mps", torch.float16, 64, None, False),
    ],
)
def test_who_has_flash(device, dtype, head, capability, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    at = torch.device(device)
    q = SimpleNamespace(device=at, is_cuda=device == "cuda", dtype=dtype, shape=(1, 1, head))
    assert _has_flash(q) is flash


def test_padding_is_bounded_and_calls_are_few():
    torch.manual_seed(0)
    short = [torch.randint(3, 9, (8,)).tolist() for _ in range(8)]
    layout = GroupLayout.make([100] * 8, short)
    assert len([part for part in CpuFlash.parts(layout) if part.causal]) == 2
    ragged = torch.randint(1, 1024, (1, 32)).tolist()
    layout = GroupLayout.make([900], ragged)
    padded = sum(
        part.queries.at.stop - part.queries.at.start
        if isinstance(part.queries.at, slice)
        else len(part.queries.at)
        for part in CpuFlash.parts(layout)
        if part.causal
    )
    assert layout.tokens <= padded <= 8 / 7 * layout.tokens + 32 * 16


def test_positions_and_the_rows_that_predict():
    layout = GroupLayout.make([3, 1, 2], [[2, 1], [], [0, 3]])
    # Rows: prompt 0-2, completions 3-4 and 5; prompt 6; prompt 7-8, completion 9-11.
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 0, 1, 2, 3, 4]
    assert layout.predicts.tolist() == [2, 3, 2, 8, 9, 10]
    assert layout.completion.tolist()[:3] == [-1] * 3 and layout.tokens == 12
    assert layout.longest == 5
    assert layout.positions.dtype == layout.predicts.dtype == torch.int64
    assert GroupLayout.make([4], [[]]).predicts.tolist() == []


@pytest.mark.parametrize(
    ("prompts", "completions", "named"),
    [
        ([0], [[1]], "prompt_len"),
        ([1], [[-1]], "completion_len"),
        ([1], [], "1 and 0"),
        ([], [], "0"),
    ],
)
def test_lengths_that_are_refused(prompts, completions, named):
    with pytest.raises(ValueError, match=named):
        GroupLayout.make(prompts, completions)


def test_inputs_that_are_refused():
    layout = GroupLayout.make([2], [[1]])
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    for bad, named in (
        ((q[:2], k[:2], k[:2]), "N = 3"),
        ((q, k, k[:, :1]), "N = 3"),
        ((q, k[..., :4], k[..., :4]), "N = 3"),
        ((q, q[:, :3], q[:, :3]), "H_kv"),
        ((q, k.double(), k), "dtype"),
    ):
        with pytest.raises(ValueError, match=named):
            grouped_attention(*bad, layout, 1.0)
    with pytest.raises(ValueError, match="window"):
        grouped_attention(q, k, k, layout, 1.0, window=0)
