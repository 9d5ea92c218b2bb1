"""The benchmark's work, memory and machine figures, what it writes, and how `grpo bench` ends."""

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_engine.benchmarks import head_suite, loss_suite, machine, memory, report, run
from grpo_engine.benchmarks.bare import bare_gemms
from grpo_engine.benchmarks.harness import Case, Expected, Provider, Row, Timer
from grpo_engine.benchmarks.head_problem import TOLERANCES, Problem
from grpo_engine.cli import main

CPU = torch.device("cpu")
SMALL = head_suite.SHAPES["small"]


def test_the_bytes_of_the_loss_are_those_of_its_arguments_and_its_gradient():
    shape = loss_suite.Shape(samples=16, length=24)
    (case,) = loss_suite.cases(shape, CPU)
    p = case.inputs()
    read = (*p.packed, p.rewards, p.cu_seqlens, p.cu_groups)
    written = p.logp
    assert case.work == sum(x.numel() * x.element_size() for x in (*read, written))


def test_the_flop_of_the_head_are_counted_in_units():
    unit = 2 * SMALL.tokens * SMALL.vocab * SMALL.hidden
    found = {case.name: case.work / unit for case in head_suite.cases(SMALL, CPU)}
    assert found == {"frozen": 2, "trainable": 4, "trainable-fused": 3, "no-gradient": 1}


