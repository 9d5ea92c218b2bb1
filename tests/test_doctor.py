"""`grpo doctor` as it is typed: its group and its pilot are those of the first step of training."""

import json
import re
from pathlib import Path

import pytest
import yaml

from conftest import write_jsonl
from grpo_engine.cli import main

REWARD = """
def vowels(completions, **columns):
    return [{"vowels": sum(map(c.count, "aeiou")) / 4, "answer": None} for c in completions]
def raises(completions, **columns):
    return 1 / 0
"""


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A run whose samples often end before their limit."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i} apples:", "answer": str(i)} for i in range(9)]
    write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "my.py").write_text(REWARD)
    return {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "lora": {"rank": 4},
        "data": {"path": "data.jsonl"},
        "rewards": [{"function": "my.py:vowels", "weight": 2.0}],
        "sampling": {"group_size": 4, "max_tokens": 60},
        "groups": {"correct_at": 2.0},
        "loss": {"min_std": 0.8},
        "train": {"steps": 1, "prompts_per_step": 6, "seed": 1, "out": "run"},
    }


def doctor(config: dict, *args: str) -> int:
    Path("run.yaml").write_text(yaml.safe_dump(config))
    return main(["doctor", "run.yaml", *args])


def test_a_group_its_checks_and_a_pilot(config, capsys):
    assert doctor(config, "--pilot", "6", "--json", "out.json") == 0
    out = capsys.readouterr().out
    assert not Path("run").exists()
    shown = re.findall(r"sample \d: reward (\S+), advantage (\S+), (\w+)", out)
    rewards = [float(reward) for reward, _, _ in shown]
    assert len(shown) == 4 and len(set(rewards)) > 1
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 4) ** 0.5
    assert std > 0.8  # else the group has no signal
    for reward, advantage, _ in shown:
        assert float(advantage) == pytest.approx((float(reward) - mean) / (std + 1e-4), abs=2e-4)
    lengths = re.findall(r"(\d+) tokens, finish (\w+).* tokens in the loss: (\d+)", out)
    assert {finish for _, finish, _ in lengths} == {"stop", "length"}
    for length, finish, in_loss in lengths:
        assert in_loss == (length if finish == "stop" else "0")  # groups.truncated is mask
    parts = [float(x) for x in re.findall(r"components vowels.vowels (\S+)", out)]
    assert [2 * part for part in parts] == pytest.approx(rewards, abs=1e-3)
    assert "vowels.answer none" in out and "<eos>" in out

    found = json.loads(Path("out.json").read_text())
    assert {check["status"] for check in found["checks"]} <= {"ok", "warning"}
    assert "0 of 19 checks failed" in out

    # The first step of training draws the same groups.
    assert main(["train", "run.yaml"]) == 0
    (first,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    pilot = found["pilot"]
    assert pilot["states"] == first["states"]
    assert pilot["reward"] == pytest.approx(first["reward"], rel=1e-6)
    assert pilot["length_mean"] == pytest.approx(first["completion_length"])
    assert pilot["truncated"] == pytest.approx(first["truncated"])
    assert pilot["tokens_per_signal"] == pytest.approx(first["tokens_per_signal_group"])
    assert 1 - pilot["with_signal"] / 6 == pytest.approx(first["no_signal"])
    causes = {cause: count for cause, count in first["no_signal_causes"].items() if count}
    assert pilot["causes"] == causes and causes


def test_no_sample_ends_in_time(config, capsys):
    config["sampling"]["max_tokens"] = 1
    assert doctor(config) == 2
    out = capsys.readouterr().out
    assert re.search(r"FAIL +EOS reached +by 0 of 4 samples: sampling.max_tokens 1 is too", out)
    assert "1 of 19 checks failed: EOS reached" in out


def test_a_pilot_of_more_prompts_than_there_are(config, capsys):
    assert doctor(config, "--pilot", "99") == 0
    assert "pilot of 9 prompts" in capsys.readouterr().out


def test_errors_are_those_of_training(config, capsys):
    config["rewards"] = [{"function": "my.py:raises"}]
    assert doctor(config) == 2
    text = capsys.readouterr().err
    assert text.startswith("grpo: error: ") and "ZeroDivisionError" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--pilot", "4"], "--pilot needs a run.yaml"),
        (["run.yaml", "--resume"], "leave out --resume"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--bogus"], "unknown key bogus"),
    ],
)
def test_arguments_that_make_no_sense(config, capsys, args, text):
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["doctor", *args]) == 2
    assert text in capsys.readouterr().err


def test_without_a_config_it_looks_at_the_installation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ok +C\+\+ extension +instruction set (plain|avx2|avx512)$", out, re.M)
    assert re.search(r"^ok +reward worker +started", out, re.M)
    found = json.loads(Path("out.json").read_text())
    assert found["pilot"] is None and len(found["checks"]) == out.count("\n") - 1
