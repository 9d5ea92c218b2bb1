"""Which implementation runs, what is refused and how, and the border of the C++ one."""

import math
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import grpo_engine as ge
from grpo_engine import _C, cpu, implementation
from grpo_engine.kernels import reference
from loss_cases import PATHS, make_case, make_options, offsets, outcome, padded

LOSS = ge.GRPOOptions(loss_type="dapo", beta=0.0)
HEAD, TARGETS = torch.ones(8, 2), torch.tensor([0, 1, 4])
# Two samples of two tokens and of one: on-policy, the loss is (-1 - 1 + 1) / 3.
CREDIT = {"cu_seqlens": offsets([2, 1]), "advantages": torch.tensor([1.0, -1.0]), "options": LOSS}


def call_loss(dtype=torch.float32, **changes):
    return ge.grpo_loss(torch.ones(3, dtype=dtype), **CREDIT | changes)


def call_logprob(dtype=torch.float32, **changes):
    return ge.token_logprob(*HEAD.to(dtype).split([3, 5]), TARGETS, **changes)


def call_linear(dtype=torch.float32, **changes):
    return ge.linear_grpo_loss(*HEAD.to(dtype).split([3, 5]), TARGETS, **CREDIT | changes)


CALLS = [call_loss, call_logprob, call_linear]


def trap(monkeypatch, module, *names):
    """Who reaches one of these raises LookupError with its name."""
    for name in names:
        monkeypatch.setattr(module, name, Mock(side_effect=LookupError(name)))


@pytest.mark.parametrize("impl", ["auto", "cpp"])
def test_cpu_tensors_go_to_cpp(monkeypatch, impl):
    trap(monkeypatch, cpu, "grpo_loss", "group_advantages", "CpuRows")
    for call, name in zip(CALLS, ["grpo_loss", "CpuRows", "CpuRows"], strict=True):
        with pytest.raises(LookupError, match=name):
            call(impl=impl)
    with pytest.raises(LookupError, match="group_advantages"):
        ge.group_advantages(torch.zeros(2), offsets([2]))


@pytest.mark.parametrize(
    ("dtype", "impl", "rel"), [(torch.float32, "torch", 1e-6), (torch.float64, "auto", 1e-15)]
)
def test_torch_by_name_and_for_float64(monkeypatch, dtype, impl, rel):
    trap(monkeypatch, cpu, "grpo_loss", "group_advantages", "CpuRows")
    assert call_loss(dtype, impl=impl).loss.item() == pytest.approx(-1 / 3, rel=rel)
    assert call_linear(dtype, impl=impl).loss.item() == pytest.approx(-1 / 3, rel=rel)
    assert call_logprob(dtype, impl=impl)[0].tolist() == pytest.approx([-math.log(5)] * 3, rel=rel)
    a, _ = ge.group_advantages(torch.eye(2).double()[0], offsets([2]))
    assert a.tolist() == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001], rel=1e-15)
    trap(monkeypatch, reference, "grpo_loss", "token_logprob")
    for call, name in zip(CALLS, ["grpo_loss", "token_logprob", "token_logprob"], strict=True):
        with pytest.raises(LookupError, match=name):
            call(dtype, impl=impl)


@pytest.mark.parametrize("impl", ["cpp", "triton"])
@pytest.mark.parametrize("call", CALLS)
def test_float64_is_refused_by_name(call, impl):
    with pytest.raises(ValueError, match=f"float64.*'torch'.*'{impl}'"):
        call(torch.float64, impl=impl)


@pytest.mark.parametrize("impl", ["fast", "CPP", "", None, 0])
@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_implementation_is_refused_with_the_known_ones(call, impl):
    with pytest.raises(ValueError, match="impl must be one of auto, triton, cpp, torch") as error:
        call(impl=impl)
    assert repr(impl) in str(error.value)


@pytest.mark.parametrize("setting", [None, "0"])
@pytest.mark.parametrize("call", CALLS)
def test_triton_on_cpu_tensors_needs_its_interpreter(monkeypatch, call, setting):
    monkeypatch.delenv("TRITON_INTERPRET")
    if setting is not None:
        monkeypatch.setenv("TRITON_INTERPRET", setting)
    with pytest.raises(ValueError, match=r"'triton' needs CUDA.*TRITON_INTERPRET=1.*given cpu"):
        call(impl="triton")


def test_tensors_of_another_device_are_no_business_of_cpp_or_triton():
    x = torch.empty(3, device="meta")
    assert implementation.implementation("auto", x) == "torch"
    for impl, needs in (("cpp", "CPU"), ("triton", "CUDA")):
        with pytest.raises(ValueError, match=f"impl '{impl}' needs {needs} tensors.*given meta"):
            implementation.implementation(impl, x)


@pytest.fixture
def choose_for_cuda():
    """What auto chooses for CUDA tensors: it asks once, so it is made to forget."""
    implementation.triton_or_torch.cache_clear()
    yield implementation.triton_or_torch
    implementation.triton_or_torch.cache_clear()


