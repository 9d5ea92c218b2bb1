"""What sampling leaves behind (nothing) and which state of the model it follows (all of it)."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM

from conftest import make_model
from grpo_engine import GroupSampler, Rollout, SamplingParams, UserError
from grpo_engine.forward import causal_lm
from oracles import stock_logprobs

PROMPTS = [list(range(3, 8)), list(range(10, 40))]
PARAMS = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)


def with_lora(model: nn.Module, targets="all-linear", dropout: float = 0.0) -> nn.Module:
    """The model with a LoRA that is not 0."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        target_modules=targets,
        lora_dropout=dropout,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def draw(model: nn.Module) -> list[Rollout]:
    return [r for group in GroupSampler(model).generate(PROMPTS, 3, PARAMS) for r in group]


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.completion_ids for r in rollouts]


@torch.no_grad()
def assert_scored_by(model: nn.Module, rollouts: list[Rollout]) -> None:
    """Their log-probs are those of the plain forward of `model`."""
    for r in rollouts:
        wanted = stock_logprobs(model, r.prompt_ids, r.completion_ids)
        torch.testing.assert_close(
            r.logp_sampler.double(), wanted, atol=1e-5, rtol=1e-5
        )  # logits of std 10


def flags(model: nn.Module) -> dict:
    """Everything that sampling might switch: per module, and in the configs."""
    causal = causal_lm(model)
    return {
        "modules": {
            name: (module.training, getattr(module, "gradient_checkpointing", None))
            for name, module in model.named_modules()
        },
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "config": copy.deepcopy(causal.config.to_dict()),
        "generation_config": copy.deepcopy(causal.generation_config.to_dict()),
        "attention": causal.config._attn_implementation,
        "grad": torch.is_grad_enabled(),
    }


def mixed_modes(model: nn.Module, use_cache: bool, checkpointing: bool) -> nn.Module:
    """In training mode but for one layer, as with a frozen part."""
    causal_lm(model).config.use_cache = use_cache
    if checkpointing:
        causal_lm(model).gradient_checkpointing_enable()
    model.train()
    causal_lm(model).model.layers[0].mlp.eval()
    return model


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_flags_are_put_back_exactly_and_change_no_sample(use_cache, checkpointing, lora):
    model = make_model()
    model = with_lora(model, dropout=0.5) if lora else model
    wanted = ids(draw(model.eval()))
    mixed_modes(model, use_cache, checkpointing)
    before = flags(model)
    assert ids(draw(model)) == wanted
    assert flags(model) == before
    modes, checkpointed = zip(*before["modules"].values(), strict=True)
    assert set(modes) == {True, False} and any(checkpointed) == checkpointing


def test_flags_are_put_back_when_sampling_fails_half_way():
    model = mixed_modes(with_lora(make_model(), dropout=0.5), use_cache=False, checkpointing=True)
    sampler = GroupSampler(model)
    before, calls = flags(model), []

    def fail(*_) -> None:
        calls.append(model.training)
        if len(calls) == 4:
            raise RuntimeError("no memory, say")

    hook = causal_lm(model).model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory, say"):
        sampler.generate(PROMPTS, 3, PARAMS)
    assert calls == [False] * 4
    assert flags(model) == before
    hook.remove()
    assert ids(draw(model)) == ids(draw(model.eval()))


def test_lora_dropout_is_off_while_sampling_in_training_mode():
    model = with_lora(make_model(), dropout=0.5)
    rollouts = draw(model.train())
    assert model.training
    assert_scored_by(model.eval(), rollouts)


@pytest.mark.parametrize("change", ["weights", "adapter", "adapter_off", "head"])
def test_after_a_change_sampling_equals_that_of_a_fresh_sampler(change):
    model = with_lora(make_model())
    sampler = GroupSampler(model)
    before = sampler.generate(PROMPTS, 3, PARAMS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = "adapter" if "lora_" in name else "head" if "lm_head" in name else "weights"
            if part == change:
                parameter.mul_(1.5)
    if change == "adapter_off":
        model.base_model.disable_adapter_layers()
    sampler.update_policy()
    after = [r for group in sampler.generate(PROMPTS, 3, PARAMS) for r in group]
    assert ids(after) != ids([r for group in before for r in group])
    fresh = draw(copy.deepcopy(model))
    assert ids(after) == ids(fresh)
    for a, b in zip(after, fresh, strict=True):
        assert torch.equal(a.logp_sampler, b.logp_sampler)
    assert_scored_by(model, after)


def test_two_samplers_may_share_a_model():
    model = make_model()
    first, second = GroupSampler(model), GroupSampler(model, slots=1)
    alone = ids(draw(model))
    for sampler in (first, second, first):
        assert ids([r for g in sampler.generate(PROMPTS, 3, PARAMS) for r in g]) == alone


def test_sampling_changes_no_bit_of_the_model():
    model = with_lora(make_model())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draw(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"], ["embed_tokens"]], ids=str)
def test_lora_is_applied_or_refused_on_head_and_embeddings_too(targets):
    model = with_lora(make_model(), targets).eval()
    try:
        rollouts = draw(model)
    except (UserError, ValueError) as refusal:
        assert targets[-1] in str(refusal) and targets != ["q_proj"]
    else:
        assert_scored_by(model, rollouts)


class ScaledLlama(LlamaForCausalLM):
    """Scales its logits in a way that no config says."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out


def test_a_model_whose_logits_are_not_known_is_refused():
    with pytest.raises(UserError, match=r"ScaledLlama.*logits"):
        draw(ScaledLlama(make_model().config).eval())


def test_a_model_with_linear_attention_layers_is_refused():
    model = MambaForCausalLM(
        MambaConfig(vocab_size=75, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises((UserError, ValueError), match=r"Mamba|linear"):
        draw(model.eval())
