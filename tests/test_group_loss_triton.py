"""The Triton group loss under the interpreter, against the reference in float64.

A program costs the interpreter some 50 ms whatever its sample's length, so batches are of a few
samples, and chunks are made small where a loop over chunks is to be seen at work.
"""

import math

import numpy as np
import pytest
import torch
import triton

from grpo_engine.kernels import group_loss
from grpo_engine.kernels.group_loss import grpo_loss
from loss_cases import (
    CLIPPED,
    KLS,
    LENGTHS,
    LOSSES,
    PATHS,
    assert_same,
    expected,
    is_per_token,
    make_case,
    make_options,
    offsets,
    outcome,
    padded,
)

NAN, INF = math.nan, math.inf
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # 0 / 0 in the interpreter
    pytest.mark.usefixtures("poisoned_memory"),
]


def assert_is_the_reference(case):
    out, truth = outcome(grpo_loss, case), expected(case)
    assert_same(out, truth)
    return truth


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_every_loss_level_and_kl(loss, level, kl):
    truth = assert_is_the_reference(make_case(make_options(loss, level, kl)))
    assert truth.gradient.abs().max() > 0.01
    assert truth.metrics["clip_region"] > 0.05


@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_importance_ratio(loss, level):
    kl = ("k3", True)
    assert_is_the_reference(make_case(make_options(loss, level, kl), importance=True, seed=1))


@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_on_policy(loss, level):
    o = make_options(loss, level, ("k1", True))
    truth = assert_is_the_reference(make_case(o, old_logp=None, importance=True, seed=2))
    assert truth.metrics["ratio_min"] == truth.metrics["ratio_max"] == 1


@pytest.mark.parametrize(("loss", "level"), [x for x in LOSSES if x[0] != "vespo"])
def test_advantages_per_token(loss, level):
    case = make_case(make_options(loss, level, ("k3", False)), importance=True, seed=3)
    case["advantages"] = torch.randn(len(case["logp"]), generator=torch.manual_seed(3))
    case["advantages"][[0, 5]] = 0.0
    assert_is_the_reference(case)


@pytest.mark.parametrize("loss", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_sided_clip(loss, level):
    o = make_options(loss, level, ("k2", False), delta=1.4)
    case = make_case(o, importance=True, drift=[0.4, 0.0, -0.35, -0.5], seed=4)
    truth = assert_is_the_reference(case)
    free = expected(case | {"options": make_options(loss, level, ("k2", False))})
    assert abs(truth.loss - free.loss) > 1e-4


def test_constants_of_sapo_and_vespo():
    taus = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}
    assert_is_the_reference(make_case(make_options("sapo", **taus)))
    constants = {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.8, "lambda_neg": 1.2}
    constants = {f"vespo_{name}": value for name, value in constants.items()}
    assert_is_the_reference(make_case(make_options("vespo", **constants), importance=True))


