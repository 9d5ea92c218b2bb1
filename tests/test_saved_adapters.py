"""What is saved loads: by us, by peft and, merged, by transformers, from any folder."""

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from conftest import make_model, make_tokenizer
from grpo_engine import GroupSampler, SamplingParams, UserError
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.export import merge_policy
from grpo_engine.forward import evaluating
from grpo_engine.model import Policy, load_policy
from grpo_engine.packed import completion_logprobs
from grpo_engine.read_back import check_saved
from oracles import stock_logprobs

PROMPT, COMPLETION = list(range(3, 15)), list(range(30, 50))
TARGETS = {
    "all linears": "all-linear",
    "one name": "q_proj",
    "a path": "layers.1.mlp.up_proj",
    "a list": ["q_proj", "down_proj"],
    "embeddings": ["q_proj", "embed_tokens"],
    "embeddings alone": "embed_tokens",
}
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
ADAPTERS = {
    "plain": {},
    "regex": {"target_modules": r".*layers\.1\..*(q|up)_proj"},
    "some layers": {"layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "DoRA on embeddings": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "whole embeddings": {"modules_to_save": ["embed_tokens"]},
    "both whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both whole and one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "a whole norm": {"modules_to_save": ["norm", "input_layernorm"]},
    "biases": {"bias": "all"},
    "biases of LoRA layers": {"bias": "lora_only"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
REFUSED = {
    "on the head": ({"target_modules": ["q_proj", "lm_head"]}, "head"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "pissa"),
    "a bias that can't be merged": ({"lora_bias": True}, "lora_bias"),
    "tokens of a tied head": ({"trainable_token_indices": [5]}, "head"),
    "activated": ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
    "layers twice": ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
}


@pytest.fixture(scope="module", params=["llama", "llama tied", "qwen2", "gemma3"])
def base(request, tmp_path_factory) -> Path:
    """Qwen2's linears have biases, Gemma3's embeddings a scale and, as most, ties to the head."""
    family, *tied = request.param.split()
    folder = tmp_path_factory.mktemp("models") / "base"
    made = make_model(family, **({"tie_word_embeddings": True} if tied else {}))
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    made.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def ours(model: nn.Module) -> Tensor:
    with evaluating(model):
        return completion_logprobs(model, [PROMPT], [COMPLETION], [1.0])[0].double()


@torch.no_grad()
def theirs(model: nn.Module) -> Tensor:
    return stock_logprobs(model.eval(), PROMPT, COMPLETION)


def assert_equal(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=0)


def shake(model: nn.Module) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def stock(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def given_adapter(base: Path, folder: Path, **changes) -> Path:
    """As supervised training with peft leaves it."""
    torch.manual_seed(2)
    model = peft.get_peft_model(stock(base), peft.LoraConfig(**(PLAIN | changes)))
    shake(model)
    model.save_pretrained(str(folder))
    return folder


def load(config: ModelConfig, lora: LoraConfig, resume: Path | None = None) -> Policy:
    return load_policy(config, lora, needs_reference=True, resume=resume)


def assert_sampled_alike(policy: Policy) -> None:
    params = SamplingParams(max_tokens=6, seed=1)
    for rollout in GroupSampler(policy.model, policy.tokenizer).generate([PROMPT], 2, params)[0]:
        with torch.no_grad():
            wanted = completion_logprobs(policy.model, [PROMPT], [rollout.completion_ids], [1.0])[0]
        assert_equal(rollout.logp_sampler, wanted)


def assert_it_comes_back(base: Path, lora: LoraConfig, folder: Path, monkeypatch) -> None:
    """Trained a little, saved, and loaded in every way from another folder."""
    monkeypatch.chdir(base.parent)
    config = ModelConfig(path=base.name, dtype="float32", device="cpu")
    policy = load(config, lora)
    with policy.reference() as model:
        start = ours(model)
    assert_equal(ours(policy.model), start)
    shake(policy.model)
    wanted = ours(policy.model)
    assert (wanted - start).abs().max() > 0.05
    with policy.reference() as model:
        assert_equal(ours(model), start)
    assert_equal(theirs(policy.model), wanted)
    assert_sampled_alike(policy)

    policy.save(folder / "saved")
    check_saved(policy.model, config, folder / "saved")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    named = peft.PeftConfig.from_pretrained("../saved").base_model_name_or_path
    by_peft = peft.PeftModel.from_pretrained(stock(Path(named)), "../saved")
    assert_equal(theirs(by_peft), wanted)
    config = ModelConfig(path=str(base), dtype="float32", device="cpu")
    resumed = load(config, lora, Path("../saved"))
    assert_equal(ours(resumed.model), wanted)
    with resumed.reference() as model:
        assert_equal(ours(model), start)

    assert merge_policy(resumed, config, Path("merged")) <= 3e-5
    merged = theirs(stock(Path("merged")))  # by products of another order
    torch.testing.assert_close(merged, wanted, atol=3e-5, rtol=0)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_a_new_adapter_comes_back(base, targets, tmp_path, monkeypatch):
    assert_it_comes_back(base, LoraConfig(rank=4, targets=targets), tmp_path, monkeypatch)


@pytest.mark.parametrize("changes", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_that_goes_on_comes_back(base, changes, tmp_path, monkeypatch):
    adapter = given_adapter(base, tmp_path / "given", **changes)
    lora = LoraConfig(adapter=str(adapter))
    assert_it_comes_back(base, lora, tmp_path, monkeypatch)


def test_an_adapter_on_tokens_comes_back_where_the_head_is_apart(
    model_folder, tmp_path, monkeypatch
):
    adapter = given_adapter(model_folder, tmp_path / "given", trainable_token_indices=[5, 31])
    assert_it_comes_back(model_folder, LoraConfig(adapter=str(adapter)), tmp_path, monkeypatch)


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_would_not_is_refused(changes, words, tmp_path):
    base = tmp_path / "base"
    make_model(tie_word_embeddings=True).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    adapter = given_adapter(base, tmp_path / "given", **changes)
    config = ModelConfig(path=str(base), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=words) as caught:
        load(config, LoraConfig(adapter=str(adapter)))
    assert "\n" not in str(caught.value)