@pytest.mark.filterwarnings("error")
def test_a_missing_triton_is_said_aloud_and_once(monkeypatch, choose_for_cuda):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    with pytest.warns(UserWarning, match=r"triton is not installed.*grpo-engine\[cuda\]"):
        assert choose_for_cuda() == "torch"
    assert choose_for_cuda() == "torch"


@pytest.mark.filterwarnings("error")
def test_a_triton_that_is_there_is_taken_in_silence(choose_for_cuda):
    assert choose_for_cuda() == "triton"


@pytest.mark.parametrize("call", CALLS)
def test_a_triton_that_cannot_be_imported_is_an_error_and_no_detour(monkeypatch, call):
    for name in ("group_loss", "head_rows"):
        monkeypatch.setitem(sys.modules, f"grpo_engine.kernels.{name}", None)
    with pytest.raises(ImportError, match=r"impl 'triton' can't run.*grpo-engine\[cuda\]"):
        call(impl="triton")


@pytest.mark.parametrize("tile_bytes", [0, -1, 1.5, 1e9, "big", None])
@pytest.mark.parametrize("impl", ["auto", "cpp", "torch"])
def test_tile_bytes_that_mean_nothing_are_refused(tile_bytes, impl):
    for call in (call_logprob, call_linear):
        with pytest.raises(ValueError, match=r"tile_bytes must be a whole number >= 1; given"):
            call(tile_bytes=tile_bytes, impl=impl)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", "rewards advantages old_logp ref_logp importance_ratio".split())
def test_what_goes_with_float32_log_probs_may_have_another_float_type(name, dtype):
    case = make_case(make_options("grpo", kl=("k3", False)), importance=True)
    if name == "rewards":
        del case["advantages"]
        case |= {"rewards": torch.tensor([0.25, 1.0, 0.5, 0.0]), "cu_groups": offsets([4])}
    case[name] = case[name].to(dtype)
    want = outcome(ge.grpo_loss, case | {"impl": "torch"})
    got = outcome(ge.grpo_loss, case | {"impl": "cpp"})
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    torch.testing.assert_close(got.gradient, want.gradient, rtol=1e-5, atol=1e-7)


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*values):
    return np.array(values, np.int32)


ROWS = {
    "tile": f32(3, 5), "hidden": f32(3, 2), "weight": f32(5, 2), "targets": np.array([0, 1, 4]),
    "dtype": "float32", "bias": f32(5), "inv_temperature": f32(3), "softcap": None, "scale": 1.0,
}  # fmt: skip
BORDER = {
    # two samples of two and three tokens
    "group_loss": {
        "logp": f32(5), "old_logp": f32(5), "ref_logp": f32(5), "rewards": None,
        "cu_groups": None, "advantages": f32(2), "cu_seqlens": i32(0, 2, 5), "samples": 2,
        "mask": np.ones(5, bool), "valid": np.ones(2, bool), "in_loss": np.ones(2, bool),
        "importance_ratio": f32(5), "normalizer": f32(1), "options": _C.LossOptions(LOSS),
        "dlogp": f32(5),
    },
    "group_advantages": {
        "rewards": f32(2), "cu_groups": i32(0, 1, 2), "valid": np.ones(2, bool),
        "options": _C.LossOptions(LOSS),
    },
    "softmax_rows": {**ROWS, "gradient": True},
    "gradient_rows": {**ROWS, "first": 0, "lse": f32(3), "logp": f32(3), "upstream": f32(3)},
    "accumulate": {"sum": f32(2, 3), "x": np.zeros((2, 3), np.int16), "dtype": "bfloat16"},
}  # fmt: skip
REWARDS = {"rewards": f32(2), "cu_groups": i32(0, 1, 2), "advantages": None}
BORDER["group_loss of rewards"] = BORDER["group_loss"] | REWARDS
WRONG = {
    "group_loss": {
        **{x: [f32(2)] for x in ("old_logp", "ref_logp", "importance_ratio", "normalizer")},
        "dlogp": [f32(2), f32(10)[::2]],  # a copy would be written, and nobody would read it
        "advantages": [f32(0), f32(3), f32(6)],
        "cu_seqlens": [i32(0, 5), i32(1, 2, 5), i32(0, 6, 5), i32(0, 2, 4), i32(), None],
        **{"mask": [np.ones(4, bool)], "in_loss": [np.ones(5, bool)], "samples": [-1]},
        **{"valid": [np.ones(3, bool)], "rewards": [f32(2)], "cu_groups": [i32(0, 2)]},
    },
    "group_loss of rewards": {
        **{"rewards": [f32(3), None], "advantages": [f32(2)]},
        "cu_groups": [i32(0, 1), i32(1, 2), i32(0, 3, 2), i32(), None],
    },
    "group_advantages": {
        "cu_groups": [i32(0, 1), i32(1, 2), i32(0, 3, 2), i32()],
        "valid": [np.ones(3, bool)],
    },
    "softmax_rows": {
        "tile": [f32(3, 4), f32(2, 5), f32(15), f32(5, 3).T],
        "hidden": [f32(3, 3), f32(2, 2), f32(3, 2).astype(np.float64)],
        "targets": [np.array([0, 1, 5]), np.array([0, -1, 4])],
        **{"weight": [f32(5)], "bias": [f32(4)], "inv_temperature": [f32(2)], "dtype": ["int8"]},
    },
    "gradient_rows": {
        **{"tile": [f32(3, 4)], "hidden": [f32(3, 3)], "bias": [f32(4)]},
        **{x: [f32(2), f32(4)] for x in ("lse", "logp", "upstream", "inv_temperature")},
    },
    "accumulate": {
        "x": [*(np.zeros(shape, np.int16) for shape in ((2, 4), (3, 2), 6)), f32(2, 3)],
        **{"sum": [f32(6), f32(2, 6)[:, ::2]], "dtype": ["int8"]},
    },
}


