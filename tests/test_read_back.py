"""The first checkpoint is read back, and a folder of weights says what ends an answer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from conftest import CHARS, make_model, make_tokenizer
from grpo_engine import UserError
from grpo_engine.cli import main
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.export import merge_policy
from grpo_engine.model import Policy, load_policy
from grpo_engine.read_back import check_saved
from grpo_engine.trainer import Trainer
from runs import tiny_config

KINDS = {"adapter": LoraConfig(rank=4), "model": None}
WEIGHTS = {"adapter": "adapter/adapter_model.safetensors", "model": "model/model.safetensors"}


def renamed(state: dict) -> None:
    name = next(n for n in state if "layers.1" in n and "q_proj" in n)
    state[name.replace("layers.1", "layers.7")] = state.pop(name)


def reshaped(state: dict) -> None:
    name = next(n for n in state if "layers.1" in n and "q_proj" in n)
    state[name] = state[name][:-1].clone()


def changed(state: dict) -> None:
    name = next(n for n in state if "layers.1" in n and "q_proj" in n)
    state[name].view(-1)[3] += 1e-6


def break_saving(monkeypatch, damage) -> None:
    save = Policy.save

    def broken(policy: Policy, folder: Path) -> None:
        save(policy, folder)
        file = next(folder.glob("*model.safetensors"))
        state = load_file(file)
        damage(state)
        save_file(state, file, metadata={"format": "pt"})

    monkeypatch.setattr(Policy, "save", broken)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("adapter", renamed),
        ("adapter", reshaped),
        ("adapter", changed),
        ("model", renamed),
        ("model", reshaped),
    ],
)
def test_a_first_checkpoint_that_would_not_load_ends_the_run(
    kind, damage, model_folder, tmp_path, monkeypatch
):
    break_saving(monkeypatch, damage)
    config = tiny_config(model_folder, tmp_path, lora=KINDS[kind], train={"checkpoint_every": 1})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj"):
        Trainer(config).run()
    run = Path(config.train.out)
    assert not list((run / "checkpoints").glob("*"))
    assert len((run / "metrics.jsonl").read_text().splitlines()) <= 1


def test_a_weight_that_peft_would_not_save_is_named(model_folder, tmp_path):
    config = ModelConfig(str(model_folder), dtype="float32", device="cpu")
    policy = load_policy(config, KINDS["adapter"], needs_reference=False, resume=None)
    policy.save(tmp_path / "saved")
    check_saved(policy.model, config, tmp_path / "saved")
    policy.model.get_base_model().model.norm.requires_grad_(True)
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        check_saved(policy.model, config, tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_checkpoint_of_a_process_is_read_back(
    kind, model_folder, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        "grpo_engine.saving.check_saved", lambda model, config, folder: seen.append(folder.name)
    )
    config = tiny_config(
        model_folder, tmp_path, lora=KINDS[kind], train={"steps": 3, "checkpoint_every": 1}
    )
    Trainer(config).run()
    assert seen == [kind]


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_reads_back(tied, tmp_path):
    base = tmp_path / "base"
    make_model(tie_word_embeddings=tied).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    config = ModelConfig(str(base), dtype="float32", device="cpu")
    policy = load_policy(config, None, needs_reference=False, resume=None)
    policy.save(tmp_path / "saved")
    check_saved(policy.model, config, tmp_path / "saved")
    other = load_policy(config, None, needs_reference=False, resume=None)
    other.model.model.norm = torch.nn.LayerNorm(32)
    with pytest.raises(UserError, match=r"1 weights don't come back, model\.norm\.bias"):
        check_saved(other.model, config, tmp_path / "saved")


@pytest.fixture
def ends_apart(tmp_path) -> tuple[Path, list[int]]:
    """A model whose generation config, tokenizer and template each end answers with another token,
    and whose generation config transformers would not save once it was changed."""
    folder = tmp_path / "ends"
    make_model().save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}#{% endfor %}"
    tokenizer.save_pretrained(folder)
    values = {"eos_token_id": 7, "temperature": 0.5, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(values))
    ids = [7, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("#")]
    assert len(set(ids)) == 3 and "#" in CHARS
    return folder, sorted(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_say_what_ended_the_samples(kind, ends_apart, tmp_path):
    folder, ids = ends_apart
    config = tiny_config(folder, tmp_path, lora=KINDS[kind], train={"steps": 1})
    Trainer(config).run()
    out = Path(config.train.out)
    assert main(["export", str(out), str(tmp_path / "plain")]) == 0
    assert main(["export", str(out), str(tmp_path / "merged"), "--merge"]) == 0
    for saved in (out / kind, tmp_path / "plain", tmp_path / "merged"):
        generation = GenerationConfig.from_pretrained(saved)
        assert sorted(generation.eos_token_id) == ids and generation.temperature == 0.5
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert sorted(merged.generation_config.eos_token_id) == ids


def test_a_wrong_merge_is_refused_and_leaves_nothing(model_folder, tmp_path, monkeypatch):
    config = ModelConfig(str(model_folder), dtype="float32", device="cpu")
    policy = load_policy(config, KINDS["adapter"], needs_reference=False, resume=None)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)
    monkeypatch.setattr(type(policy.model.base_model), "merge_and_unload", lambda m: m.unload())
    out = tmp_path / "exports" / "merged"
    with pytest.raises(UserError, match=r"differs from the policy by [0-9.]+ nats"):
        merge_policy(policy, config, out)
    assert not list(out.parent.iterdir())


def test_a_merge_leaves_a_tied_head_tied(tmp_path, recwarn):
    base = tmp_path / "base"
    make_model(tie_word_embeddings=True).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    config = ModelConfig(str(base), dtype="float32", device="cpu")
    for targets, tied in (("q_proj", True), ("embed_tokens", False)):
        lora, out = LoraConfig(rank=4, targets=targets), tmp_path / targets
        policy = load_policy(config, lora, needs_reference=False, resume=None)
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.add_(0.1)
        merge_policy(policy, config, out)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied
    assert not [w for w in recwarn if "no longer tied" in str(w.message)]
