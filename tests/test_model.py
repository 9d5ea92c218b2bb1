"""Loading a policy, what trains in it, quantised bases, and saving it for other programs."""

import subprocess
import sys
from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import make_model, make_tokenizer
from grpo_engine import GroupSampler, SamplingParams, UserError
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.forward import causal_lm
from grpo_engine.model import Policy, load_policy
from grpo_engine.packed import completion_logprobs
from oracles import stock_logprobs

PROMPT, COMPLETION = list(range(3, 15)), list(range(30, 50))
LINEARS = {
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    )
}


def load(folder, lora=None, resume=None, dtype="float32", **options) -> Policy:
    """A policy on the CPU, without a reference; a fresh LoRA is always the same."""
    torch.manual_seed(4)
    config = ModelConfig(path=str(folder), dtype=dtype, device="cpu", **options)
    return load_policy(config, lora, needs_reference=False, resume=resume)


def logprobs(model: nn.Module) -> torch.Tensor:
    """Of a fixed completion, by the route of the loss; differentiable."""
    return completion_logprobs(model, [PROMPT], [COMPLETION], [1.0])[0]


def stock(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def shake(policy: Policy, size: float = 0.1) -> Policy:
    """Random changes of all that trains: a fresh LoRA is 0."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(size * torch.randn_like(parameter))
    return policy


def training_step(policy: Policy) -> None:
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    policy.model.train()
    (-logprobs(policy.model).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    policy.model.eval()


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory) -> Path:
    """Wide enough for 4-bit blocks of 64, and mild enough that rounding doesn't become chaos."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_model(std=0.1, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model_folder, tmp_path_factory) -> Path:
    """An adapter as peft saves it, rank 4 on two kinds of linears."""
    folder = tmp_path_factory.mktemp("adapters") / "sft"
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    peft.get_peft_model(stock(model_folder), config).save_pretrained(str(folder))
    return folder


def test_a_fresh_lora_is_on_all_linears_but_the_head_and_changes_nothing(model_folder):
    policy = load(model_folder, LoraConfig(rank=4, alpha=8))
    names = {
        name.split(".lora_")[0].removeprefix("base_model.model.") for name in policy.trainable()
    }
    assert names == LINEARS
    assert len(policy.trainable()) == 2 * len(LINEARS)
    assert {min(p.shape) for p in policy.trainable().values()} == {4}
    wanted = stock_logprobs(stock(model_folder), PROMPT, COMPLETION)
    torch.testing.assert_close(logprobs(policy.model).double(), wanted, atol=1e-5, rtol=0)
    scaling = causal_lm(policy.model).model.layers[0].mlp.up_proj.scaling
    assert scaling == {"default": 8 / 4}


def test_without_lora_all_weights_train(model_folder):
    policy = load(model_folder)
    assert policy.trainable().keys() == dict(stock(model_folder).named_parameters()).keys()
    wanted = stock_logprobs(stock(model_folder), PROMPT, COMPLETION)
    torch.testing.assert_close(logprobs(policy.model).double(), wanted, atol=1e-5, rtol=0)
    logprobs(policy.model).sum().backward()
    assert all(p.grad.any() for p in policy.trainable().values())


def test_an_adapter_goes_on_with_its_own_rank_alpha_and_targets(model_folder, adapter):
    policy = load(model_folder, LoraConfig(rank=16, alpha=32, adapter=str(adapter)))
    plain = stock_logprobs(stock(model_folder), PROMPT, COMPLETION)
    loaded = peft.PeftModel.from_pretrained(stock(model_folder), str(adapter))
    wanted = stock_logprobs(loaded, PROMPT, COMPLETION)
    assert (wanted - plain).abs().max() > 0.1
    torch.testing.assert_close(logprobs(policy.model).double(), wanted, atol=1e-5, rtol=0)
    assert {n.rpartition(".lora_")[0].split(".")[-1] for n in policy.trainable()} == {
        "q_proj",
        "up_proj",
    }
    logprobs(policy.model).sum().backward()
    assert all(p.grad.any() for p in policy.trainable().values())


def test_lora_dropout_is_that_of_the_run_also_for_an_adapter_of_another(model_folder, adapter):
    for lora in (LoraConfig(dropout=0.5), LoraConfig(dropout=0.5, adapter=str(adapter))):
        model = shake(load(model_folder, lora)).model
        rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
        assert rates == {0.5}
        assert not torch.equal(logprobs(model.train()), logprobs(model))
        assert torch.equal(logprobs(model.eval()), logprobs(model))


@pytest.mark.parametrize("base", ["none", "8bit", "4bit"])
def test_no_bit_of_the_base_changes_by_sampling_scoring_and_training(wide_folder, base):
    policy = shake(load(wide_folder, LoraConfig(rank=4), base=base))

    def frozen() -> dict[str, torch.Tensor]:
        state = policy.model.state_dict()
        return {n: t.clone() for n, t in state.items() if "lora_" not in n and torch.is_tensor(t)}

    before, start = frozen(), {n: p.detach().clone() for n, p in policy.trainable().items()}
    assert sum("weight" in name for name in before) >= len(LINEARS) + 7
    GroupSampler(policy.model).generate([PROMPT], 3, SamplingParams(max_tokens=5, seed=0))
    with torch.no_grad():
        logprobs(policy.model)
    training_step(policy)
    after = frozen()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(not torch.equal(p, start[name]) for name, p in policy.trainable().items())


QUANTISED = {"8bit": bnb.nn.Linear8bitLt, "4bit": bnb.nn.Linear4bit}
# Bounds of the largest difference of a token's log-prob from the unquantised model's (measured:
# 0.04 and 0.57) and of the cosine of the gradients with its gradients (0.9996 and 0.94).
LOGP_GAP = {"8bit": 0.1, "4bit": 1.0}
GRADIENT_COSINE = {"8bit": 0.99, "4bit": 0.9}


@pytest.mark.parametrize("base", QUANTISED)
def test_a_quantised_base_is_near_the_unquantised_one_and_its_lora_learns_alike(wide_folder, base):
    policy, plain = (load(wide_folder, LoraConfig(rank=4), base=b) for b in (base, "none"))
    causal = causal_lm(policy.model)
    quantised = {
        name.removesuffix(".base_layer")
        for name, module in causal.named_modules()
        if isinstance(module, QUANTISED[base]) and module.weight.dtype in (torch.int8, torch.uint8)
    }
    assert quantised == LINEARS and type(causal.lm_head) is nn.Linear
    with torch.no_grad():
        gap = (logprobs(policy.model) - logprobs(plain.model)).abs().max()
    assert 1e-3 < gap < LOGP_GAP[base]

    for one in (policy, plain):
        logprobs(shake(one, 0.02).model.train()).sum().backward()
    given, wanted = (
        torch.cat([p.grad.flatten() for p in one.trainable().values()]) for one in (policy, plain)
    )
    assert torch.cosine_similarity(given, wanted, dim=0) > GRADIENT_COSINE[base]


def test_a_bfloat16_model_is_the_rounded_one_and_its_lora_is_float32(model_folder):
    policy = load(model_folder, LoraConfig(rank=4), dtype="bfloat16")
    wanted = dict(stock(model_folder).named_parameters())
    for name, parameter in policy.model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if name in wanted:
            assert torch.equal(parameter, wanted.pop(name).bfloat16())
    assert not wanted
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    rounded = AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.bfloat16)
    logp = logprobs(policy.model)
    assert logp.dtype == torch.float32
    stock_logp = stock_logprobs(rounded, PROMPT, COMPLETION)  # rounds its logits to bfloat16, too
    exact = stock_logprobs(rounded.float(), PROMPT, COMPLETION)
    gap, stock_gap = ((x - exact).abs().max() for x in (logp, stock_logp))
    assert 0 < gap <= stock_gap + 0.01 < 0.2


