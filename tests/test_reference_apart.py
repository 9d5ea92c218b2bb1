"""A reference that would follow the policy is refused by what it reads; no sound one is."""

import copy
from contextlib import contextmanager

import peft
import pytest
import torch
from torch import nn

from conftest import make_model
from grpo_engine.errors import UserError
from grpo_engine.model import _adapter_off, _frozen
from grpo_engine.packed import completion_logprobs
from grpo_engine.reference import check_reference

PROMPT, COMPLETION = [5, 6, 7], list(range(10, 30))


@torch.no_grad()
def scored(scope) -> torch.Tensor:
    with scope() as model:
        return completion_logprobs(model, [PROMPT], [COMPLETION], [1.0])[0]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


@torch.no_grad()
def moves(model: nn.Module, scope) -> float:
    """By how many nats a change of all that is trained moves the reference."""
    before = scored(scope)
    torch.manual_seed(0)
    for _, parameter in trainable(model):
        parameter.add_(0.1 * torch.randn_like(parameter))
    return float((scored(scope) - before).abs().max())


def adapted(base: nn.Module | None = None, **options) -> nn.Module:
    base = base or make_model("qwen2")  # it has biases
    options = {"target_modules": ["q_proj"]} | options
    return peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, **options))


SOUND = {
    "all-linear": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole embeddings": {"modules_to_save": ["embed_tokens"]},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [10, 11]}},
}


@pytest.mark.parametrize(
    ("kind", "tied"), [(kind, tied) for kind in SOUND for tied in (False, True)][:-1]
)  # tokens of a tied head are refused before
def test_with_the_adapter_off_nothing_trained_is_read(kind, tied):
    model = adapted(make_model("qwen2", tie_word_embeddings=tied), **SOUND[kind])
    check_reference(trainable(model), _adapter_off(model))
    assert moves(model, _adapter_off(model)) == 0


@pytest.mark.parametrize("bias, name", [("all", "q_proj.base_layer.bias"), ("lora_only", "bias")])
def test_biases_that_train_outside_the_adapter_stay_when_it_is_off(bias, name):
    model = adapted(bias=bias)
    with pytest.raises(UserError, match=rf"follow the policy: it computes with .*{name}.*trained"):
        check_reference(trainable(model), _adapter_off(model))
    assert moves(model, _adapter_off(model)) > 0.1  # so it is no false alarm


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_copy_of_all_weights_shares_none(tied):
    model = make_model(tie_word_embeddings=tied)
    scope = _frozen(copy.deepcopy(model))
    check_reference(trainable(model), scope)
    assert moves(model, scope) == 0


def test_the_policy_itself_is_no_reference():
    model = make_model()

    @contextmanager
    def follows():
        yield model

    with pytest.raises(UserError, match=r"embed_tokens.weight and \d+ others, which is trained"):
        check_reference(trainable(model), follows)


def test_one_shared_tensor_is_enough():
    model, other = make_model(), make_model(seed=1)
    shared = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    other.model.layers[1].mlp.up_proj.weight = nn.Parameter(shared.detach())  # not the same object
    with pytest.raises(UserError, match=r"with model.layers.1.mlp.up_proj.weight, which is"):
        check_reference(trainable(model), _frozen(other))
