"""Checks in float32: erratic weights in bfloat16 are served, and stay what they were."""

from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import make_model, make_tokenizer, save_model_folder
from erratic import RARE, erratic_model
from grpo_engine import GroupSampler, SamplingParams
from grpo_engine.cli import main
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.exact import in_float32
from grpo_engine.export import open_run
from grpo_engine.forward import decoder_hidden
from grpo_engine.model import load_policy
from grpo_engine.packed import completion_logprobs
from grpo_engine.trainer import Trainer
from runs import metrics_of, tiny_config


def hidden(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return decoder_hidden(model, input_ids=torch.tensor([ids])).float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_the_stand_in_is_erratic_on_rare_ids_alone_as_real_models_are():
    model, ids = erratic_model(), list(range(20, 28))
    rare, usual = hidden(model, RARE), hidden(model, ids)
    model.to(torch.bfloat16)
    assert distance(hidden(model, RARE), rare) > 0.1
    assert distance(hidden(model, ids), usual) < 0.06


@pytest.mark.parametrize("tokenizer", [None, make_tokenizer()], ids=["ids", "text"])
def test_a_model_erratic_in_bfloat16_is_served(tokenizer):
    model = erratic_model().to(torch.bfloat16)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (group,) = GroupSampler(model, tokenizer).generate([list(range(20, 40))], 4, params)
    completions = [rollout.completion_ids for rollout in group]
    logp, _ = completion_logprobs(model, [list(range(20, 40))] * 4, completions, [1.0] * 4)
    gap = (torch.cat([rollout.logp_sampler for rollout in group]) - logp.detach()).abs()
    assert len(gap) == 32 and gap.mean() < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_as_its_weights_do_in_float32(dtype):
    model = make_model("qwen3").to(dtype)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    wanted = hidden(make_model("qwen3").to(dtype).float(), RARE)
    with in_float32(model.get_decoder()):
        given = hidden(model, RARE)
    assert distance(hidden(model, RARE), wanted) > 5e-4 > 1e-4 > distance(given, wanted)
    for name, parameter in model.named_parameters():
        pointer, weights = before[name]
        assert parameter.data_ptr() == pointer and torch.equal(parameter, weights)


def test_a_layer_that_fails_leaves_its_weights_as_they_were(monkeypatch):
    model = make_model().to(torch.bfloat16)
    layer = model.get_decoder().layers[1]
    monkeypatch.setattr(layer.mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_float32(model.get_decoder()):
        hidden(model, RARE)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not layer._forward_hooks and not layer._forward_pre_hooks


def test_a_decoder_of_another_quantisation_runs_as_it_is():
    model = erratic_model().to(torch.bfloat16)
    own = hidden(model, RARE)
    model.get_decoder().layers[1].register_buffer("packed", torch.zeros(1, dtype=torch.int32))
    with in_float32(model.get_decoder()):
        assert torch.equal(hidden(model, RARE), own)
    del model.get_decoder().layers[1].packed
    with in_float32(model.get_decoder()):
        assert not torch.equal(hidden(model, RARE), own)


@pytest.mark.parametrize("base", ["8bit", "4bit"])
def test_quantised_linears_are_read_back_for_a_while(tmp_path, base):
    save_model_folder(tmp_path)
    erratic_model().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), base=base, device="cpu")
    policy = load_policy(config, LoraConfig(rank=2), needs_reference=False, resume=None)
    causal = policy.model.get_base_model()
    own = hidden(causal, RARE)
    with in_float32(causal.get_decoder()):
        alone = hidden(causal, RARE)
        pair = torch.tensor([RARE, list(range(20, 28))])
        with torch.no_grad():
            beside = decoder_hidden(causal, input_ids=pair)[:1]
    assert distance(beside, alone) < 1e-4 < 1e-2 < distance(own, alone)
    assert torch.equal(hidden(causal, RARE), own)


def test_samples_of_8_bit_linears_have_the_logprobs_of_the_trainer(tmp_path):
    save_model_folder(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32", base="8bit", device="cpu")
    policy = load_policy(config, LoraConfig(rank=2), needs_reference=False, resume=None)
    prompt, params = list(range(20, 40)), SamplingParams(max_tokens=8, ignore_eos=True)
    (group,) = GroupSampler(policy.model).generate([prompt], 4, params)
    completions = [rollout.completion_ids for rollout in group]
    policy.model.train()
    logp, _ = completion_logprobs(policy.model, [prompt] * 4, completions, [1.0] * 4)
    sampled = torch.cat([rollout.logp_sampler for rollout in group])
    torch.testing.assert_close(sampled, logp.detach(), atol=2e-5, rtol=0)


def test_a_run_with_the_default_dtype_trains_an_erratic_model(tmp_path, capsys):
    folder = save_model_folder(tmp_path / "model")
    erratic_model().save_pretrained(folder)
    config = tiny_config(
        folder, tmp_path, lora=LoraConfig(), model={"dtype": "bfloat16"}, train={"steps": 2}
    )
    Trainer(config).run()
    first, second = metrics_of(config)
    assert first["ratio_mean"] == 1.0 and first["kl"] == 0.0 and first["grad_norm"] > 0
    assert second["ratio_mean"] == 1.0 and 0 < second["kl"] < 0.5
    capsys.readouterr()
    assert main(["sample", config.train.out, "say abc", "-n", "2"]) == 0
    said = capsys.readouterr().out
    _, policy = open_run(Path(config.train.out))
    sampler = GroupSampler(policy.model, policy.tokenizer)
    for rollout in sampler.generate(["say abc"], 2, SamplingParams(max_tokens=6, seed=0))[0]:
        assert policy.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True) in said