def test_log_ratios_are_bounded_inclusively():
    # One token a sample: at the bounds of +-20 the gradient is there, beyond it is not.
    o = make_options("luspo", kl=("k2", True))
    case = make_case(o, lengths=[1] * 4, drift=0.0, masked=False)
    case |= {"logp": torch.full((4,), -1.0), "advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}
    case |= {"old_logp": torch.tensor([-21.0, -26.0, 19.0, 24.0])}
    for ref in (-1.5, 19.0, 19.5, -21.0, -21.5):
        case["ref_logp"] = torch.full((4,), ref)
        out, truth = outcome(grpo_loss, case), expected(case)
        np.testing.assert_allclose(out.gradient, truth.gradient, rtol=1e-5)
        assert out.loss == pytest.approx(truth.loss, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_on_the_edge_of_its_clip_range_still_moves(level):
    # On-policy with an empty range: 1 is both ends of it.
    o = make_options("dapo", level, epsilon=0.0, epsilon_high=0.0)
    truth = assert_is_the_reference(make_case(o, old_logp=None))
    assert truth.gradient.abs().max() > 0.01


@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_lengths_around_a_block_of_tokens(monkeypatch, loss, level):
    lengths = [1, 127, 128, 129, 511, 512, 513, 4097]
    assert group_loss.BLOCK == 512
    kw = {"lengths": lengths, "drift": 0.0, "noise": 0.02, "seed": 5}
    case = make_case(make_options(loss, level, ("k3", True), epsilon=0.01), **kw)
    case |= {"advantages": torch.tensor([0.4, -0.5, 0.6, -0.7, 0.8, -0.9, 1.0, 1.1])}
    assert_is_the_reference(case)
    monkeypatch.setattr(group_loss, "BLOCK", 128)  # now 127, 128 and 129 lie around one block
    assert_is_the_reference(make_case(case["options"], lengths=lengths[:4], seed=6))


@pytest.mark.parametrize(
    ("loss", "level", "garbage"),
    [(*path, x) for path, x in zip(PATHS, [NAN, INF, -INF, -200.0, NAN], strict=True)],
)
def test_padded_equals_packed_bit_by_bit(loss, level, garbage):
    case = make_case(make_options(loss, level, ("k3", True)), importance=True, seed=7)
    if loss == "grpo":
        case["advantages"] = torch.linspace(-1, 1, len(case["logp"]))
    packed = outcome(grpo_loss, case)
    wide = outcome(grpo_loss, padded(case, garbage, width=12))
    assert_same(packed, expected(case))
    assert (wide.loss, wide.metrics) == (packed.loss, packed.metrics)
    spread = padded({"logp": packed.gradient, "cu_seqlens": case["cu_seqlens"]}, width=12)
    assert torch.equal(wide.gradient, spread["logp"])


@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_masked_tokens_may_hold_anything(loss, level):
    case = make_case(make_options(loss, level, ("k3", True)), importance=True, seed=8)
    case["in_loss"] = torch.tensor([True, True, True, False])
    if loss != "vespo":
        case["advantages"] = torch.linspace(-1, 1, len(case["logp"]))
    clean = outcome(grpo_loss, case)
    counts = case["mask"] & torch.repeat_interleave(case["in_loss"], torch.tensor(LENGTHS))
    places = (~counts).nonzero().flatten()
    anything = torch.tensor([NAN, INF, -INF, 1e30]).repeat(len(places))[: len(places)]
    for name, x in case.items():
        if is_per_token(name, x, len(counts)) and name != "mask":
            case[name] = x.clone()
            case[name][places] = anything
    out = outcome(grpo_loss, case)
    assert (out.loss, out.metrics) == (clean.loss, clean.metrics)
    assert torch.equal(out.gradient, clean.gradient)
    assert (out.gradient[places] == 0).all() and len(places) > 6
    assert_same(out, expected(case))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logp", NAN),
        ("old_logp", NAN),
        ("ref_logp", NAN),
        ("importance_ratio", NAN),
        ("importance_ratio", INF),
        ("advantages", NAN),
        ("logp", -INF),
        ("old_logp", INF),
        ("ref_logp", -INF),
    ],
)
def test_a_token_that_is_not_finite_is_counted_and_not_hidden(name, value, level):
    case = make_case(make_options("dapo", level, ("k3", True)), importance=True, seed=9)
    case |= {"advantages": torch.linspace(-1, 1, len(case["logp"])), "mask": None}
    case[name] = case[name].clone()
    case[name][7] = value  # of the third sample
    out, truth = outcome(grpo_loss, case), expected(case)
    assert out.metrics["nonfinite"] == truth.metrics["nonfinite"] == 1
    np.testing.assert_allclose(out.loss, truth.loss, rtol=2e-6)
    for metric, x in truth.metrics.items():
        np.testing.assert_allclose(out.metrics[metric], x, rtol=2e-6, err_msg=metric)
    others = torch.ones(len(out.gradient), dtype=torch.bool)
    others[6:15] = False
    np.testing.assert_allclose(out.gradient[others], truth.gradient[others], rtol=2e-5, atol=1e-7)


