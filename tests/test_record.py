"""The record of a run, read with what other people use, and nothing of ours."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pandas
import polars
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_engine.board import Board
from grpo_engine.parsing import dump_config
from grpo_engine.trainer import Trainer
from runs import metrics_of, rollouts_of, tiny_config

LINEAGE = "policy_version, adapter, temperature, top_p, sampling, reward_version"


@pytest.fixture(scope="module")
def run(model_folder, tmp_path_factory):
    """12 steps with a schedule of temperatures."""
    folder = tmp_path_factory.mktemp("record")
    config = tiny_config(
        model_folder,
        folder,
        curriculum={"temperature": {0: 1.2, 12: 0.6}},
        train={"steps": 12, "tensorboard": True},
    )
    Trainer(config).run()
    return config


def best_by_hand(config) -> list[tuple]:
    rows = [row for step in range(1, 13) for row in rollouts_of(config, step)]
    paid = [row for row in rows if row["reward"] is not None]
    place = "step group sample".split()
    best = sorted(paid, key=lambda row: (-row["reward"], *(row[name] for name in place)))
    return [tuple(row[n] for n in (*place, *LINEAGE.split(", "))) for row in best[:10]]


def test_duckdb_says_what_made_the_ten_best_answers(run):
    files = f"{run.train.out}/rollouts/*.parquet"
    found = duckdb.sql(
        f'select step, "group", sample, {LINEAGE} from "{files}" where reward is not null '
        'order by reward desc, step, "group", sample limit 10'
    ).fetchall()
    assert found == best_by_hand(run)
    assert duckdb.sql(f'select count(*) from "{files}"').fetchall() == [(12 * 16,)]
    versions = duckdb.sql(f'select distinct policy_version from "{files}"').fetchall()
    assert sorted(versions) == [(version,) for version in range(12)]


def test_pandas_says_the_same(run):
    table = pandas.read_parquet(f"{run.train.out}/rollouts")
    best = table.dropna(subset=["reward"]).sort_values(
        ["reward", "step", "group", "sample"], ascending=[False, True, True, True]
    )
    columns = ["step", "group", "sample", *LINEAGE.split(", ")]
    found = best[columns].head(10).itertuples(index=False, name=None)
    assert list(found) == best_by_hand(run)


def test_polars_reads_all_steps_at_once(run):
    table = polars.read_parquet(f"{run.train.out}/rollouts/*.parquet")
    rewards = [row["reward"] for step in range(1, 13) for row in rollouts_of(run, step)]
    assert table["reward"].to_list() == rewards
    components = [dict(row["components"]) for row in rollouts_of(run, 1)]
    first = table.filter(polars.col("step") == 1)["components"].to_list()
    # A map is a dict for newer versions of polars, a list of key and value for older ones.
    as_dicts = [x if isinstance(x, dict) else {c["key"]: c["value"] for c in x} for x in first]
    assert as_dicts == components


def test_tensorboard_has_the_numbers_of_the_lines(run):
    found = EventAccumulator(str(Path(run.train.out) / "tensorboard"))
    found.Reload()
    lines = metrics_of(run)
    for name in ("reward", "kl", "grad_norm"):
        scalars = found.Scalars(name)
        assert [s.step for s in scalars] == list(range(1, 13))
        assert [s.value for s in scalars] == pytest.approx([line[name] for line in lines])
    sampled = [s.value for s in found.Scalars("time_ms/sample")]
    assert sampled == pytest.approx([line["time_ms"]["sample"] for line in lines])


def test_tensorboard_forgets_what_a_killed_process_wrote(tmp_path):
    def written() -> list[tuple[int, float]]:
        found = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
        found.Reload()
        return [(s.step, s.value) for s in found.Scalars("x")]

    for first, last, x in ((0, 4, 1.0), (3, 4, 2.0)):  # killed after 4, resumed after 2
        board = Board(tmp_path)
        for step in range(first, last + 1):
            board.add({"step": step, "loss": 0.0, "x": x})
    assert written() == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    # An evaluation of the step that was resumed from comes beside the step's figures.
    Board(tmp_path).add({"step": 4, "eval_reward": 0.5})
    assert written()[-1] == (4, 2.0)


def test_environment_names_the_reward_version_of_the_samples(run):
    recorded = json.loads((Path(run.train.out) / "environment.json").read_text())
    assert list(recorded["rewards"]) == ["digits"] and len(recorded["rewards"]["digits"]) == 16


@pytest.mark.parametrize("after", [2, 5])
def test_kill_9_loses_nothing_but_the_step_in_flight(model_folder, tmp_path, after):
    config = tiny_config(model_folder, tmp_path, train={"steps": 10_000})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "grpo_engine.cli", "train", str(tmp_path / "run.yaml")]
    metrics = Path(config.train.out) / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < after:
            assert process.poll() is None, process.stderr.read()
        os.kill(process.pid, signal.SIGKILL)
    lines = metrics_of(config)
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= after
    for line in lines:
        rewards = [row["reward"] for row in rollouts_of(config, line["step"]) if row["valid"]]
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards))
    parts = sorted((Path(config.train.out) / "rollouts").glob("*.parquet"))
    assert len(parts) - len(lines) in (0, 1)  # the one of the step in flight
