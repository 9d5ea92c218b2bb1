"""A run folder from elsewhere runs no code of its own unless the command line says so."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conftest import write_jsonl
from grpo_engine.cli import main
from grpo_engine.export import run_config
from grpo_engine.rewards.load import named_code
from grpo_engine.sample_config import RewardConfig

REWARD = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
def one(completions, **columns):
    return [1.0 + len(c) for c in completions]
"""


@pytest.fixture
def run(model_folder, tmp_path) -> Path:
    """A run whose reward leaves a file behind when it is imported; that of the training is gone."""
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(4)])
    (tmp_path / "own.py").write_text(REWARD)
    config = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"path": str(tmp_path / "data.jsonl"), "eval_path": str(tmp_path / "data.jsonl")},
        "rewards": [{"function": f"{tmp_path}/own.py:one"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {"steps": 1, "prompts_per_step": 2, "out": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    (tmp_path / "it ran").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["eval", "rescore"])
def test_rewards_that_a_run_names_are_called_where_it_is_said(run, command, capsys):
    assert main([command, str(run)]) == 2
    told = capsys.readouterr().err
    assert f"names {run.parent}/own.py:one as rewards" in told and "--run-rewards" in told
    assert not (run.parent / "it ran").exists()
    assert main([command, str(run), "--run-rewards"]) == 0
    assert (run.parent / "it ran").exists()


def test_rescore_calls_what_is_typed(run, capsys):
    assert main(["rescore", str(run), "--reward", "one=exact"]) == 0
    assert not (run.parent / "it ran").exists()
    assert main(["rescore", str(run), "--scoring.floor", "-1"]) == 2
    assert not (run.parent / "it ran").exists()
    assert main(["rescore", str(run), "--reward", f"{run.parent}/own.py:one"]) == 0
    assert (run.parent / "it ran").exists()


@pytest.mark.parametrize(
    "args", [["sample", "RUN", "hi"], ["eval", "RUN", "--run-rewards"], ["export", "RUN", "OUT"]]
)
def test_a_run_can_not_trust_its_own_model(run, args, capsys):
    folder = run / "config.yaml"
    config = yaml.safe_load(folder.read_text())
    config["model"]["trust_remote_code"] = True
    folder.write_text(yaml.safe_dump(config))
    args = [a.replace("RUN", str(run)).replace("OUT", str(run.parent / "out")) for a in args]
    merge = ["--merge"] if args[0] == "export" else []
    assert main([*args, *merge]) == 2
    assert "comes with code of its own" in capsys.readouterr().err
    assert main([*args, *merge, "--trust-remote-code"]) == 0
    # Said on the command line it holds for runs that know nothing of it.
    stored = run_config(run, trust_remote_code=True)
    assert stored.model == replace(stored.model, trust_remote_code=True)


def test_code_is_found_in_ensembles():
    members = ["exact", {"function": "a.py:f"}, "package.module:g"]
    configs = [RewardConfig("math"), RewardConfig("ensemble", options={"members": members})]
    assert named_code(configs) == ["a.py:f", "package.module:g"]
    assert named_code([RewardConfig("os:system"), RewardConfig("exact")]) == ["os:system"]
