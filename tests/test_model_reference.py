"""The reference policy: which model it is, and that training never moves it."""

from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import make_model, save_model_folder
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.forward import evaluating
from grpo_engine.model import Policy, load_policy
from grpo_engine.packed import completion_logprobs
from oracles import stock_logprobs

PROMPTS, COMPLETIONS = [list(range(3, 15)), [9]], [list(range(30, 50)), list(range(60, 70))]


def load(folder, lora=None, resume=None, **options) -> Policy:
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu", **options)
    return load_policy(config, lora, needs_reference=True, resume=resume)


def logprobs(model: nn.Module) -> torch.Tensor:
    return completion_logprobs(model, PROMPTS, COMPLETIONS, [1.0, 1.0])[0]


@torch.no_grad()
def scored(policy: Policy) -> torch.Tensor:
    """Log-probs of the reference, as the trainer scores them."""
    with policy.reference() as model, evaluating(model):
        return logprobs(model)


@torch.no_grad()
def of_policy(policy: Policy) -> torch.Tensor:
    with evaluating(policy.model):
        return logprobs(policy.model)


@torch.no_grad()
def of(model: nn.Module) -> torch.Tensor:
    """By the plain forward of a stock model."""
    rows = zip(PROMPTS, COMPLETIONS, strict=True)
    return torch.cat([stock_logprobs(model, p, c) for p, c in rows]).float()


def stock(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def train(policy: Policy, steps: int = 2) -> None:
    """Steps that move the policy by far more than any tolerance here."""
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.5)
    policy.model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        (-logprobs(policy.model).mean()).backward()
        optimizer.step()
    policy.model.eval()


def k3(logp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return ((ref - logp).exp() - (ref - logp) - 1).mean()


def assert_close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=0)


# Besides a plain adapter one that also saved a whole head, as supervised training often does.
@pytest.fixture(scope="module", params=["plain", "with head"])
def adapter(request, model_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / request.param.replace(" ", "-")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "up_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"] if request.param == "with head" else None,
    )
    model = peft.get_peft_model(stock(model_folder), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    folder = save_model_folder(tmp_path_factory.mktemp("models") / "other")
    make_model(seed=11).save_pretrained(folder)
    return folder


def test_the_reference_of_a_fresh_lora_is_the_base_model(model_folder):
    policy = load(model_folder, LoraConfig(rank=4, dropout=0.3))
    wanted = of(stock(model_folder))
    assert k3(of_policy(policy), scored(policy)) == 0
    train(policy)
    assert k3(of_policy(policy), wanted) > 0.1
    assert_close(scored(policy), wanted)


def test_the_reference_of_all_weights_is_a_copy_from_before_training(model_folder):
    policy = load(model_folder)
    wanted, before = of(stock(model_folder)), scored(policy)
    assert k3(of_policy(policy), before) == 0
    train(policy)
    assert k3(of_policy(policy), wanted) > 0.1
    assert torch.equal(scored(policy), before)
    assert_close(before, wanted)
    with policy.reference() as model:
        ours = {p.data_ptr() for p in policy.model.parameters()}
        assert all(p.data_ptr() not in ours and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "lora"])
def test_the_reference_may_be_another_folder(model_folder, other_folder, lora):
    policy = load(model_folder, lora, reference=str(other_folder))
    assert_close(of_policy(policy), of(stock(model_folder)))
    assert_close(scored(policy), of(stock(other_folder)))
    train(policy, steps=1)
    assert_close(scored(policy), of(stock(other_folder)))


def test_the_reference_of_a_continued_adapter_is_a_second_frozen_one(model_folder, adapter):
    policy = load(model_folder, LoraConfig(adapter=str(adapter), dropout=0.3))
    with_adapter = of(peft.PeftModel.from_pretrained(stock(model_folder), str(adapter)))
    assert k3(of(stock(model_folder)), with_adapter) > 0.1  # the base is not the reference
    assert_close(of_policy(policy), with_adapter)
    before = scored(policy)
    assert k3(of_policy(policy), before) == 0
    train(policy)
    assert k3(of_policy(policy), before) > 0.01
    assert torch.equal(scored(policy), before)
    assert_close(before, with_adapter)


def test_a_continued_adapter_may_have_another_reference(model_folder, other_folder, adapter):
    policy = load(model_folder, LoraConfig(adapter=str(adapter)), reference=str(other_folder))
    assert_close(scored(policy), of(stock(other_folder)))
    assert not [name for name, _ in policy.model.named_parameters() if ".reference." in name]


@pytest.mark.parametrize("fails", [False, True])
def test_scoring_puts_the_trained_adapter_back_as_it_was(model_folder, adapter, fails):
    for lora in (LoraConfig(rank=4), LoraConfig(adapter=str(adapter))):
        policy = load(model_folder, lora)
        train(policy, steps=1)
        trainable, wanted = list(policy.trainable()), of_policy(policy)
        # What trains is one adapter, never the reference.
        assert trainable and not [name for name in trainable if ".reference." in name]
        gradients = {name: p.grad.clone() for name, p in policy.trainable().items()}
        if fails:
            with pytest.raises(RuntimeError, match="no memory"), policy.reference():
                raise RuntimeError("no memory")
        else:
            scored(policy)
        assert list(policy.trainable()) == trainable
        assert all(torch.equal(p.grad, gradients[n]) for n, p in policy.trainable().items())
        assert policy.model.active_adapters == ["default"]
        assert torch.equal(of_policy(policy), wanted)


def assert_reference_outlives_resuming(folder: Path, lora: LoraConfig | None, saved: Path) -> None:
    policy = load(folder, lora)
    reference = scored(policy)
    train(policy)
    policy.save(saved)
    resumed = load(folder, lora, resume=saved)
    assert_close(of_policy(resumed), of_policy(policy))
    assert k3(of_policy(resumed), reference) > 0.01
    assert_close(scored(resumed), reference)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "lora"])
def test_after_resuming_the_reference_is_the_model_from_before_training(
    model_folder, tmp_path, lora
):
    assert_reference_outlives_resuming(model_folder, lora, tmp_path / "saved")


def test_after_resuming_the_reference_is_the_adapter_from_before_training(
    model_folder, adapter, tmp_path
):
    lora = LoraConfig(adapter=str(adapter))
    assert_reference_outlives_resuming(model_folder, lora, tmp_path / "saved")


def test_without_need_of_a_reference_there_is_no_second_adapter(model_folder, adapter):
    config = ModelConfig(path=str(model_folder), dtype="float32", device="cpu")
    lora = LoraConfig(adapter=str(adapter))
    policy = load_policy(config, lora, needs_reference=False, resume=None)
    assert policy.reference is None and list(policy.model.peft_config) == ["default"]


def test_what_is_saved_is_the_trained_adapter_not_the_reference(model_folder, adapter, tmp_path):
    policy = load(model_folder, LoraConfig(adapter=str(adapter)))
    train(policy)
    policy.save(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(stock(model_folder), str(tmp_path / "saved"))
    assert_close(of(loaded), of_policy(policy))
    assert k3(of(loaded), scored(policy)) > 0.01
