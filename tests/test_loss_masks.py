"""The C++ loss skips and joins runs of its mask: every kind of run against the reference."""

import math

import pytest
import torch

from grpo_engine import _C, cpu, ops
from loss_cases import assert_same, expected, make_case, make_options, outcome

LENGTH = 1100  # two blocks of 512 and a rest that is no whole vector
MASKS = {
    "all on": [],
    "all off": [(0, LENGTH)],
    "right-padded": [(700, LENGTH)],
    "right-padded at a vector's end": [(704, LENGTH)],
    "left-padded": [(0, 389)],
    "a hole of one": [(513, 514)],
    "holes beside the edge of a block": [(511, 512), (513, 515)],
    "every other token": [(i, i + 1) for i in range(0, LENGTH, 2)],
    "spans of a tool's output": [(40, 200), (650, 1010)],
    "one token at the end": [(0, LENGTH - 1)],
}
KINDS = [("grpo", "token"), ("dapo", "token"), ("dr_grpo", "token"), ("dapo", "sequence")]


def case_of(options, spans):
    mask = torch.ones(LENGTH, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = False
    beside = torch.rand(37, generator=torch.Generator().manual_seed(1)) < 0.5
    case = make_case(options, [LENGTH, 37], drift=[-0.1, 0.1], advantages=torch.tensor([0.7, -1.2]))
    case["mask"] = torch.cat([mask, beside])
    for name in ("logp", "old_logp", "ref_logp"):
        case[name] = torch.where(case["mask"], case[name], math.nan)
    return case


@pytest.mark.parametrize("kind", KINDS, ids="/".join)
@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_kind_of_run_is_the_reference(spans, kind):
    case = case_of(make_options(*kind, ("k3", False)), spans)
    for isa in ["plain", _C.best_isa()]:
        _C.use_isa(isa)
        assert_same(outcome(cpu.grpo_loss, case), expected(case))


def test_a_token_beyond_the_bound_of_a_run_takes_the_slow_way_alone():
    case = case_of(make_options("grpo", kl=("k3", False)), MASKS["right-padded"])
    case["old_logp"][300] = case["logp"][300] + 30.0
    assert_same(outcome(cpu.grpo_loss, case), expected(case))


def test_offsets_are_looked_at_once_and_named_with_what_was_given():
    logp = torch.zeros(4, requires_grad=True)
    bad = torch.tensor([0, 3, 2, 4], dtype=torch.int32)
    options = make_options("grpo")
    with pytest.raises(ValueError, match=r"cu_seqlens must start at 0.*given \[0, 3, 2, 4\]"):
        ops.grpo_loss(logp, options=options, advantages=torch.zeros(3), cu_seqlens=bad)


def test_a_second_derivative_is_refused_and_not_made_up():
    logp, factor = (
        torch.tensor([-1.0, -2.0], requires_grad=True),
        torch.tensor(2.0).requires_grad_(),
    )
    cu = torch.tensor([0, 2], dtype=torch.int32)
    out = ops.grpo_loss(logp, options=make_options("dapo"), advantages=torch.ones(1), cu_seqlens=cu)
    (first,) = torch.autograd.grad(out.loss * factor, logp, create_graph=True)
    assert first.tolist() == [-1.0, -1.0]  # twice d(-mean of the ratios)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