FRESH_PROCESS = """
import sys, peft, torch, transformers
base, adapter, model, out = sys.argv[1:]
ids = torch.arange(3, 40)[None]
with torch.no_grad():
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(plain, adapter).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(x) for x in (adapter, model)]
    torch.save(
        {"adapter": tuned(ids).logits, "model": whole(ids).logits,
         "ids": [t("1+1=?")["input_ids"] for t in tokenizers]}, out)
"""


def test_what_is_saved_loads_in_a_fresh_process_without_us(model_folder, tmp_path):
    policies = {"adapter": shake(load(model_folder, LoraConfig(rank=4))), "model": None}
    policies["model"] = shake(load(model_folder))
    for name, policy in policies.items():
        training_step(policy)
        policy.save(tmp_path / name)
    folders = [model_folder, tmp_path / "adapter", tmp_path / "model", tmp_path / "out.pt"]
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *map(str, folders)], check=True)
    loaded, ids = torch.load(tmp_path / "out.pt"), torch.arange(3, 40)[None]
    plain = stock(model_folder)(ids).logits
    for name, policy in policies.items():
        wanted = policy.model(input_ids=ids).logits
        assert (wanted - plain).abs().max() > 0.1
        torch.testing.assert_close(loaded[name], wanted, atol=1e-5, rtol=0)
    assert loaded["ids"] == [make_tokenizer()("1+1=?")["input_ids"]] * 2


@pytest.mark.parametrize("kind", ["lora", "all weights", "adapter"])
def test_resuming_takes_the_saved_weights(model_folder, adapter, tmp_path, kind):
    lora = {
        "lora": LoraConfig(rank=4),
        "all weights": None,
        "adapter": LoraConfig(adapter=str(adapter)),
    }[kind]
    policy = shake(load(model_folder, lora))
    policy.save(tmp_path / "saved")
    assert list((tmp_path / "saved").glob("*.safetensors"))
    assert not list((tmp_path / "saved").glob("**/*.bin"))
    resumed = load(model_folder, lora, resume=tmp_path / "saved")
    assert resumed.trainable().keys() == policy.trainable().keys()
    for name, parameter in policy.trainable().items():
        assert torch.equal(resumed.trainable()[name], parameter)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "lm_head"], "head"),
        (["lm_head"], "head"),
        (["q_proj", "nonesuch"], "nonesuch"),
        (["nonesuch"], "nonesuch"),
        ("nonesuch", "nonesuch"),
    ],
)
def test_lora_on_the_head_or_on_modules_that_are_not_there_is_refused(
    model_folder, targets, message
):
    with pytest.raises(UserError, match=message) as caught:
        load(model_folder, LoraConfig(targets=targets))
    assert "\n" not in str(caught.value) and "lora.targets" in str(caught.value)
