"""The loss of a head in one go against its two ops in float64, and what the head's passes cost."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import grpo_engine as ge
from grpo_engine.kernels import reference
from grpo_engine.kernels import token_logprob as tiled
from loss_cases import LENGTHS, LOSSES, Outcome, assert_same, make_case, make_options, offsets

TOKEN_LOSSES = [loss for loss, level in LOSSES if level == "token" and loss != "vespo"]
PARTS = {
    "scored": (),
    "frozen": ("hidden",),
    "trained": ("hidden", "weight"),
    "all": ("hidden", "weight", "bias"),
    "weight": ("weight",),
    "bias": ("bias",),
}
HEAD = ("hidden", "weight", "targets", "bias", "temperature", "softcap", "logit_scale")
COLUMNS, WIDTH = 300, 16
# One tile; several, the last one smaller; a row at a time.
TILES = [1 << 28, 7 * COLUMNS * 4, 1]
SHARE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}


def make_head_case(options, dtype=torch.float32, lengths=LENGTHS, **changes):
    """Arguments of linear_grpo_loss; old and reference log-probs lie around those of the head."""
    g, rows = torch.manual_seed(0), sum(lengths)
    case = make_case(options, lengths, importance=True, **changes)
    case |= {
        "hidden": torch.randn(rows, WIDTH, generator=g).to(dtype),
        "weight": (torch.randn(COLUMNS, WIDTH, generator=g) * 0.5).to(dtype),
        "targets": torch.randint(0, COLUMNS, (rows,), generator=g),
        "bias": torch.linspace(-1, 1, COLUMNS),
        "temperature": torch.linspace(0.8, 1.2, rows),
        "softcap": 8.0,
        "logit_scale": 1.2,
    }
    moved = case.pop("logp")
    logp = reference.token_logprob(*(case[name] for name in HEAD))[0]
    for name in ("old_logp", "ref_logp"):
        if case[name] is not None:
            case[name] = case[name] - moved + logp
    return case


def run(op, case, wanted, upstream=1.0):
    """The loss and its metrics, and the gradients of what is wanted."""
    leaves = {name: case[name].clone().requires_grad_() for name in wanted}
    out = op(**{**case, **leaves})
    if wanted:
        (out.loss * upstream).backward()
    metrics = {name: float(x) for name, x in out.metrics.items()}
    return out.loss.item(), metrics, {name: x.grad for name, x in leaves.items()}


def in_float64(case, wanted, upstream=1.0):
    def exact(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def two_ops(**case):
        head = [case.pop(name) for name in HEAD]
        return reference.grpo_loss(reference.token_logprob(*head)[0], **case)

    return run(two_ops, {name: exact(x) for name, x in case.items()}, wanted, upstream)


def assert_is_both_ops(case, wanted, upstream=1.0, impl="cpp", tile_bytes=TILES[1]):
    want = in_float64(case, wanted, upstream)
    got = run(
        lambda **x: ge.linear_grpo_loss(**x, impl=impl, tile_bytes=tile_bytes),
        case, wanted, upstream,
    )  # fmt: skip
    dtype = case["hidden"].dtype
    if dtype == torch.float32:
        nothing = torch.zeros(0, dtype=torch.float64)
        assert_same(Outcome(got[0], nothing, got[1]), Outcome(want[0], nothing, want[1]))
    else:  # log-probs are off by up to 1e-3 nats, and a ratio may fall on the other side of a clip
        assert got[0] == pytest.approx(want[0], abs=2e-3)
        assert got[1] == pytest.approx(want[1], rel=2e-3, abs=2e-3)
    for name, x in want[2].items():
        error = (got[2][name].double() - x).norm() / x.norm().clamp(min=1e-30)
        assert error < SHARE[dtype], name
        assert got[2][name].dtype == case[name].dtype
    return want


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_every_loss_and_part_of_the_head(loss, part, tile_bytes):
    case = make_head_case(make_options(loss, kl=("k3", True)))
    _, metrics, gradients = assert_is_both_ops(case, PARTS[part], tile_bytes=tile_bytes)
    assert metrics["clip_region"] > 0.05
    assert all(x.abs().max() > 1e-3 for x in gradients.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["frozen", "trained", "all"])
@pytest.mark.parametrize("loss", ["grpo", "cispo"])
def test_half_precision(loss, part, dtype):
    assert_is_both_ops(make_head_case(make_options(loss, kl=("k3", True)), dtype), PARTS[part])


CREDITS = {
    "rewards": {"rewards": torch.tensor([0.3, 1.0, 0.1, 0.7]), "cu_groups": offsets([2, 2])},
    "no signal": {"rewards": torch.ones(4), "cu_groups": offsets([4])},
    "per token": {"advantages": torch.linspace(-1, 1.2, sum(LENGTHS))},
    "out": {"in_loss": torch.tensor([True, True, False, True])},
    "unmasked": {"mask": None},
    "on-policy": {"old_logp": None},
    "number": {"normalizer": 7.5},
    "tensor": {"normalizer": torch.tensor(7.5)},
}


@pytest.mark.parametrize("part", ["frozen", "trained"])
@pytest.mark.parametrize("changes", CREDITS.values(), ids=CREDITS)
def test_what_goes_with_the_loss_goes_with_it_here(changes, part):
    case = make_head_case(make_options("grpo", kl=("k2", True)), **changes)
    assert_is_both_ops(case, PARTS[part])


@pytest.mark.parametrize("part", ["frozen", "trained"])
@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_the_gradient_is_scaled_by_what_comes_from_above(impl, part):
    case = make_head_case(make_options("dapo", kl=("k3", False)))
    assert_is_both_ops(case, PARTS[part], upstream=2.5, impl=impl)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("part", ["frozen", "all"])
def test_triton_under_the_interpreter(part):
    case = make_head_case(make_options("grpo", kl=("k3", False)), lengths=[3, 0, 2, 2])
    assert_is_both_ops(case, PARTS[part], impl="triton", tile_bytes=4 * COLUMNS * 4)


def test_loss_and_metrics_are_those_of_the_two_ops_bit_by_bit():
    case = make_head_case(make_options("grpo", kl=("k3", True)), torch.bfloat16)
    for tile_bytes in TILES:
        loss, metrics, _ = run(
            lambda **x: ge.linear_grpo_loss(**x, tile_bytes=tile_bytes),  # noqa: B023
            case, PARTS["trained"],
        )  # fmt: skip
        head = {name: case[name] for name in HEAD}
        logp, _ = ge.token_logprob(**head, tile_bytes=tile_bytes)
        rest = {name: x for name, x in case.items() if name not in HEAD}
        two = ge.grpo_loss(logp, **rest)
        assert loss == two.loss.item()
        assert metrics == {name: float(x) for name, x in two.metrics.items()}


def test_backward_twice_adds_the_same_gradient_twice():
    case = make_head_case(make_options("dapo"))
    once = run(ge.linear_grpo_loss, case, ["weight"])[2]["weight"]
    weight = case["weight"].clone().requires_grad_()
    loss = ge.linear_grpo_loss(**case | {"weight": weight}).loss
    loss.backward(retain_graph=True)
    weight.grad.zero_()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)


def test_without_gradients_there_is_no_graph():
    case = make_head_case(make_options("dapo"))
    case["weight"].requires_grad_()
    graded = ge.linear_grpo_loss(**case).loss
    with torch.no_grad():
        plain = ge.linear_grpo_loss(**case).loss
    assert graded.requires_grad and not plain.requires_grad
    assert graded.item() == plain.item()


@pytest.mark.parametrize("changes", [{"mask": torch.zeros(20).bool()}, {"lengths": [0] * 4}])
def test_nothing_in_the_loss_gives_zero(changes):
    case = make_head_case(make_options("grpo", kl=("k3", True)), **changes)
    loss, metrics, gradients = assert_is_both_ops(case, PARTS["all"])
    assert loss == metrics["tokens"] == 0
    assert all((x == 0).all() for x in gradients.values())


def test_a_row_that_is_not_finite_is_counted():
    case = make_head_case(make_options("dapo", kl=("k3", True)), mask=None)
    case["hidden"][7, 3] = math.nan
    loss, metrics, gradients = run(ge.linear_grpo_loss, case, PARTS["trained"])
    assert math.isnan(loss) and metrics["nonfinite"] == 1
    assert gradients["hidden"].isnan().any(1).tolist() == [row == 7 for row in range(20)]


def test_a_loss_scale_keeps_float16_gradients():
    # What a GradScaler is for: without it most of dlogits is under the smallest float16.
    case = make_head_case(make_options("dapo"), torch.float16, normalizer=1e6)
    _, _, want = in_float64(case, PARTS["trained"], 2.0**20)
    for op in (two_ops_in_float16, ge.linear_grpo_loss):
        _, _, got = run(op, case, PARTS["trained"], 2.0**20)
        for name, x in want.items():
            error = (got[name].double() - x).norm() / x.norm()
            assert error < SHARE[torch.float16], (op, name)


def two_ops_in_float16(**case):
    logp, _ = ge.token_logprob(*[case.pop(name) for name in HEAD])
    return ge.grpo_loss(logp, **case)


@pytest.mark.parametrize("impl", ["torch", "cpp", "auto"])
@pytest.mark.parametrize(
    ("loss", "level"), [x for x in LOSSES if x[1] == "sequence" or x[0] == "vespo"]
)
def test_losses_that_need_the_whole_sample_are_refused(loss, level, impl):
    case = make_head_case(make_options(loss, level))
    with pytest.raises(ValueError, match=rf"{loss} at level {level}.*token_logprob and grpo_loss"):
        ge.linear_grpo_loss(**case, impl=impl)


def head_passes(case, part, tile_bytes):
    """One of the three ops forwards and, if a gradient is wanted, backwards."""
    leaves = {n: case[n].requires_grad_() for n in PARTS["all" if part == "fused" else part]}
    if part == "fused":
        return ge.linear_grpo_loss(**case | leaves, tile_bytes=tile_bytes).loss.backward()
    head = {name: case[name] for name in HEAD} | leaves
    logp, _ = ge.token_logprob(**head, tile_bytes=tile_bytes)
    return logp.sum().backward() if leaves else None


@pytest.mark.parametrize("tile_bytes", TILES[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("part", "units"), [("scored", 1), ("frozen", 2), ("all", 4), ("fused", 3), ("weight", 3)]
)
def test_gemm_units(part, units, dtype, tile_bytes):
    case = make_head_case(make_options("grpo"), dtype)
    # Unlike mm, the one that adds in place is not known to the counter.
    added = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        head_passes(case, part, tile_bytes)
    assert counter.get_total_flops() == units * 2 * sum(LENGTHS) * COLUMNS * WIDTH


class Largest(TorchDispatchMode):
    """The largest storage that an op returned, in bytes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("rows", [8192, 100])
@pytest.mark.parametrize("dtype", SHARE)
@pytest.mark.parametrize("part", ["scored", "frozen", "trained", "all", "fused"])
def test_nothing_larger_than_a_tile_or_a_gradient_in_float32(monkeypatch, part, dtype, rows):
    monkeypatch.setattr(tiled, "BACKWARD_ROWS", rows)
    case, tile = make_head_case(make_options("grpo"), dtype, [1500, 0, 900, 600]), 30_000
    with Largest() as made:
        head_passes(case, part, tile)
    assert made.size <= max(tile, 3000 * WIDTH * 4) < 3000 * COLUMNS * dtype.itemsize / 9
