"""The run folder: whole or not at all, and nothing in it after a resumed step."""

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors import SafetensorError

from grpo_engine import ledger as ledger_module
from grpo_engine.checkpoint import (
    OPTIMIZER,
    STATE,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from grpo_engine.config import DataConfig, ModelConfig, RewardConfig, RunConfig
from grpo_engine.disk import DiskError
from grpo_engine.errors import UserError
from grpo_engine.groups.batch import Origin
from grpo_engine.groups.make import make_batch
from grpo_engine.ledger import Ledger, environment
from grpo_engine.parsing import load_run
from grpo_engine.rollout import Rollout, SamplingParams
from grpo_engine.rollout_table import Asked
from samples import rules, samples_of

CPU = torch.device("cpu")
CONFIG = RunConfig(ModelConfig("m"), DataConfig("d.jsonl"), [RewardConfig("exact")])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save(root: Path, step: int, keep: int = 9, weights: bytes = b"w") -> Path:
    def save_weights(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_bytes(weights)

    tensors = {"w/exp_avg": torch.tensor([step, 0.1]), "w/code": torch.tensor([255, 0]).byte()}
    return save_checkpoint(root, step, {"step": step, "x": 0.1}, tensors, save_weights, keep)


def test_checkpoint_gives_back_what_was_saved(tmp_path):
    folder = save(tmp_path, 12)
    assert folder.name == "step-000012"
    checkpoint = load_checkpoint(folder)
    assert checkpoint.values == {"step": 12, "x": 0.1}
    assert checkpoint.tensors["w/exp_avg"].tolist() == torch.tensor([12, 0.1]).tolist()
    assert checkpoint.tensors["w/code"].dtype == torch.uint8
    assert checkpoint.tensors["w/code"].tolist() == [255, 0]
    assert (checkpoint.folder / "adapter" / "weights").read_bytes() == b"w"


def test_checkpoint_that_cannot_be_written_costs_none_of_the_old_ones(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = tree(tmp_path)

    def full(_: Path) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    with pytest.raises(DiskError, match="step-000003: No space left on device; make room"):
        save_checkpoint(tmp_path, 3, {}, {}, full, keep=1)
    assert tree(tmp_path) == before


def test_newest_checkpoints_are_kept(tmp_path):
    for step in (9, 10, 100, 99_999, 100_000):
        save(tmp_path, step, keep=3)
    names = ["step-000100", "step-099999", "step-100000"]
    assert [p.name for p in list_checkpoints(tmp_path)] == names
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_checkpoints_of_a_long_run_stay_in_order(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-1000000"]


def test_only_whole_checkpoints_are_listed(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []
    save(tmp_path, 10)
    killed = tmp_path / ".step-000020.tmp"
    killed.mkdir()
    (killed / STATE).write_text("{}")
    (tmp_path / "step-000030").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000010"]


@pytest.mark.parametrize("name", [STATE, OPTIMIZER])
@pytest.mark.parametrize("damage", ["cut", "empty", "removed", "zeros"])
def test_damaged_checkpoint_is_named(tmp_path, name, damage):
    path = save(tmp_path, 10) / name
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-9], "zeros": bytes(len(content))}.get(damage, b""))
    if damage == "removed":
        path.unlink()
    with pytest.raises(UserError, match=r"step-000010 is damaged .*older"):
        load_checkpoint(tmp_path / "step-000010")


def opened(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.create()
    return ledger


def test_reopened_run_forgets_what_came_after_its_step(tmp_path):
    ledger = opened(tmp_path)
    for step in range(6):
        ledger.metrics({"step": step, "loss": 0.1 * step})
        (ledger.rollouts / f"step-{step:06d}.parquet").write_bytes(b"rows")
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines) + '{"step": 6, "rew')  # killed in the middle of a line
    (ledger.checkpoints / ".step-000006.tmp").mkdir()
    save(ledger.checkpoints, 3)

    again = Ledger(tmp_path)
    again.rewind(step=3)
    assert metrics.read_text() == "".join(lines[:4])
    assert sorted(p.name for p in again.rollouts.iterdir()) == [
        f"step-{step:06d}.parquet" for step in range(4)
    ]
    assert [p.name for p in again.checkpoints.iterdir()] == ["step-000003"]
    again.metrics({"step": 4, "reward": 9.0})
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_numbers_that_json_does_not_know_are_null(tmp_path):
    opened(tmp_path).metrics(
        {"a": float("nan"), "b": float("inf"), "c": 0.5, "t": {"d": -float("inf"), "e": 1}}
    )

    def unknown(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    expected = {"a": None, "b": None, "c": 0.5, "t": {"d": None, "e": 1}}
    assert json.loads(line, parse_constant=unknown) == expected


@pytest.mark.parametrize("left", ["metrics", "checkpoint"])
def test_folder_that_holds_a_run_is_refused(tmp_path, left):
    ledger = opened(tmp_path)
    ledger.write_header(CONFIG, CPU, {})
    ledger.create()  # a run that did not get to its first line may be started anew
    if left == "metrics":
        ledger.metrics({"step": 0})
    else:
        save(ledger.checkpoints, 1)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"already holds a run.*--resume.*--train\.out"):
        Ledger(tmp_path).create()
    assert tree(tmp_path) == before


def test_run_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"run folder .*taken/run: Not a directory.*--train\.out"):
        Ledger(tmp_path / "taken" / "run").lock(resume=False)