@pytest.mark.parametrize("argument", [(f, a) for f, wrong in WRONG.items() for a in wrong])
def test_the_border_refuses_what_would_be_read_or_written_outside(argument):
    function, name = argument
    call, good = getattr(_C, function.split()[0]), BORDER[function]
    call(*good.values())
    for wrong in WRONG[function][name]:
        with pytest.raises((ValueError, TypeError)) as error:
            call(*{**good, name: wrong}.values())
        said = name in str(error.value) or error.type is TypeError
        assert said or wrong is None or name in ("samples", "dtype")


@pytest.mark.parametrize("path", PATHS)
def test_the_same_bits_for_any_number_of_threads_and_again(monkeypatch, path):
    lengths = np.random.default_rng(14).integers(0, 900, 50)
    credit = {"rewards": torch.linspace(0, 1, 50), "cu_groups": offsets([20, 30])}
    case = make_case(make_options(*path, ("k3", True)), lengths, 0.0, importance=True, **credit)
    run, sums, gradients = _C.group_loss, [], []  # sums before they are rounded to float32
    monkeypatch.setattr(_C, "group_loss", lambda *x: sums.append(run(*x)) or sums[-1])
    for threads in (1, 1, 3):
        torch.set_num_threads(threads)
        gradients.append(outcome(cpu.grpo_loss, case).gradient)
    torch.set_num_threads(1)
    assert sums[0] == sums[1] == sums[2]
    assert all(torch.equal(x, gradients[0]) for x in gradients)


@pytest.mark.parametrize("upstream", [1.0, 2.5])
def test_backward_twice_adds_the_same_gradient_twice(upstream):
    case = make_case(make_options("grpo", kl=("k3", False)), seed=16)
    once = outcome(cpu.grpo_loss, case, upstream).gradient
    logp = case["logp"].clone().requires_grad_()
    loss = cpu.grpo_loss(**case | {"logp": logp}).loss * upstream
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert torch.equal(logp.grad, 2 * once)
    logp.grad.zero_()  # in place: what the graph holds must not be this memory
    loss.backward()
    assert torch.equal(logp.grad, once)


def test_slices_that_are_not_contiguous():
    case = make_case(make_options("grpo", kl=("k3", False)), importance=True, seed=16)
    columns, rows = (lambda x: torch.stack([x, x], 1)[:, 0]), (lambda x: x.T.contiguous().T)
    for given, strided in ((case, columns), (padded(case), rows)):
        want = outcome(cpu.grpo_loss, given)
        changes = {x: strided(given[x]) for x in ("old_logp", "ref_logp", "mask")}
        changes["advantages"] = columns(given["advantages"])
        assert not any(x.is_contiguous() for x in changes.values())
        leaf = torch.stack([given["logp"], given["logp"]], -1).requires_grad_()
        loss = cpu.grpo_loss(**given | changes | {"logp": leaf[..., 0]}).loss
        loss.backward()
        assert loss.item() == want.loss
        assert torch.equal(leaf.grad[..., 0], want.gradient) and (leaf.grad[..., 1] == 0).all()


def test_other_python_threads_run_meanwhile():
    n, good = 1 << 22, BORDER["group_loss"]
    large = dict.fromkeys(good) | {"logp": f32(n), "dlogp": f32(n), "samples": 1}
    large |= {"advantages": f32(1), "cu_seqlens": i32(0, n), "options": good["options"]}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give way: this thread runs if it is let
    try:
        # Tried again, for on a busy machine this thread may be woken too late.
        assert any(is_let_run_by(lambda: _C.group_loss(*large.values())) for _ in range(20))
        assert not is_let_run_by(lambda: sum(range(10**6)))
    finally:
        sys.setswitchinterval(interval)


def is_let_run_by(call):
    started, done = threading.Event(), []
    worker = threading.Thread(target=lambda: (started.set(), call(), done.append(True)))
    worker.start()
    started.wait()
    ran = not done
    worker.join()
    return ran
