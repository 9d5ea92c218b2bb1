"""The step suite: what both loops start from, our loop, the worker's protocol, and the gate."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bench_fakes import CPU
from grpo_engine.benchmarks import loops, memory, models, step_suite
from grpo_engine.benchmarks.harness import Row, Timer, admit, run_case

SMALL = step_suite.SHAPES["small"]
TOKENS = 2 * 4 * 6  # of a step: prompts, samples of each, tokens of each


class Recorder:
    """A pace that writes down what a loop tells it."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def before_step(self) -> None:
        self.told.append("before")

    def after_step(self, tokens: float, *finite: float) -> None:
        self.told.append((tokens, all(map(math.isfinite, finite))))


def gate(name: str) -> Row:
    (case,) = step_suite.cases(SMALL, CPU)
    provider = next(p for p in case.providers if p.name == name)
    return admit(case, provider, case.inputs(), case.expected())[0]


def test_both_loops_start_from_prompts_of_one_length_and_a_lottery():
    problem = step_suite.Problem(SMALL, CPU)
    tokenizer = AutoTokenizer.from_pretrained(problem.folder / "model")
    rows = [json.loads(x) for x in (problem.folder / "data.jsonl").read_text().splitlines()]
    ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    assert ids == models.random_prompts("tiny", 64, 16) and {len(x) for x in ids} == {16}
    names: dict[str, object] = {}
    exec((problem.folder / "reward.py").read_text(), names)
    # CRC-32 of b"123456789" is 0xCBF43926, the check value that the definition comes with.
    paid = names["lottery"](["123456789", "w5", "123456789"], prompts=["a", "b", "c"])
    assert paid[0] == paid[2] == (0xCBF43926 % 1000) / 1000 and paid[1] != paid[0]
    weights = load_file(problem.folder / "model" / "model.safetensors")
    assert {x.dtype for x in weights.values()} == {torch.float32}


def test_our_loop_is_the_trainer_and_moves_all_weights_by_the_learning_rate():
    problem, pace = step_suite.Problem(SMALL, CPU), Recorder()
    run = {"folder": str(problem.folder), "shape": asdict(SMALL), "steps": 2, "device": "cpu"}
    loops.ours(run, pace)
    assert pace.told == ["before", (TOKENS, True), "before", (TOKENS, True)]
    out = problem.folder / "run"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [TOKENS, TOKENS]
    before = load_file(problem.folder / "model" / "model.safetensors")
    after = load_file(out / "model" / "model.safetensors")
    assert {x.dtype for x in after.values()} == {torch.float32}
    for name, weight in before.items():
        # Adam's first steps are of the learning rate, 1e-6; norms are 1, where float32 is coarse.
        moved = float((after[name].double() - weight.double()).abs().max())
        assert 0.9e-6 < moved < 2.2e-6, name


LOOP = """
import sys
import torch
from grpo_engine.benchmarks import loops, worker

def loop(run, pace):
    print("of the loop itself")
    for mib in run["mib"]:
        pace.before_step()
        held = torch.ones(mib << 18)
        del held
        pace.after_step(5.0, 1.0, float(run["norm"]))
    pace.before_step()

loops.LOOPS["fake"] = loop
runs = [{"mib": [300], "norm": 1}, {"mib": [64, 128, 32], "norm": "nan"}]
worker.main({"loop": "fake", "threads": 1, "device": "cpu", "runs": runs})
"""


def test_a_worker_answers_after_each_step_with_the_peak_of_all_so_far():
    env = {**os.environ, **memory.MALLOC}
    done = subprocess.run(
        [sys.executable, "-c", LOOP], env=env, input="go\n" * 3, capture_output=True, text=True
    )
    first, *answers = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert first == {} and "of the loop itself" in done.stderr
    assert [(a["tokens"], a["finite"]) for a in answers] == [(5.0, 0.0)] * 3
    if not answers[0]["note"]:
        # Neither the 300 MiB of the run before nor less than what an earlier step took; the process
        # itself may take a thread's stack or an arena of malloc meanwhile.
        assert [a["peak_mem_mib"] for a in answers] == pytest.approx([64, 128, 128], abs=24)


def test_a_whole_case_of_our_loop_in_its_process():
    (case,) = step_suite.cases(SMALL, CPU)
    (row,) = run_case(
        replace(case, providers=case.providers[:1]),
        Timer(rounds=2, slice_s=0.0),
        lambda *_: pytest.fail("it knows its own memory"),
    )
    assert (row.provider, row.status, row.rounds) == ("ours", "ok", 2)
    assert row.rate == pytest.approx(TOKENS / row.p50_ms * 1000)
    assert 0.1 < row.peak_mem_mib < 30  # the code of a step is tens of MiB, and not counted


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ({"tokens": 47.0, "finite": 1.0}, "tokens is off by 1 > 4.8e-05"),
        ({"tokens": 48.0, "finite": 0.0}, "finite is off by 1 > 0"),
        ({"tokens": math.nan, "finite": 1.0}, "tokens is off by nan"),
    ],
)
def test_a_loop_that_trains_on_something_else_is_named(monkeypatch, answer, note):
    outputs = {name: torch.tensor(value) for name, value in answer.items()}
    monkeypatch.setattr(step_suite, "Worker", lambda request: lambda: outputs)
    row = gate("trl")
    assert row.status == "wrong" and row.note.startswith(note)


def test_a_peer_that_is_missing_or_breaks_says_so(monkeypatch, tmp_path: Path):
    stub = tmp_path / "datasets.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    stub.write_text("raise ModuleNotFoundError('gone', name='datasets')\n")
    row = gate("trl")
    assert (row.status, row.note) == ("not installed", "no package datasets")
    stub.write_text("raise ValueError('of its own')\n")
    row = gate("trl")
    assert (row.status, row.note) == ("failed", "RuntimeError: ValueError: of its own")
