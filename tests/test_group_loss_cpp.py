"""The C++ group loss against the reference in float64, for every instruction set of this CPU."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import grpo_engine as ge
from grpo_engine import _C, cpu
from grpo_engine.kernels import reference
from grpo_engine.kernels.options import GRPOOptions
from loss_cases import (
    CLIPPED,
    KLS,
    LENGTHS,
    LOSSES,
    PATHS,
    Outcome,
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
SETS = ["plain", "avx2", "avx512"]
ISAS = SETS[: SETS.index(_C.best_isa()) + 1]
EDGES = [1, 0, 15, 16, 17, 511, 512, 513, 4097]  # around a vector of 16, a block of 512
LONG = [22, 0, 37, 16]  # with and without tokens beside whole vectors


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is full of NaN: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    _C.use_isa(_C.best_isa())  # if a test failed before its last


def runs(case, upstream=1.0):
    """An outcome for each of ISAS."""
    found = []
    for name in ISAS:
        _C.use_isa(name)
        found.append(outcome(cpu.grpo_loss, case, upstream))
    return found


def stacked(outcomes):
    """Several outcomes as one, so that one comparison is enough."""
    metrics = {name: np.array([x.metrics[name] for x in outcomes]) for name in outcomes[0].metrics}
    loss = np.array([x.loss for x in outcomes])
    return Outcome(loss, torch.stack([x.gradient for x in outcomes]), metrics)


def assert_all_same(found, truth):
    assert_same(stacked(found), stacked([truth] * len(found)))


def assert_is_the_reference(case, upstream=1.0):
    found, truth = runs(case, upstream), expected(case, upstream)
    assert_all_same(found, truth)
    return found, truth


def assert_same_bits(x, y):
    assert (x.loss, x.metrics) == (y.loss, y.metrics)
    assert torch.equal(x.gradient, y.gradient)


def edge_case(loss, level):
    kw = {"lengths": EDGES, "drift": 0.0, "noise": 0.02, "seed": 5, "importance": True}
    kw["advantages"] = torch.tensor([0.4, 1.0, -0.5, 0.6, -0.7, 0.8, -0.9, 1.0, 1.1])
    return make_case(make_options(loss, level, ("k3", True), epsilon=0.01), **kw)


def test_the_instruction_sets_that_are_tried_are_real():
    assert ISAS[0] == "plain"
    for name in (*SETS[len(ISAS) :], "sse9"):
        with pytest.raises(ValueError, match=name):
            _C.use_isa(name)
    # Fused multiply-adds round otherwise, so another set has another last bit somewhere.
    found = runs(edge_case("grpo", "token"))
    assert len(ISAS) == 1 or not torch.equal(found[0].gradient, found[-1].gradient)


def variants(loss):
    """delta, importance, masked, a token's own advantages, on-policy: all that is legal."""
    deltas = [None, 1.2] if loss in CLIPPED else [None]
    own = [False] if loss == "vespo" else [False, True]
    return product(deltas, [False, True], [False, True], own, [False, True])


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_every_legal_combination(loss, level, kl):
    slope = clipped = 0.0
    for seed, (delta, importance, masked, own, on_policy) in enumerate(variants(loss)):
        options = make_options(loss, level, kl, delta=delta)
        changes = {"old_logp": None} if on_policy else {}
        if own:
            changes["advantages"] = torch.randn(sum(LONG), generator=torch.manual_seed(seed))
        drift = [-0.45, 0.0, -0.5 if delta else 0.5, -0.2]
        kw = {"importance": importance, "masked": masked, "seed": seed, "drift": drift}
        case = make_case(options, LONG, **kw, **changes)
        _, truth = assert_is_the_reference(case)
        wide = padded(case | {"logp": truth.gradient}, width=40)["logp"]
        assert_all_same(runs(padded(case, NAN, width=40)), replace(truth, gradient=wide))
        slope = max(slope, truth.gradient.abs().max().item())
        clipped = max(clipped, truth.metrics["clip_region"])
    assert slope > 0.01 and clipped > 0.1


@pytest.mark.parametrize(("loss", "level"), LOSSES)
def test_the_public_op_takes_this_path(loss, level):
    case = make_case(make_options(loss, level, ("k3", True)), importance=True, seed=1)
    flags = {"mask": case["mask"], "in_loss": torch.tensor([True, True, False, True])}
    integers = {name: x.int() for name, x in flags.items()}
    found, _ = assert_is_the_reference(case | flags)
    for impl in ("cpp", "auto"):
        assert_same_bits(outcome(ge.grpo_loss, case | integers | {"impl": impl}), found[-1])


def test_constants_of_sapo_and_vespo():
    taus = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}
    assert_is_the_reference(make_case(make_options("sapo", **taus)))
    constants = {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.8, "lambda_neg": 1.2}
    constants = {f"vespo_{name}": value for name, value in constants.items()}
    assert_is_the_reference(make_case(make_options("vespo", **constants), importance=True))


