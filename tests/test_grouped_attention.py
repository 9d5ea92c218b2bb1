"""Attention of packed groups against autograd through its definition."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from grpo_engine.kernels import flash_parts, masked_attention, reference_decode
from grpo_engine.kernels.flash_parts import CpuFlash, CudaFlash
from grpo_engine.kernels.group_layout import GroupLayout
from grpo_engine.kernels.grouped_attention import FlashFn, _has_flash, grouped_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# Prompt lengths and completion lengths of each group.
PACKINGS = {
    "one token each": ([1], [[1]]),
    "one group": ([7], [[5]]),
    "prefill": ([40], [[]]),
    "prefill of many": ([3, 1, 40], [[], [], []]),
    "a group without completions": ([5, 4, 6], [[3, 2], [], [4]]),
    "completions without tokens": ([5, 4], [[0, 3, 0], [0]]),
    "prompts of one token": ([1, 1], [[4, 1, 6], [1, 1]]),
    "eight of one length": ([11], [[9] * 8]),
    "eight ragged": ([33], [[1, 60, 2, 35, 34, 7, 33, 120]]),
    "many groups": ([5, 300, 2, 17], [[3, 70, 1], [40, 41], [90, 8, 8, 2], [1]]),
    "longer than a block": ([600], [[520, 30]]),
}
MANY = "many groups"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is full of NaN: what is not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(packing, heads=4, shared=2, d=8, dtype=torch.float64, seed=0):
    """q, k, v that want gradients, and the upstream gradient."""
    prompts, completions = PACKINGS[packing]
    tokens = sum(prompts) + sum(map(sum, completions))
    torch.manual_seed(seed)
    shapes = [(tokens, heads, d)] + [(tokens, heads // shared, d)] * 2 + [(tokens, heads, d)]
    q, k, v, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return *(x.requires_grad_() for x in (q, k, v)), upstream


def wanted(packing, q, k, v, upstream, scale, **options):
    """Output and gradients of the definition, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = reference_decode.grouped_attention(q, k, v, *PACKINGS[packing], scale, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.double())


def found(packing, q, k, v, upstream, scale, **options):
    out = grouped_attention(q, k, v, GroupLayout.make(*PACKINGS[packing]), scale, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)


def assert_near(got, want, tolerance):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: {error}"


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
