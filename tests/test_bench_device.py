"""The one command for a CUDA machine, without one: its checks, its time limits, its report."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from check_outcomes import outcomes
from grpo_engine import ops
from grpo_engine.benchmarks import checks_head, checks_loss, device
from grpo_engine.benchmarks.harness import Row
from grpo_engine.kernels.options import LossType

CPU = torch.device("cpu")
CHECKS = {name.removeprefix("check-"): module for name, module in device.CHECKS.items()}


@pytest.mark.parametrize("impl", ["torch", "cpp"])
@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_pass_for_implementations_that_are_right(name, impl):
    bad = [row for row in outcomes(CHECKS[name], impl).values() if row.status != "ok"]
    assert bad == []


def test_the_loss_checks_cover_every_type_level_estimator_and_option():
    options = [check.options for check in checks_loss.checks()]
    seen = {(o.loss_type, o.importance_sampling_level) for o in options}
    clipped = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo"}
    assert seen == {(t, "token") for t in LossType.__args__} | {(t, "sequence") for t in clipped}
    estimators = {(o.kl_estimator, o.use_bias_correction_kl) for o in options}
    assert len(estimators) == 6
    assert {o.baseline for o in options} == {"mean", "median", "loo"}
    assert {o.scale_rewards for o in options} == {"group", "batch", "none"}
    assert {"packed", "padded"} == {check.layout for check in checks_loss.checks()}
    extras = {extra for check in checks_loss.checks() for extra in check.extras}
    assert extras == set("no_old importance normalizer flags mask all_masked".split())


def test_the_head_checks_meet_rows_that_are_nearly_sure():
    # Where the target's column inside a low-precision GEMM would be seen.
    for check in checks_head.checks():
        if check.vocab == 1000 and not check.adorned:
            logp = checks_head._expected(check, partial(checks_head._data, check)).get("logp")
            if logp is not None:
                assert logp.values.exp().max() > 0.99 > logp.values.exp().min()


@pytest.mark.parametrize(
    ("name", "spoil", "hit"),
    [
        ("loss", {"importance_ratio": None}, "importance"),
        ("loss", {"normalizer": None}, "on-policy"),
        ("loss", {"in_loss": None}, "beta=0.0"),
        ("head", {"softcap": None}, "adorned"),
        ("head", {"bias": None}, "adorned"),
        ("head", {"temperature": 1.0}, "adorned"),
    ],
)
def test_the_checks_see_an_argument_that_is_dropped(name, spoil, hit, monkeypatch):
    for op in ("grpo_loss", "token_logprob", "linear_grpo_loss"):
        right = getattr(ops, op)

        def wrong(*args, right=right, **given):
            return right(*args, **given | {k: x for k, x in spoil.items() if k in given})

        monkeypatch.setattr(ops, op, wrong)
    found = outcomes(CHECKS[name], "torch")
    bad = {case for case, row in found.items() if row.status != "ok"}
    if hit == "importance":
        expected = {c.name for c in checks_loss.checks() if "importance" in c.extras}
        # A ratio that weights only zero advantages changes nothing.
        assert bad and bad <= expected
    elif name == "head":
        assert bad == {case for case in found if case.endswith(hit)}
    else:
        assert hit in bad


def start_script(script: str) -> object:
    """In place of device._start: a process that runs `script`, which knows NAME and PATH."""

    def start(name, path, seconds, dry_run, commit):
        code = f"import json, sys, time\nNAME, PATH = {name!r}, {str(path)!r}\n{script}"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    return start


def alive(pid: int) -> bool:
    """Whether a process runs; one that is only waiting to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


WRITE = "open(PATH, 'w').write(json.dumps({'rows': [NAME]}))\n"


def test_a_section_that_outlives_its_time_is_stopped_and_leaves_what_it_has(monkeypatch):
    grandchild = "import subprocess\nc = subprocess.Popen(['sleep', '600'])\n"
    write = "open(PATH, 'w').write(json.dumps({'rows': [NAME], 'pid': c.pid}))\n"
    monkeypatch.setattr(device, "_start", start_script(grandchild + write + "time.sleep(600)"))
    start = time.monotonic()
    sections = device.run_stage(["a", "b"], 3.0, dry_run=False, commit=None)
    assert time.monotonic() - start < 60  # side by side, and not ten minutes
    for name in ("a", "b"):
        assert sections[name]["status"] == "out of time" and sections[name]["rows"] == [name]
        while alive(sections[name]["pid"]):  # what it had started goes too
            assert time.monotonic() - start < 60
            time.sleep(0.05)