def test_log_ratios_are_bounded_inclusively():
    # At the bounds of +-20 the gradient is there, beyond it is not; in no other sample is that so.
    o, last = make_options("luspo", kl=("k2", True)), [0, 17, 34, 51]
    case = make_case(o, [17] * 4, drift=0.0, masked=False, seed=3)
    case["advantages"], case["logp"][last] = torch.tensor([-1.0, -1.0, 1.0, 1.0]), -1.0
    case["old_logp"][last] = torch.tensor([-21.0, -26.0, 19.0, 24.0])
    for ref in (-1.5, 19.0, 19.5, -21.0, -21.5):
        case["ref_logp"][last] = ref
        truth = expected(case)
        for out in runs(case):
            np.testing.assert_allclose(out.gradient, truth.gradient, rtol=1e-5)
            assert out.loss == pytest.approx(truth.loss, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_on_the_edge_of_its_clip_range_still_moves(level):
    # On-policy with an empty range: 1 is both ends of it, and the cap or above it.
    for delta in (1.0, 0.5):
        o = make_options("dapo", level, epsilon=0.0, epsilon_high=0.0, delta=delta)
        _, truth = assert_is_the_reference(make_case(o, old_logp=None))
        assert truth.gradient.abs().max() > 0.01


@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_lengths_around_vectors_and_blocks(loss, level):
    case = edge_case(loss, level)
    for without in ({}, {"mask": None}, {"mask": None, "importance_ratio": None}):
        assert_is_the_reference(case | without)
    assert_is_the_reference(padded(case, NAN))


@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_masked_tokens_may_hold_anything(loss, level):
    case = make_case(make_options(loss, level, ("k3", True)), importance=True, seed=8)
    case["in_loss"] = torch.tensor([True, True, True, False])
    if loss != "vespo":
        case["advantages"] = torch.linspace(-1, 1, len(case["logp"]))
    clean, _ = assert_is_the_reference(case)
    counts = case["mask"] & torch.repeat_interleave(case["in_loss"], torch.tensor(LENGTHS))
    places = (~counts).nonzero().flatten()
    anything = torch.tensor([NAN, INF, -INF, 1e30]).repeat(len(places))[: len(places)]
    for name, x in case.items():
        if is_per_token(name, x, len(counts)) and name != "mask":
            case[name] = x.index_copy(0, places, anything)
    assert (clean[0].gradient[places] == 0).all() and len(places) > 6
    for out, before in zip(runs(case), clean, strict=True):
        assert_same_bits(out, before)


NOT_FINITE = [
    *product(["logp", "old_logp", "ref_logp"], [NAN, INF, -INF], [False, True]),
    *[("importance_ratio", NAN, True), ("importance_ratio", INF, True)],
    *[("advantages", NAN, True), ("advantages", NAN, False)],
]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("name", "value", "own"), NOT_FINITE)
def test_a_token_that_is_not_finite_is_counted_and_not_hidden(name, value, own, level):
    case = make_case(make_options("dapo", level, ("k3", True)), LONG, importance=own, mask=None)
    if own:
        case["advantages"] = torch.linspace(-1, 1, sum(LONG))
    at, count = (27, 1) if own or name != "advantages" else (2, 37)  # of the third sample
    case[name] = case[name].index_fill(0, torch.tensor(at), value)
    truth = expected(case)
    assert truth.metrics["nonfinite"] == count
    for out in runs(case):
        assert out.loss == pytest.approx(truth.loss, rel=2e-6, abs=1e-6, nan_ok=True)
        assert out.metrics == pytest.approx(truth.metrics, rel=2e-6, abs=1e-6, nan_ok=True)
        # A clipped token's NaN may reach its sample's gradient; it reaches no other, nor is lost.
        lost = truth.gradient.isnan() & ~out.gradient.isnan()
        assert not lost.any() and not out.gradient[[*range(22), *range(59, 75)]].isnan().any()
        want = truth.gradient.where(~out.gradient.isnan(), NAN)
        np.testing.assert_allclose(out.gradient, want, rtol=2e-5, atol=1e-7)


