"""A run used from another folder, moved, and one whose adapter brings its own tokenizer."""

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import yaml

from conftest import make_model, make_tokenizer, save_model_folder
from grpo_engine import UserError
from grpo_engine.cli import main
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.forward import eos_ids
from grpo_engine.model import load_policy
from grpo_engine.paths import absolute, map_paths
from grpo_engine.prompts import encode_prompt
from runs import DIGITS


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A folder with model, data, reward and the run folder "out", all named by relative paths."""
    monkeypatch.chdir(tmp_path)
    save_model_folder(tmp_path / "m")
    Path("digits.py").write_text(DIGITS)
    Path("d.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    config = {
        "model": {"path": "m", "dtype": "float32"},
        "lora": {"rank": 4},
        "data": {"path": "d.jsonl", "eval_path": "d.jsonl"},
        "rewards": [{"function": "digits.py:digits"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {"steps": 1, "prompts_per_step": 1, "out": "out"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "run.yaml"]) == 0
    return tmp_path


def test_a_run_is_used_from_another_folder_and_moved(run, monkeypatch, capsys):
    (run / "else").mkdir()
    monkeypatch.chdir(run / "else")
    adapter = json.loads((run / "out/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(run / "m")
    shutil.move(run / "out", run / "moved")
    assert main(["sample", "../moved", "1+1="]) == 0
    assert main(["export", "../moved", "merged", "--merge"]) == 0
    resumed = ["--resume", "--train.steps", "2", "--train.out", "../moved"]
    assert main(["train", "../moved/config.yaml", *resumed]) == 0
    lines = (run / "moved/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 2


def test_a_folder_with_all_of_a_run_may_move(run, monkeypatch):
    there = run.with_name(f"{run.name}-there")
    shutil.move(run, there)
    monkeypatch.chdir(there)
    assert main(["train", "run.yaml", "--resume", "--train.steps", "2"]) == 0


def test_files_can_be_read_by_whoever_the_umask_lets(run):
    kept = os.umask(0)
    os.umask(kept)
    for path in (p for p in (run / "out").rglob("*.safetensors")):
        assert path.stat().st_mode & 0o777 == 0o666 & ~kept


def given_adapter(folder: Path, tokenizer) -> Path:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(make_model(), config).save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
    return folder


def test_an_adapters_tokenizer_goes_with_it(model_folder, tmp_path):
    own = make_tokenizer()
    own.eos_token, own.chat_template = "#", "Q: {{ messages[0]['content'] }}"
    adapter = given_adapter(tmp_path / "given", own)
    config = ModelConfig(str(model_folder), dtype="float32", device="cpu")
    chat = [{"role": "user", "content": "hi"}]
    for weights in (None, tmp_path / "saved"):
        policy = load_policy(
            config, LoraConfig(adapter=str(adapter)), needs_reference=False, resume=weights
        )
        assert policy.tokenizer.decode(encode_prompt(policy.tokenizer, chat)) == "Q: hi"
        assert own.convert_tokens_to_ids("#") in eos_ids(policy.model, policy.tokenizer)
        policy.save(tmp_path / "saved")


def test_a_tokenizer_of_another_model_beside_an_adapter_is_refused(tmp_path):
    folder = save_model_folder(tmp_path / "m")
    adapter = given_adapter(tmp_path / "given", make_tokenizer())
    file = adapter / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    config = ModelConfig(str(folder), dtype="float32", device="cpu")
    with pytest.raises(UserError, match="has the id"):
        load_policy(config, LoraConfig(adapter=str(adapter)), needs_reference=False, resume=None)


def test_the_members_of_an_ensemble_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "judge.py", "d.jsonl"):
        Path(name).touch()
    members = [
        "judge.py:f",
        {"function": "judge.py:g", "options": {"path": "judge.py"}, "timeout_s": 3.0},
        {"function": "reward_model", "options": {"path": "model"}},
        "length",
        {"functoin": "judge.py:h"},
        7,
    ]
    ensemble = {"function": "ensemble", "options": {"members": members, "rule": "min"}}
    values = map_paths({"rewards": [ensemble, {"function": "ensemble", "options": {}}]}, absolute)
    assert values["rewards"][0]["options"] == {
        "members": [
            f"{tmp_path}/judge.py:f",
            {
                "function": f"{tmp_path}/judge.py:g",
                "options": {"path": "judge.py"},
                "timeout_s": 3.0,
            },
            {"function": "reward_model", "options": {"path": f"{tmp_path}/model"}},
            *members[3:],
        ],
        "rule": "min",
    }
    assert values["rewards"][1] == {"function": "ensemble", "options": {}}


@pytest.mark.parametrize("command", [["sample", "out", "1+1="], ["export", "out", "x", "--merge"]])
def test_a_model_that_is_gone_is_named_with_the_key_to_change(run, command, capsys):
    (run / "m").rename(run / "n")
    capsys.readouterr()
    assert main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{run / 'm'}; put it back" in said
    assert "model.path" in said and "out/config.yaml" in said
    header = run / "out/config.yaml"
    header.write_text(header.read_text().replace(str(run / "m"), str(run / "n")))
    assert main(command) == 0
