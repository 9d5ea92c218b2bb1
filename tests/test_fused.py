"""Modules that run in C++ while a CPU samples: the same numbers, and everything put back."""

import copy

import peft
import pytest
import torch
from torch import nn

from conftest import FAMILIES, make_model
from fused_models import IDS, assert_near, by_route, in_cpp, names_in_cpp, replaced
from grpo_engine import _C
from grpo_engine.fused import fused

# By family the name that its classes begin with, and which of them run in C++.
ALL = {"RMSNorm", "MLP", "Attention"}
REPLACED = {
    "llama": ("Llama", ALL),
    "qwen2": ("Qwen2", ALL),
    "qwen3": ("Qwen3", ALL),
    "mistral": ("Mistral", ALL),
    "gemma2": ("Gemma2", ALL),
    "gemma3": ("Gemma3", ALL),
    "phi3": ("Phi3", {"RMSNorm"}),  # its projections are joined
    "smollm3": ("SmolLM3", ALL),
    "granite": ("Granite", ALL),
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def cpu_without_bfloat16_units(monkeypatch):
    monkeypatch.setattr(_C, "has_bfloat16_units", lambda: False)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_in_float32_are_the_models_own(family):
    model = make_model(family)
    own = model.get_decoder()(IDS, use_cache=False).last_hidden_state[0]  # its own attention too
    outside = by_route(model)
    assert_near(outside, own)
    assert_near(in_cpp(model), own)
    assert torch.equal(by_route(model), outside)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_in_half_precision_are_as_exact_as_the_models_own(family, dtype):
    model = make_model(family).to(dtype)
    truth = by_route(copy.deepcopy(model).float())
    error, own_error = ((x.float() - truth).norm() for x in (in_cpp(model), by_route(model)))
    assert error <= 1.25 * own_error
    assert own_error <= {torch.bfloat16: 0.03, torch.float16: 0.004}[dtype] * truth.norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_modules_run_in_cpp_and_that_they_are_put_back(family, dtype):
    model = make_model(family).to(dtype)
    prefix, parts = REPLACED[family]
    kinds = {prefix + part for part in parts} | {"Linear"}
    decoder = model.get_decoder()
    wanted = {n for n, m in decoder.named_modules() if type(m).__name__ in kinds}
    assert {type(m).__name__ for m in decoder.modules()} >= kinds
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    state = torch.get_rng_state()
    with fused(model):
        assert set(replaced(decoder)) == wanted
        assert "forward" not in vars(model.lm_head)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exception_inside_puts_everything_back():
    model = make_model()
    with pytest.raises(KeyError, match="inside"), fused(model):
        assert replaced(model)
        raise KeyError("inside")
    assert not replaced(model)
    assert model.config._attn_implementation != "grpo_engine_group"


def test_on_another_device_nothing_is_replaced():
    with torch.device("meta"):
        model = make_model()
    assert names_in_cpp(model) == set()


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_added(merged):
    base = make_model()
    without = by_route(base)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    if merged:
        model.merge_adapter()
    wanted = by_route(model)
    assert (wanted - without).abs().max() > 0.1
    assert_near(in_cpp(model), wanted, 3e-5)
    found = {n.rpartition(".")[2] for n in names_in_cpp(model)}
    assert found >= {"self_attn", "mlp", "base_layer", "input_layernorm"}
    with model.disable_adapter():
        assert_near(in_cpp(model), without, 3e-5)


def test_weights_that_changed_between_and_within_are_seen():
    model = make_model()
    first = in_cpp(model)
    for parameter in model.parameters():
        parameter.mul_(1.25)
    wanted = by_route(model)
    assert (wanted - first).abs().max() > 0.1
    assert_near(in_cpp(model), wanted)
    with fused(model):
        by_route(model)
        for parameter in model.parameters():
            parameter.div_(1.25)
        assert_near(by_route(model), first)
    other = make_model(seed=1)
    model.load_state_dict(other.state_dict(), assign=True)  # other tensors, not the same ones
    assert_near(in_cpp(model), by_route(other))


def test_another_dtype_of_the_same_model():
    model = make_model()
    in_cpp(model)
    model.bfloat16()
    assert_near(in_cpp(model), by_route(model), 0.05)
    model.float()
    assert_near(in_cpp(model), by_route(model))


@pytest.mark.parametrize(("dtype", "in_torch"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_cpu_with_bfloat16_units_makes_such_products_itself(dtype, in_torch, monkeypatch):
    monkeypatch.setattr(_C, "has_bfloat16_units", lambda: True)
    model = make_model().to(dtype)
    names = names_in_cpp(model)
    assert not [n for n in names if n.endswith("_proj")] == in_torch
    assert names >= {"model.layers.0.mlp", "model.layers.1.self_attn", "model.norm"}
    wanted, used, stock = by_route(model), [], nn.Linear.forward
    with fused(model):
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: used.append(1) or stock(self, x))
        given = by_route(model)
    assert len(used) == (14 if in_torch else 0)  # 7 in each of 2 layers
    assert_near(given, wanted, 0.05 if in_torch else 1e-5)
