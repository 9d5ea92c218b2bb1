"""What the newer suites need of `grpo bench`: figures without times, several shapes of a suite."""

import csv
import json

import torch

from bench_fakes import fake_case
from grpo_engine.benchmarks import head_suite, machine, report, run
from grpo_engine.benchmarks.harness import Case, Row

CPU = torch.device("cpu")


def test_what_is_counted_has_figures_and_no_table(capsys, tmp_path):
    note = "bytes are counted"
    counted = Row("s", "c", "ours", {"n": 3}, "checked, not timed", note, {"tokens": 0.0},
                  {"kv_mib": 1234.5, "of_repeated": 0.25})  # fmt: skip
    described = machine.describe(CPU, small=True, commit="abc")
    report.show(described, [counted])
    lines = capsys.readouterr().out.splitlines()
    found = "tokens 0; kv_mib 1,234 of_repeated 0.25; bytes are counted"
    assert lines[-1] == f"  ours: checked, not timed; {found}"
    assert not any(line.startswith("provider") for line in lines)
    report.write(tmp_path, "s", described, [counted])
    with open(tmp_path / "s.csv", newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["figures"] == "kv_mib 1,234 of_repeated 0.25"
    (row,) = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert row["figures"] == {"kv_mib": 1234.5, "of_repeated": 0.25}


def test_a_suite_may_have_several_shapes_and_quicker_ones(monkeypatch, tmp_path):
    seen = []

    def cases(shape: object, device: torch.device, quick: bool) -> list[Case]:
        seen.append((shape, quick))
        return [fake_case()]

    monkeypatch.setattr(head_suite, "cases", cases)
    monkeypatch.setattr(head_suite, "SHAPES", {"full": ("a", "b"), "quick": ("c",), "small": "d"})
    monkeypatch.setattr(machine, "describe", lambda *_: MACHINE)
    monkeypatch.setattr(report, "write", lambda *_: [])
    for changes in ({}, {"quick": True}, {"quick": True, "shapes": "small"}):
        run.run(run.BenchConfig(suite="head", out=tmp_path, device="cpu", **changes))
    assert seen == [("a", False), ("b", False), ("c", True), ("d", True)]


MACHINE = {"device_name": "", "threads": 1, "commit": "", "packages": {}, "copy_gb_s": 1.0,
           "gemm_gflop_s": {}}  # fmt: skip
