"""Paths as a person writes them: a ~, spaces, letters of other alphabets, no home folder."""

import os
from pathlib import Path

import pytest
import yaml

from conftest import save_model_folder, write_jsonl
from grpo_engine.cli import main
from grpo_engine.config import DataConfig, LoraConfig, ModelConfig, TrainConfig
from grpo_engine.errors import UserError
from grpo_engine.parsing import parse_run
from grpo_engine.sample_config import RewardConfig

REWARD = "def letters(completions, **_):\n    return [float(len(set(c))) for c in completions]\n"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder with a model, data, a reward file and an adapter, none of which lie here."""
    folder = tmp_path / "Zoë's home 家"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    save_model_folder(folder / "a model")
    write_jsonl(folder / "tasks.jsonl", [{"prompt": f"say {word}"} for word in ("one", "two")])
    (folder / "my reward.py").write_text(REWARD)
    return folder


def config(**changes) -> dict:
    made = {
        "model": {"path": "~/a model", "dtype": "float32"},
        "data": {"path": "~/tasks.jsonl", "eval_path": "~/tasks.jsonl"},
        "lora": {"rank": 4},
        "rewards": [{"function": "~/my reward.py:letters"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {"steps": 1, "prompts_per_step": 2, "out": "~/runs/one"},
    }
    return {
        name: group | changes.get(name, {}) if name != "rewards" else group
        for name, group in made.items()
    }


def test_every_path_may_begin_with_the_home_folder(home, capsys):
    (home / "run.yaml").write_text(yaml.safe_dump(config()))
    assert main(["train", "~/run.yaml"]) == 0
    assert (home / "runs/one/adapter/adapter_model.safetensors").is_file()
    # Its adapter is gone on with, and its answers are looked at.
    changes = {"lora": {"adapter": "~/runs/one/adapter"}, "train": {"out": "~/runs/two"}}
    (home / "run.yaml").write_text(yaml.safe_dump(config(**changes)))
    assert main(["train", "--config=~/run.yaml", "--model.reference=~/a model"]) == 0
    assert main(["eval", "~/runs/two", "--run-rewards", "--out=~/answers.jsonl"]) == 0
    assert len((home / "answers.jsonl").read_text().splitlines()) == 2
    assert main(["export", "~/runs/two", "~/exported"]) == 0
    assert (home / "exported/adapter_config.json").is_file()
    capsys.readouterr()
    assert os.listdir() == []  # nothing was made where the command ran


SETTINGS = {
    "model.path": lambda path: ModelConfig(path),
    "model.reference": lambda path: ModelConfig("m", reference=path),
    "lora.adapter": lambda path: LoraConfig(adapter=path),
    "data.path": lambda path: DataConfig(path),
    "data.eval_path": lambda path: DataConfig("d", eval_path=path),
    "data.regression_path": lambda path: DataConfig("d", regression_path=path),
    "train.out": lambda path: TrainConfig(out=path),
    "rewards.function": lambda path: RewardConfig(path),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_only_a_leading_tilde_is_the_home_folder(home, key):
    name = key.partition(".")[2]
    for given, meant in (
        ("~/x y", f"{home}/x y"),
        ("a/~/b", "a/~/b"),
        ("x~", "x~"),
        ("./~", "./~"),
        ("builtin:arithmetic", "builtin:arithmetic"),
        ("owner/name", "owner/name"),
    ):
        assert getattr(SETTINGS[key](given), name) == meant
    with pytest.raises(UserError, match=f"{key}: no home folder is known for ~nobody-here/x"):
        SETTINGS[key]("~nobody-here/x")


def test_a_config_given_with_an_equals_sign_is_looked_at_like_any_other(home):
    (home / "run.yaml").write_text(yaml.safe_dump(config(train={"stpes": 3})))
    with pytest.raises(UserError, match=r"unknown key train\.stpes in .*run\.yaml"):
        parse_run([f"--config={home}/run.yaml"])
