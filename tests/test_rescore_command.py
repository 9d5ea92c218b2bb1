"""`grpo rescore` as it is typed: the same function gives the same run, and nothing is written."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from conftest import save_model_folder, write_jsonl
from grpo_engine.cli import main
from grpo_engine.rescore import Recorded
from runs import files_of

# A number that any difference in what the function is told changes.
REWARD = """
import zlib
def told(prompts, completions, completion_ids, finish_reasons, raw_completions, prompt_tail,
         groups, step, answer, hint):
    rows = zip(prompts, completions, completion_ids, finish_reasons, raw_completions, prompt_tail,
               groups, answer, hint)
    return [zlib.crc32(repr((row, step)).encode()) % 4 / 4 for row in rows]
def length(completions, **columns):
    return [float(len(c[-1]["content"])) for c in completions]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a sample can be: variants, anchors, draws made again."""
    folder = tmp_path_factory.mktemp("rescore")
    save_model_folder(folder / "model", chat=True, bos=True)
    rows = [{"prompt": f"{i} apples", "answer": i} for i in range(40)]
    rows[3]["hint"] = "three"
    write_jsonl(folder / "data.jsonl", rows)
    (folder / "my.py").write_text(REWARD)
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "lora": {"rank": 4},
        "data": {"path": str(folder / "data.jsonl"), "as_chat": True, "system": "be brief"},
        "rewards": [{"function": f"{folder}/my.py:told"}],
        "sampling": {"group_size": 3, "max_tokens": 20, "preset": "mixed"},
        "groups": {"truncated": "resample", "no_signal": "resample", "correct_at": 0.75},
        "scoring": {"clip_percentiles": [10, 90]},
        "loss": {"min_std": 0.3},
        "variants": {"templates": ["{prompt}", "{prompt}?"]},
        "anchors": {"share": 0.1},
        "train": {"steps": 3, "prompts_per_step": 4, "out": str(folder / "run")},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


def test_the_same_function_gives_the_same_run(run, tmp_path, capsys):
    recorded = [row for part in Recorded.of(run) for row in part]
    # The run holds what could go wrong.
    assert {row["round"] for row in recorded} > {0} and {row["variant"] for row in recorded} == {
        0,
        1,
    }
    assert any(row["anchor"] for row in recorded)
    assert any("drawn again" in (row["cause"] or "") for row in recorded)
    before = files_of(run)
    out = tmp_path / "out.parquet"
    reward = f"{run.parent}/my.py:told"
    capsys.readouterr()
    assert main(["rescore", str(run), "--reward", reward, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert files_of(run) == before
    assert "order flips   0 of " in text and "ties broken 0, made 0" in text
    assert "0 gained, 0 lost" in text and "largest changes: none" in text
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == len(recorded)
    for new, old in zip(rows, recorded, strict=True):
        assert (new["step"], new["group"], new["sample"]) == (
            old["step"],
            old["group"],
            old["sample"],
        )
        assert new["new_reward"] == new["old_reward"] == old["reward"]
        assert new["new_state"] == old["state"] and new["new_cause"] == old["cause"]
        assert new["new_valid"] == old["valid"] and new["new_signal"] == old["signal"]


def test_another_function_its_means_and_its_file(run, tmp_path, capsys):
    out, reward = tmp_path / "out.jsonl", f"{run.parent}/my.py:length"
    keys = ["--scoring.clip_percentiles", "null", "--groups.correct_at", "99"]
    args = ["--reward", reward, "--steps", "2:", "--out", str(out), *keys]
    capsys.readouterr()
    assert main(["rescore", str(run), *args]) == 0
    text = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["step"] for row in rows} == {2, 3}
    for row in rows:
        assert row["new_reward"] == len(row["text"]) == row["components"]["told"]
    counted = [row for row in rows if not row["anchor"]]
    old = [row["old_reward"] for row in counted if row["old_valid"]]
    new = [row["new_reward"] for row in counted if row["new_valid"]]
    assert f"mean reward   {sum(old) / len(old):.4f} -> {sum(new) / len(new):.4f}" in text
    first = text[text.index("largest changes:") :].splitlines()[1]
    most = max(abs(r["new_reward"] - r["old_reward"]) for r in rows)
    before, after = (float(x) for x in first.split("  step")[0].split("->"))
    assert abs(after - before) == pytest.approx(most)


def test_weights_from_a_file_of_its_own(run, tmp_path, capsys):
    changed = tmp_path / "rewards.yaml"
    rewards = [{"function": f"{run.parent}/my.py:told", "weight": -3.0}]
    changed.write_text(yaml.safe_dump({"rewards": rewards}))
    assert (
        main(["rescore", str(run), "--run-rewards", "--config", str(changed), "--steps", "1:1"])
        == 0
    )
    text = capsys.readouterr().out
    assert "correlation -1.0000" in text and "weight -3.0" in text
    flips, pairs = text[text.index("order flips") :].split()[2:5:2]
    assert flips == pairs != "0"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--steps", "8:9"], "there are steps 1 to 3"),
        (["--steps", "x"], "--steps takes A:B"),
        (["--reward", "nowhere.py:f"], "no such reward file: /"),
        (["--reward", "a=exact"], "the run has the rewards told"),
        (["--train.lr", "1"], "train changes nothing in rescoring"),
        (["--scoring.flor", "1"], "the nearest is scoring.floor"),
        (["--out", "x.csv"], "a .parquet or .jsonl file"),
        (["--out", "RUN/out.jsonl"], "lies in the run folder"),
    ],
)
def test_arguments_that_make_no_sense(run, capsys, args, text):
    assert (
        main(["rescore", str(run), "--run-rewards", *(a.replace("RUN", str(run)) for a in args)])
        == 2
    )
    assert text in capsys.readouterr().err