@pytest.mark.parametrize("units", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("tile_rows", [1000, 70, 1])
def test_the_bare_gemms_are_as_many_units_whatever_the_tile(units, block, tile_rows):
    hidden, weight = torch.randn(150, 8), torch.randn(200, 8)
    step = bare_gemms(units, hidden, weight, tile_bytes=tile_rows * 200 * 4, block=block)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == units * 2 * 150 * 200 * 8


def test_the_truth_of_the_head_is_that_of_autograd_on_all_logits():
    p = Problem(replace(SMALL, tokens=80), CPU)  # more rows than are checked
    hidden, weight = (x.double().requires_grad_() for x in (p.hidden, p.weight))
    logp = (hidden @ weight.T).log_softmax(-1)[torch.arange(80), p.targets]
    dh, dw = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert p.expected["logp"].error(logp) < 1e-12
    assert p.expected["hidden_gradient"].error(dh) < 1e-12
    assert p.expected["weight_gradient"].error(dw) < 1e-12
    for name, gradient in (("hidden_gradient", dh), ("weight_gradient", dw)):
        rows = p.expected[name].rows
        assert {0, len(gradient) - 1} <= set(rows.tolist())
        gradient[-1] += gradient.norm(dim=-1).mean()
        assert p.expected[name].error(gradient) > 0.5


def test_the_inputs_stay_away_from_the_clip_bounds():
    # Where rounding decides on which side a token is, no two implementations agree.
    p = loss_suite.Problem(loss_suite.SHAPES["full"], CPU)
    ratio = (p.logp.double() - p.old.double()).exp()
    assert min((ratio - 0.8).abs().min(), (ratio - 1.2).abs().min()) > 5e-5
    assert 0.01 < (ratio > 1.2).double().mean() < 0.1
    head = Problem(SMALL, CPU)
    margin = TOLERANCES["logp"]
    for bound in (math.log(0.8), math.log(1.2)):
        assert (head.log_ratio - bound).abs().min() > margin


def test_rates_of_the_machine_from_the_time_they_took(monkeypatch):
    made = []
    monkeypatch.setattr(machine, "_median_ms", lambda step, device: made.append(step()) or 2.0)
    assert machine.copy_rate(10**6, CPU) == pytest.approx(0.5)  # GB/s: 1 MB in 2 ms
    assert made[0].untyped_storage().nbytes() == 10**6 // 2  # the half that is written
    assert machine.gemm_rate(torch.float32, CPU, 100) == pytest.approx(1.0)  # 2 MFLOP in 2 ms
    assert made[1].shape == (100, 100)


def test_the_commit_is_this_trees_or_else_the_version(monkeypatch, tmp_path):
    root = Path(machine.__file__).resolve().parents[1]
    if (root / ".git").exists():
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        assert machine.describe(CPU, small=True)["commit"].removesuffix("-dirty") == commit
    # As installed: no repository of ours around it, maybe somebody else's further up.
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site" / "benchmarks" / "machine.py"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    commit = ["git", *identity, "-C", str(tmp_path), "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(commit, check=True)
    Path(machine.__file__).parent.mkdir(parents=True)
    assert machine.describe(CPU, small=True)["commit"].startswith("version ")
    assert machine.describe(CPU, small=True, commit="abc")["commit"] == "abc"


MEASURE = """
import torch
from grpo_engine.benchmarks.memory import cpu_peak
before = torch.ones(64 << 20)  # 256 MiB that are gone when the call begins
del before
held = torch.ones(8 << 20)

def step():
    kept = torch.ones(16 << 20)  # 64 MiB, to the end
    for _ in range(3):
        gone = torch.ones(4 << 20)  # 16 MiB, one at a time
        del gone
    return kept

print(*cpu_peak(step))
"""


def test_peak_memory_is_what_the_call_adds_at_most_at_a_time():
    env = {**os.environ, **memory.MALLOC}
    done = subprocess.run([sys.executable, "-c", MEASURE], env=env, capture_output=True, text=True)
    mib, *note = done.stdout.split()
    if not note:  # else it is only an upper bound, and says so
        assert float(mib) == pytest.approx(80, abs=2), done.stderr
    assert float(mib) > 78


def test_memory_of_a_provider_in_a_process_of_its_own():
    shape = head_suite.Shape(tokens=64, hidden=8, vocab=1 << 18)
    case = next(c for c in head_suite.cases(shape, CPU) if c.name == "no-gradient")
    provider = next(p for p in case.providers if p.name == "eager")
    mib, note = memory.FreshProcess(threads=1)(case, provider, lambda: {})
    # Float32 logits and their log-softmax, 64 x 262144 each, and what the GEMM takes beside them.
    assert mib == pytest.approx(2 * 64 + 3, abs=5) or "upper bound" in note
    mib, note = memory.FreshProcess(threads=1)(
        replace(case, name="no such case"), provider, lambda: {}
    )
    assert mib is None and note.startswith("memory not measured: KeyError")


@pytest.fixture
def fake_suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """A suite of two providers in place of the real ones; its knob makes ours wrong."""
    knobs = {"off": 0.0}
    one = torch.ones(1, dtype=torch.float64)

    def cases(shape: object, device: torch.device, quick: bool) -> list[Case]:
        return [
            Case(
                suite="loss",
                name="only",
                shape={"samples": shape.samples, "length": shape.length},
                device=device,
                inputs=lambda: None,
                expected=lambda: {"loss": Expected(one, 1e-6)},
                providers=(
                    Provider("ours-cpp", lambda inputs: lambda: {"loss": one + knobs["off"]}),
                    Provider("other", lambda inputs: lambda: {"loss": one + math.nan}),
                    Provider("absent", lambda inputs: __import__("no_such_peer")),
                ),
                work=1.0,
                rate_unit="GB/s",
                machine_rate=lambda: 1.0,
            )
        ]

    monkeypatch.setattr(loss_suite, "cases", cases)
    monkeypatch.setattr(run.memory, "FreshProcess", lambda threads: lambda *_: (1.5, ""))
    yield knobs


def bench(*args: object) -> int:
    return main(["bench", "--shapes", "small", *map(str, args)])


def test_json_and_csv_hold_what_was_measured(fake_suite, tmp_path, capsys):
    assert bench("--suite", "loss", "--out", tmp_path / "out", "--loss-shape", "24x7") == 0
    found = json.loads((tmp_path / "out" / "loss.json").read_text())
    with open(tmp_path / "out" / "loss.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    mine, other, absent = found["rows"]
    assert mine["shape"] == {"samples": 24, "length": 7}
    assert (mine["status"], mine["rounds"], mine["peak_mem_mib"]) == ("ok", 9, 1.5)
    assert 0 < mine["p20_ms"] <= mine["p50_ms"] <= mine["p80_ms"]
    assert mine["rate"] == pytest.approx(1 / (mine["p50_ms"] * 1e6))
    assert (other["status"], other["p50_ms"], other["errors"]) == ("wrong", None, {"loss": None})
    assert (absent["status"], absent["note"]) == ("not installed", "no package no_such_peer")
    for row, line in zip(found["rows"], lines, strict=True):
        assert (line["provider"], line["status"]) == (row["provider"], row["status"])
        assert line["shape"] == "samples=24 length=7"
        assert line["p50_ms"] == ("" if row["p50_ms"] is None else str(row["p50_ms"]))
        assert line["commit"] == found["machine"]["commit"] != ""
        assert line["torch"] == torch.__version__ == found["machine"]["packages"]["torch"]
    assert found["machine"]["device"] == "cpu" and found["machine"]["copy_gb_s"] > 0
    assert set(found["machine"]["gemm_gflop_s"]) == {"float32", "bfloat16"}
    shown = capsys.readouterr().out
    assert "other: wrong; loss nan; loss is off by nan > 1e-06" in shown
    assert "absent: not installed; no package no_such_peer" in shown


def test_a_wrong_kernel_of_ours_is_exit_code_1(fake_suite, tmp_path, capsys):
    fake_suite["off"] = 1e-3
    assert bench("--suite", "loss", "--out", tmp_path) == 1
    assert "loss only ours-cpp: loss is off by 0.001 > 1e-06" in capsys.readouterr().err
    assert json.loads((tmp_path / "loss.json").read_text())["rows"][0]["status"] == "wrong"


def test_cases_are_chosen_by_words_of_their_name_and_shape(fake_suite, tmp_path, capsys):
    shape = "--suite", "loss", "--loss-shape", "24x7", "--out", tmp_path
    assert bench(*shape, "--case", "7 only 24") == 0
    assert "loss only: 3 providers" in capsys.readouterr().out
    for words in ("only 8", "onl"):
        assert bench(*shape, "--case", words) == 2
        assert f"--case '{words}': no such case in loss\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--suite", "tokens"], "no suite 'tokens'; there are loss, head, sampler, step, all"),
        (["--rounds", "3"], "--rounds must be at least 7; given 3"),
        (["--loss-shape", "512"], "--loss-shape must be SAMPLESxLENGTH; given '512'"),
        (["--loss-shape", "12x4"], "--loss-shape 12x4: samples must be a multiple of 8"),
        (["--head-shape", "8x0x8"], "--head-shape must be TOKENSxHIDDENxVOCAB; given '8x0x8'"),
        (["--head-shape", "12x4x8"], "--head-shape 12x4x8: tokens must be a multiple of 8"),
        (["--out", "file/below"], "--out file/below: can't be written to: Not a directory"),
        (["--out", "/proc/bench"], "--out /proc/bench: can't be written to: "),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    args, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert bench(*args) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"grpo: error: {says}") and err.count("\n") == 1 and out == ""