def test_config_and_environment_of_a_run_are_recorded(tmp_path):
    opened(tmp_path).write_header(CONFIG, CPU, {"exact": "v1"})
    assert load_run(tmp_path / "config.yaml") == CONFIG
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert recorded["packages"]["torch"] == torch.__version__
    assert set(recorded["packages"]) >= {"grpo-engine", "transformers", "peft", "bitsandbytes"}
    assert recorded["rewards"] == {"exact": "v1"}
    assert (recorded["python"], recorded["device"]) == (platform.python_version(), "cpu")


@pytest.mark.parametrize("tracked", [True, False])
def test_the_commit_is_that_of_this_package_alone(tmp_path, monkeypatch, tracked):
    """Installed inside somebody's repository, their commit says nothing."""
    package = tmp_path / "venv" / "grpo_engine"
    package.mkdir(parents=True)
    (tmp_path / "theirs").write_text("x")
    (package / "ledger.py").write_text("x")

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.check_output(["git", *who, *arguments], cwd=tmp_path, text=True).strip()

    git("init", "-q")
    git("add", "." if tracked else "theirs")
    git("commit", "-qm", "theirs")
    monkeypatch.setattr(ledger_module, "__file__", str(package / "ledger.py"))
    assert environment(CPU)["commit"] == (git("rev-parse", "HEAD") if tracked else None)


def test_rollouts_hold_a_row_a_sample(tmp_path):
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 - 1)
    rollouts = [
        Rollout([5, 6], ids, -torch.ones(len(ids)), -torch.ones(len(ids)) / 2, end, 0, i, params, 4)
        for i, (ids, end) in enumerate([([7, 1], "stop"), ([], "stop"), ([8, 9], "length")])
    ]
    made = samples_of(
        [[1.0, None, 0.0]],
        components={"f.a": [1.0, None, 0.0], "g": [None, None, None]},
        groups=[rollouts],
        origins=[Origin(4, 17, 2, "hard", 1)],
    )
    batch = make_batch(made, rules())
    asked = [Asked("<bos>p", "p", {"answer": 3})]
    ledger = opened(tmp_path)
    ledger.samples(12, batch, asked, ["x", "", "y"])
    ledger.flush()
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step-000012.parquet"]
    rows = pyarrow.parquet.read_table(tmp_path / "rollouts" / "step-000012.parquet").to_pylist()

    def column(name: str) -> list:
        return [row[name] for row in rows]

    assert column("reward") == [1.0, None, 0.0]
    assert column("components") == [[("f.a", x), ("g", None)] for x in (1.0, None, 0.0)]
    assert column("state") == ["scored", "invalid", "budget"]  # 2 tokens of 256: no room was left
    assert column("cause") == [None, "no reward applies", "the context was full"]
    assert (column("variant"), column("band"), column("round")) == ([2] * 3, ["hard"] * 3, [1] * 3)
    assert column("task") == ['{"answer": 3}'] * 3
    assert (column("prompt"), column("sent")) == (["<bos>p"] * 3, ['"p"'] * 3)
    names = "adapter reward_version sampling environment tools".split()
    assert [column(name)[0] for name in names] == ["a", "r", "s", "", ""]
    assert (column("valid"), column("in_loss")) == ([True, False, True], [True, False, False])
    assert column("advantage") == pytest.approx([0.5 / 0.5001, 0.0, -0.5 / 0.5001])
    assert (column("task_row"), column("sample"), column("step")) == ([17] * 3, [0, 1, 2], [12] * 3)
    assert column("completion_ids") == [[7, 1], [], [8, 9]]
    assert column("logp_sampler") == [[-1.0, -1.0], [], [-1.0, -1.0]]
    assert column("logp_processed") == [[-0.5, -0.5], [], [-0.5, -0.5]]
    assert (column("completion"), column("finish_reason")[2]) == (["x", "", "y"], "length")
    assert (column("seed"), column("policy_version")) == ([2**63 - 1] * 3, [4] * 3)


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_not_listed(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def busy(folder: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:
            return
        (folder / "adapter" / "weights").unlink()
        raise OSError(39, "Directory not empty", folder)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match=r"can't remove .*step-000001: Directory not empty"):
        save_checkpoint(tmp_path, 2, {}, {}, lambda folder: None, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002"]