EMPTY = {
    "mask": {"mask": torch.zeros(sum(LENGTHS), dtype=torch.bool)},
    **{name: {name: torch.zeros(4, dtype=torch.bool)} for name in ("in_loss", "valid")},
    "rewards": {"rewards": torch.tensor([NAN, INF, -INF, NAN]), "cu_groups": offsets([2, 2])},
    "completions": {"lengths": [0, 0, 0, 0]},
    "samples": {"lengths": [], "drift": 0.0, "advantages": torch.zeros(0)},
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_nothing_in_the_loss_gives_zero(loss, level, empty):
    case = make_case(make_options(loss, level, ("k3", True)), **EMPTY[empty])
    for layout in (case, padded(case, NAN)):
        _, truth = assert_is_the_reference(layout)
        assert truth.loss == 0 and (truth.gradient == 0).all() and truth.metrics["tokens"] == 0


@pytest.mark.parametrize("number", [7.5, 7, torch.tensor(7.5), torch.tensor(7).double()])
@pytest.mark.parametrize(("loss", "level"), PATHS)
def test_a_given_normalizer_replaces_the_default(loss, level, number):
    case = make_case(make_options(loss, level), seed=13)
    _, truth = assert_is_the_reference(case | {"normalizer": number})
    default = 4 if loss in ("grpo", "sapo") else int(case["mask"].sum())
    assert truth.loss == pytest.approx(expected(case).loss * default / float(number))


def test_ragged_groups_with_an_empty_an_equal_and_an_invalid_one():
    rng, cu = np.random.default_rng(10), offsets([64, 1, 0, 2, 7, 16, 2])
    rewards = torch.tensor(rng.random(92), dtype=torch.float32)
    rewards[67:74], rewards[90:] = 0.1, torch.tensor([NAN, INF])
    flags = {name: torch.tensor(rng.random(92) < 0.8) for name in ("in_loss", "valid")}
    flags["valid"][65:67] = True
    for path in PATHS:
        o = make_options(*path, baseline="median", scale_rewards="batch", ddof=1)
        case = make_case(o, rng.integers(0, 6, 92), 0.1, rewards=rewards, cu_groups=cu, **flags)
        _, truth = assert_is_the_reference(case)
        assert truth.metrics["no_signal"] == pytest.approx(4 / 7)
        assert truth.metrics["samples"] < 70


STATISTICS = [*product(["mean", "median", "loo"], ["group", "batch", "none"], [0, 1], [None, 0.9])]


@pytest.mark.parametrize(("baseline", "scale", "ddof", "clip"), STATISTICS)
def test_advantages_under_every_combination_of_options(baseline, scale, ddof, clip):
    o = GRPOOptions(baseline=baseline, scale_rewards=scale, ddof=ddof, advantage_clip=clip)
    rng, cu = np.random.default_rng(12), offsets([2, 0, 5, 1, 7, 16, 64])
    rewards = torch.tensor(rng.choice([0.0, 0.1, 0.5, 1.0, NAN], 95), dtype=torch.float32)
    rewards[8:15], rewards[31:] = 0.1, torch.tensor(rng.random(64))
    for valid in (None, torch.tensor(rng.random(95) < 0.8)):
        a, signal = cpu.group_advantages(rewards, cu, valid, o)
        want, want_signal = reference.group_advantages(rewards.double(), cu, valid, o)
        np.testing.assert_allclose(a, want, rtol=2e-6, atol=1e-7)
        assert torch.equal(signal, want_signal) and 0 < signal.sum() < 6
        assert (a[want == 0] == 0).all()


@pytest.mark.parametrize(
    ("rewards", "options", "want"),
    [
        # mean 1/4, std sqrt(3)/4: -0.25 and 0.75 over 0.4330127 + 1e-4
        ([0, 0, 0, 1], {}, [-0.5772170, -0.5772170, -0.5772170, 1.7316509]),
        # 0 1 2 5: mean 2, variance 14/4 or 14/3
        ([0, 1, 2, 5], {}, [-1.0689873, -0.5344937, 0.0, 1.6034810]),
        ([0, 1, 2, 5], {"ddof": 1}, [-0.9257769, -0.4628885, 0.0, 1.3886654]),
        # no signal: equal rewards, a std that is not above the least
        ([0.1] * 7, {"baseline": "loo"}, [0] * 7),
        ([0, 0, 1, 1], {"min_std": 0.5}, [0, 0, 0, 0]),
        ([0, NAN, 1, INF], {"epsilon_std": 0.0}, [-1, 0, 1, 0]),
    ],
)
def test_advantages_by_hand(rewards, options, want):
    rewards = torch.tensor(rewards, dtype=torch.float32)
    a, signal = cpu.group_advantages(rewards, offsets([len(want)]), None, GRPOOptions(**options))
    assert a.tolist() == pytest.approx(want, abs=2e-6)
    assert a.nonzero().flatten().tolist() == [i for i, x in enumerate(want) if x]
    assert signal.tolist() == [any(want)]


def test_the_gradient_is_scaled_by_what_comes_from_above():
    case = make_case(make_options("grpo", kl=("k3", False)), seed=14)
    assert_is_the_reference(case, 2.5)
    twice, once = runs(case, 2.0)[-1], runs(case)[-1]  # a power of two rounds nothing
    assert torch.equal(twice.gradient, 2 * once.gradient)