def test_the_suites_run_as_they_are(tmp_path, monkeypatch):
    """Everything but the memory processes; a peer is right or says why it does not run."""
    monkeypatch.setattr(run.memory, "FreshProcess", lambda threads: lambda *_: (None, ""))
    config = run.BenchConfig(out=tmp_path, shapes="small", threads=1, rounds=7)
    rows = [row for suite in ("loss", "head") for row in run.run(replace(config, suite=suite))]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "head.csv", "head.json", "loss.csv", "loss.json",
    ]  # fmt: skip
    assert run.faults(rows) == []
    assert {"wrong", "failed"}.isdisjoint(row.status for row in rows)
    by_case = {}
    for row in rows:
        by_case.setdefault(row.case, {})[row.provider] = row
    assert set(by_case) == {"grpo", "frozen", "trainable", "trainable-fused", "no-gradient"}
    loss = by_case["grpo"]
    assert loss["ours-cpp-packed"].ratio == 1.0 and loss["ours-cpp-bare"].status == "ok"
    assert loss["eager"].status == loss["compiled"].status == "ok"
    assert loss["empty-function"].rate is None
    assert by_case["frozen"]["ours-cpp"].errors["logp"] < 5e-3
    assert by_case["frozen"]["bare-gemms-2"].rate > 0


def test_timers_wait_for_cuda_only(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Timer.on(CPU).sync()
    Timer.on(torch.device("cuda")).sync()
    assert waited == [torch.device("cuda")]


def test_the_table_shows_numbers_and_says_what_has_none(capsys):
    rows = [
        Row("s", "c", "ours", {"n": 3}, errors={"loss": 1.25e-7}, p20_ms=0.5, p50_ms=1.0,
            p80_ms=123.4, peak_mem_mib=2048.0, rate=3.25, rate_unit="GB/s", of_machine=0.5,
            ratio=1.0),
        Row("s", "c", "peer", {"n": 3}, status="not installed", note="no package peer"),
    ]  # fmt: skip
    described = machine.describe(CPU, small=True, commit="abc")
    report.show(described, rows)
    lines = capsys.readouterr().out.splitlines()
    assert "commit abc" in lines[0] and "s c: n=3" in lines
    (row,) = [line.split() for line in lines if line.startswith("ours ")]
    assert row == ["ours", "0.5", "1", "123.4", "2,048", "3.25", "50%", "1"]
    assert lines[-2:] == ["  ours: ok; loss 1.2e-07", "  peer: not installed; no package peer"]