def test_a_section_that_crashes_does_not_take_the_others_along(monkeypatch):
    script = WRITE + "sys.exit(3 if NAME == 'a' else 0)"
    monkeypatch.setattr(device, "_start", start_script(script))
    sections = device.run_stage(["a", "b"], 60.0, dry_run=False, commit=None)
    assert [sections[name]["status"] for name in ("a", "b")] == ["ended with 3", "done"]
    assert sections["a"]["rows"] == ["a"]
    monkeypatch.setattr(device, "_start", start_script("sys.exit(1)"))
    (section,) = device.run_stage(["a"], 60.0, dry_run=False, commit=None).values()
    assert (section["status"], section["rows"]) == ("ended with 1", [])


def test_stages_share_the_time_and_hand_on_what_they_leave(monkeypatch):
    now, budgets = [1000.0], []

    def stage(names, seconds, dry_run, commit):
        budgets.append(seconds)
        now[0] += 30.0
        return {}

    monkeypatch.setattr(device, "STAGES", ((("a",), 4), (("b",), 3), (("c",), 3)))
    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device, "run_stage", stage)
    device.run_stages(300.0, dry_run=False, commit=None)
    assert budgets == pytest.approx([300 * 4 / 10, 270 / 2, 240])


def test_past_its_deadline_a_section_names_what_it_did_not_reach(tmp_path):
    path = tmp_path / "section.json"
    assert device.run_section("bench-head", path, -1.0, dry_run=True, commit="abc") == 0
    found = json.loads(path.read_text())
    assert found["machine"]["commit"] == "abc"
    rows = [Row(**row) for row in found["rows"]]
    assert {row.case for row in rows} == {"frozen", "trainable", "trainable-fused", "no-gradient"}
    assert {(row.status, row.note) for row in rows} == {("left out", "out of time")}


def section(*rows: Row, status: str = "done") -> dict:
    return {"status": status, "seconds": 1.0, "rows": [asdict(row) for row in rows]}


GOOD = Row("check-loss", "case", "ours-triton", {})


@pytest.mark.parametrize(
    ("found", "good", "says"),
    [
        (section(GOOD), True, "check-loss: done; 1 rows, 0 bad, 0 late"),
        (section(GOOD, status="out of time"), False, "out of time; 1 rows"),
        (section(GOOD, status="ended with -11"), False, "ended with -11"),
        (section(replace(GOOD, status="wrong", note="x is off")), False, "ours-triton: x is off"),
        (section(replace(GOOD, status="failed", note="E")), False, "1 rows, 1 bad, 0 late"),
        (
            section(GOOD, replace(GOOD, status="left out", note="out of time")),
            False,
            "2 rows, 0 bad, 1 late",
        ),
        (section(GOOD, replace(GOOD, provider="trl", status="not installed")), True, "0 bad"),
    ],
)
def test_the_summary_is_good_only_if_all_was_done_and_right(found, good, says, capsys):
    assert device.summarise({"machine": None, "sections": {"check-loss": found}}) is good
    assert says in capsys.readouterr().out


def test_without_cuda_it_says_what_needs_none(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.main(["--out", str(tmp_path)]) == 2
    assert "--dry-run needs none" in capsys.readouterr().err


def test_a_dry_run_compiles_and_interprets_and_writes_one_file(monkeypatch, tmp_path, capsys):
    """All but the walk through the sections, each of which is a process of many seconds."""
    calls = []

    def compile_child(command, env):
        calls.append((command[-1], env.get("TRITON_INTERPRET")))
        return subprocess.CompletedProcess(command, 0)

    def popen(command, env, start_new_session):
        calls.append((command[command.index("--section") + 1], env.get("TRITON_INTERPRET")))
        assert "--dry-run" in command
        path = command[command.index("--out") + 1]
        rows = json.dumps({"rows": [asdict(GOOD)]})
        script = f"open({path!r}, 'w').write({rows!r})"
        return real_popen([sys.executable, "-c", script], start_new_session=True)

    real_popen = subprocess.Popen
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device.subprocess, "run", compile_child)
    monkeypatch.setattr(device.subprocess, "Popen", popen)
    assert device.main(["--dry-run", "--out", str(tmp_path)]) == 0
    assert calls[0] == ("grpo_engine.benchmarks.cubins", None)
    assert dict(calls[1:]) == dict.fromkeys((*device.CHECKS, *device.BENCHES), "1")
    found = json.loads((tmp_path / "dry-run.json").read_text())
    assert found["dry_run"] is True and set(found["sections"]) == set(dict(calls[1:]))


@pytest.mark.parametrize("check", [c for c in checks_loss.checks() if "mask" in c.extras][:4])
def test_what_is_masked_in_the_checks_is_not_a_number(check):
    data = partial(checks_loss._data, checks_loss.TINY_GROUPS, checks_loss.TINY_LENGTHS)
    given = checks_loss._arguments(check, data, torch.float32, CPU)
    hidden = ~given["mask"].bool()
    assert hidden.any() and given["logp"][hidden].isnan().all()
    assert given["logp"][~hidden].isfinite().all()
    assert (~given["old_logp"][hidden].isfinite()).all()
