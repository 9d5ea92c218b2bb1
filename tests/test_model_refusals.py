"""Folders and adapters that can't be used: one line that names them, and nothing runs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, dynamic_module_utils

from conftest import make_model
from grpo_engine import UserError
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.model import load_policy
from grpo_engine.packed import completion_logprobs

WEIGHTS = "model.safetensors"


def load(path: str | Path, lora: LoraConfig | None = None, **options):
    config = ModelConfig(path=str(path), dtype="float32", device="cpu", **options)
    return load_policy(config, lora, needs_reference=False, resume=None)


def assert_refused(folder: Path, *words: str, **options) -> None:
    """By one line that holds the folder's path and the words."""
    with pytest.raises(UserError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(folder), *words):
        assert word in message


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    """A good folder, to be spoilt."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "no such")


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "owner/name/more", "./owner", "~/m"])
def test_what_can_be_no_hub_id_is_not_looked_for_on_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(
        UserError, match=f"no such model folder: {os.path.expanduser(name)} .*OWNER/NAME"
    ):
        load(name)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json")


def test_a_folder_without_tokenizer_is_refused(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert_refused(folder, "tokenizer")


def test_a_folder_with_pickled_weights_alone_is_refused(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert_refused(folder, "safetensors")


def test_pickled_weights_beside_safetensors_are_never_read(folder):
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    loaded = dict(load(folder).model.named_parameters())
    for name, tensor in load_file(folder / WEIGHTS).items():
        assert torch.equal(loaded[name], tensor)


def test_a_model_of_another_kind_is_refused(folder):
    edit_json(folder / "config.json", model_type="vit", architectures=["ViTModel"])
    assert_refused(folder, "causal LM")


def test_damaged_weights_are_refused(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert_refused(folder)


def test_weights_of_another_shape_are_refused(folder):
    edit_json(folder / "config.json", intermediate_size=32)
    assert_refused(folder)


def test_missing_weights_are_not_replaced_by_random_ones(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    edit_tensors(folder / WEIGHTS, lambda tensors: tensors.pop(name))
    assert_refused(folder, name)


def test_a_path_may_begin_with_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    given = load("~/model").model.get_output_embeddings().weight
    assert torch.equal(given, load_file(folder / WEIGHTS)["lm_head.weight"])


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def code_folder(folder, tmp_path, monkeypatch) -> Path:
    """A folder whose code leaves a file behind when it runs."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(folder / "config.json", model_type="own", auto_map=auto)
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "it ran")))
    return folder


def test_code_in_a_model_folder_is_refused_and_not_run(code_folder, tmp_path):
    assert_refused(code_folder, "custom code")
    assert not (tmp_path / "it ran").exists()


def test_code_in_a_folder_of_a_known_family_is_not_run(code_folder, tmp_path):
    edit_json(code_folder / "config.json", model_type="llama")
    assert type(load(code_folder).model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "it ran").exists()


def test_code_of_a_tokenizer_is_refused_and_not_run(code_folder, tmp_path):
    edit_json(code_folder / "config.json", model_type="llama", auto_map={})
    edit_json(
        code_folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
    )
    assert_refused(code_folder, "custom code")
    assert not (tmp_path / "it ran").exists()


def test_code_runs_where_it_is_trusted(code_folder, tmp_path):
    assert type(load(code_folder, trust_remote_code=True).model).__name__ == "OwnModel"
    assert (tmp_path / "it ran").exists()


@pytest.fixture
def adapter(tmp_path) -> Path:
    """An adapter of the tiny Llama, to be spoilt."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(make_model(), config).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def rename(tensors: dict) -> None:
    """As an adapter of a model that wraps this one would have it."""
    for name in list(tensors):
        tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)


def drop_one(tensors: dict) -> None:
    tensors.pop(sorted(tensors)[0])


def add_one(tensors: dict) -> None:
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] = torch.ones(4, 64)


@pytest.mark.parametrize("change", [rename, drop_one, add_one, dict.clear])
def test_an_adapter_whose_keys_do_not_match_is_refused(model_folder, adapter, change):
    edit_tensors(adapter / "adapter_model.safetensors", change)
    with pytest.raises(UserError) as caught:
        load(model_folder, LoraConfig(adapter=str(adapter)))
    assert "\n" not in str(caught.value)
    assert str(adapter) in str(caught.value) and "lora_" in str(caught.value)


def test_an_adapter_of_a_wider_model_is_refused(model_folder, adapter):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    peft.get_peft_model(make_model(hidden_size=64), config).save_pretrained(str(adapter))
    with pytest.raises(UserError) as caught:
        load(model_folder, LoraConfig(adapter=str(adapter)))
    assert "\n" not in str(caught.value) and str(adapter) in str(caught.value)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_folder_with_a_missing_file_is_refused(model_folder, adapter, file):
    (adapter / file).unlink()
    with pytest.raises(UserError, match=file):
        load(model_folder, LoraConfig(adapter=str(adapter)))


def test_the_adapter_of_these_tests_is_taken_when_nothing_is_wrong(model_folder, adapter):
    policy = load(model_folder, LoraConfig(adapter=str(adapter)))
    saved = load_file(adapter / "adapter_model.safetensors")
    loaded = {n.replace(".default", ""): p for n, p in policy.trainable().items()}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    with policy.model.disable_adapter():
        off, _ = completion_logprobs(policy.model, [[5, 6]], [[7, 8]], [1.0])
    on, _ = completion_logprobs(policy.model, [[5, 6]], [[7, 8]], [1.0])
    assert (on - off).abs().max() > 0.05


def test_a_device_that_is_none_is_refused(model_folder):
    config = ModelConfig(path=str(model_folder), device="graphics card")
    with pytest.raises(UserError, match="graphics card"):
        load_policy(config, None, needs_reference=False, resume=None)
