"""Packings of groups, and attention over them, found and by its definition."""

import torch

from grpo_engine.kernels import reference_decode
from grpo_engine.kernels.group_layout import GroupLayout
from grpo_engine.kernels.grouped_attention import grouped_attention

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
