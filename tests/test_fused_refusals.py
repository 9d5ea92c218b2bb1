"""Modules that others hook into or that compute otherwise stay as they are while a CPU samples."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Ministral3Config, OlmoConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from conftest import make_model
from fused_models import assert_near, by_route, in_cpp, names_in_cpp, replaced
from grpo_engine.fused import fused

SMALL = {
    "vocab_size": 75,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def layer_parts(model: nn.Module):
    layer = model.model.layers[1]
    return layer.self_attn, layer.mlp, layer.input_layernorm


HOOKED = [
    "model.layers.1.mlp",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.k_proj",
    "model.layers.1.input_layernorm",
]


def double(out):
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


@pytest.mark.parametrize("name", HOOKED)
def test_a_module_with_a_forward_hook_is_called_through_it(name):
    model, calls = make_model(), []
    plain = in_cpp(model)
    model.get_submodule(name).register_forward_hook(
        lambda _, inputs, out: calls.append(name) or double(out)
    )
    wanted = by_route(model)
    assert_near(in_cpp(model), wanted)
    assert calls == [name] * 2
    assert (wanted - plain).abs().max() > 0.1


@pytest.mark.parametrize("name", [n for n in HOOKED if n.endswith(("mlp", "proj"))])
def test_a_module_with_a_hook_before_its_forward_is_called_through_it(name):
    model, calls = make_model(), []
    plain = in_cpp(model)
    model.get_submodule(name).register_forward_pre_hook(
        lambda _, inputs: calls.append(name) or 2 * inputs[0]
    )
    wanted = by_route(model)
    assert_near(in_cpp(model), wanted)
    assert calls == [name] * 2
    assert (wanted - plain).abs().max() > 0.1


def test_hooks_on_all_modules_switch_it_off():
    model = make_model()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert names_in_cpp(model) == set()
    finally:
        handle.remove()
    assert names_in_cpp(model)


@pytest.mark.parametrize("name", HOOKED)
def test_a_forward_of_someone_else_on_the_instance_is_left_alone(name):
    model = make_model()
    module = model.get_submodule(name)
    stock = module.forward

    def doubled(*args, **kwargs):
        return double(stock(*args, **kwargs))

    module.forward = doubled
    wanted = by_route(model)
    with fused(model):
        assert vars(module)["forward"] is doubled
        given = by_route(model)
    assert vars(module)["forward"] is doubled
    assert set(replaced(model)) == {name}
    assert_near(given, wanted)


class LateRMSNorm(LlamaRMSNorm):
    """Adds its epsilon to the root, not to the mean square."""

    def forward(self, x):
        wide = x.float()
        root = wide.square().mean(-1, keepdim=True).sqrt()
        return self.weight * (wide / (root + self.variance_epsilon)).to(x.dtype)


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("kind", [LateRMSNorm, CentredRMSNorm])
def test_a_norm_that_computes_otherwise_is_left_alone(kind):
    model = make_model()
    _, _, norm = layer_parts(model)
    norm.__class__ = kind
    assert {n for n in names_in_cpp(model) if n.endswith("norm")} == {
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    }
    assert_near(in_cpp(model), by_route(model))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj"])
def test_a_linear_that_computes_otherwise_is_left_alone_in_what_is_around_it_too(name):
    model = make_model()
    plain = in_cpp(model)
    model.model.layers[1].get_submodule(name).__class__ = Doubled
    wanted = by_route(model)
    assert (wanted - plain).abs().max() > 0.1
    assert f"model.layers.1.{name}" not in names_in_cpp(model)
    assert_near(in_cpp(model), wanted)


class Added(LlamaMLP):
    """Adds what others multiply."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Bounded(LlamaMLP):
    """Clips what only large inputs reach."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-20, 20))


@pytest.mark.parametrize("kind", [Added, Bounded])
def test_an_mlp_that_computes_otherwise_is_left_alone(kind):
    model = make_model()
    _, mlp, _ = layer_parts(model)
    mlp.__class__ = kind
    names = names_in_cpp(model)
    assert "model.layers.0.mlp" in names and "model.layers.1.mlp" not in names
    mlp.up_proj.weight.mul_(10)
    assert_near(in_cpp(model), by_route(model))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.Hardswish()])
def test_an_mlp_with_another_activation_is_left_alone(activation):
    model = make_model()
    _, mlp, _ = layer_parts(model)
    mlp.act_fn = activation
    names = names_in_cpp(model)
    assert "model.layers.0.mlp" in names and "model.layers.1.mlp" not in names
    assert_near(in_cpp(model), by_route(model))


def test_an_attention_that_clips_is_left_alone_though_small_numbers_pass():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OlmoConfig(**SMALL, clip_qkv=8.0)).eval()
    free = AutoModelForCausalLM.from_config(OlmoConfig(**SMALL)).eval()
    assert not [n for n in names_in_cpp(model) if n.endswith("self_attn")]
    assert len([n for n in names_in_cpp(free) if n.endswith("self_attn")]) == 2
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(6)
    assert_near(in_cpp(model), by_route(model))


def test_an_attention_that_takes_other_inputs_is_left_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Ministral3Config(**SMALL, head_dim=8)).eval()
    assert not [n for n in names_in_cpp(model) if n.endswith("self_attn")]
    assert_near(in_cpp(model), by_route(model))


def test_a_module_that_gives_zeros_tells_nothing():
    model = make_model()
    _, mlp, _ = layer_parts(model)
    mlp.act_fn = nn.ReLU()
    weight = mlp.down_proj.weight.clone()
    mlp.down_proj.weight.zero_()
    assert "model.layers.1.mlp" not in names_in_cpp(model)
    mlp.down_proj.weight.copy_(weight)
    assert_near(in_cpp(model), by_route(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_activation_is_tried_anew(dtype):
    # In bfloat16 the two forms of GELU give the same rounded numbers.
    model = make_model("gemma3").to(dtype)
    mlp = model.get_decoder().layers[0].mlp
    with torch.no_grad(), fused(model):
        assert "forward" in vars(mlp)
    mlp.act_fn = torch.nn.GELU()
    with torch.no_grad(), fused(model):
        assert "forward" not in vars(mlp)