def test_without_old_a_bad_token_counts_once():
    case = make_case(make_options("luspo"), old_logp=None, masked=False)
    case["logp"][7] = NAN
    assert outcome(grpo_loss, case).metrics["nonfinite"] == 1


EMPTY = {
    "mask": {"mask": torch.zeros(sum(LENGTHS), dtype=torch.bool)},
    "in_loss": {"in_loss": torch.zeros(4, dtype=torch.bool)},
    "valid": {"valid": torch.zeros(4, dtype=torch.bool)},
    "rewards": {"rewards": torch.tensor([NAN, INF, -INF, NAN]), "cu_groups": offsets([2, 2])},
    "completions": {"lengths": [0, 0, 0, 0]},
    "samples": {"lengths": [], "drift": 0.0, "advantages": torch.zeros(0)},
    "groups": {
        "lengths": [],
        "drift": 0.0,
        "rewards": torch.zeros(0),
        "cu_groups": offsets([0, 0]),
    },
}


SOME = [("grpo", "token"), ("dapo", "sequence"), ("vespo", "token")]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(("loss", "level"), SOME)
def test_nothing_in_the_loss_gives_zero(loss, level, empty, wide):
    case = make_case(make_options(loss, level, ("k3", True)), **EMPTY[empty])
    case = padded(case, NAN) if wide else case
    truth = assert_is_the_reference(case)
    assert truth.loss == 0 and (truth.gradient == 0).all() and truth.metrics["tokens"] == 0


@pytest.mark.parametrize(
    "number", [7.5, 7, torch.tensor(7.5), torch.tensor(7), torch.tensor([7.5])]
)
@pytest.mark.parametrize(("loss", "level"), [("grpo", "token"), ("dapo", "sequence")])
def test_a_given_normalizer_replaces_the_default(loss, level, number):
    case = make_case(make_options(loss, level), normalizer=number, seed=13)
    out = outcome(grpo_loss, case)
    assert_same(out, expected(case))
    default = outcome(grpo_loss, case | {"normalizer": None})
    assert out.loss == pytest.approx(default.loss * (4 if loss == "grpo" else 17) / float(number))


def test_the_gradient_is_scaled_by_what_comes_from_above():
    case = make_case(make_options("grpo", kl=("k3", False)), seed=14)
    assert_same(outcome(grpo_loss, case, 2.5), expected(case, 2.5))
    single = outcome(grpo_loss, case)
    torch.testing.assert_close(outcome(grpo_loss, case, 2.5).gradient, 2.5 * single.gradient)


@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_any_order_of_programs_gives_the_same_bits(monkeypatch, loss, level):
    rewards = {"rewards": torch.tensor([0.3, 1.0, 0.1, 0.7]), "cu_groups": offsets([4])}
    case = make_case(make_options(loss, level, ("k3", True)), seed=15, **rewards)
    first, again = outcome(grpo_loss, case), outcome(grpo_loss, case)
    builder = triton.runtime.interpreter.interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z)
    )
    backwards = outcome(grpo_loss, case)
    for other in (again, backwards):
        assert (other.loss, other.metrics) == (first.loss, first.metrics)
        assert torch.equal(other.gradient, first.gradient)


def test_slices_that_are_not_contiguous():
    case = padded(make_case(make_options("grpo", kl=("k3", False)), importance=True, seed=16))
    want = outcome(grpo_loss, case)
    for name in ("logp", "old_logp", "ref_logp", "importance_ratio", "mask"):
        case[name] = case[name].T.contiguous().T
    case["advantages"] = torch.stack([case["advantages"], torch.zeros(4)], 1)[:, 0]
    assert not case["mask"].is_contiguous() and not case["advantages"].is_contiguous()
    got = outcome(grpo_loss, case)
    assert (got.loss, got.metrics) == (want.loss, want.metrics)
    assert torch.equal(got.gradient, want.gradient)
