"""All kernels on a CUDA machine, checked and timed, in one command within six minutes.

    python -m grpo_engine.benchmarks.device [--out FOLDER] [--commit TEXT] [--dry-run]

Every section runs in a process of its own, is stopped when its time is up, and leaves what it has.
One JSON comes out. --dry-run needs no GPU: it compiles every kernel and walks every path on tiny
shapes through Triton's interpreter. Exits with 1 unless all was done and right.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from . import (
    checks_decode,
    checks_grouped,
    checks_head,
    checks_loss,
    checks_sample,
    machine,
    memory,
    report,
)
from .harness import LEFT_OUT, Case, Provider, Row, Step, Timer, admit, run_case
from .run import faults
from .suites import SUITES, shapes_of

SECONDS, DRY_SECONDS = 330.0, 3600.0  # of six minutes; the interpreter may take its time
GRACE_S = 10.0  # a section ends by itself this long before it is killed
CHECKS = {
    "check-loss": checks_loss,
    "check-head": checks_head,
    "check-decode": checks_decode,
    "check-grouped": checks_grouped,
    "check-sample": checks_sample,
}
BENCHES = {"bench-loss": "loss", "bench-head": "head", "bench-sampler": "sampler"}
# The loss as on a CPU too: there a launch costs more than the work.
SHAPES = {"bench-loss": ("cuda", "full"), "bench-head": ("cuda",), "bench-sampler": ("device",)}
# Stages in turn, with their share of the time; what one leaves goes to the next. Checks are not
# timed, so they run side by side.
STAGES = ((tuple(CHECKS), 4), (("bench-loss",), 3), (("bench-head",), 3), (("bench-sampler",), 2))

Section = dict[str, Any]  # status, seconds, rows, machine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="what the tree is, where git can't say it")
    parser.add_argument("--seconds", type=float, help=f"in all (default: {SECONDS:g})")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: compile and interpret")
    parser.add_argument("--section", choices=(*CHECKS, *BENCHES), help="this one alone, to --out")
    given = parser.parse_args(arguments)
    seconds = given.seconds or (DRY_SECONDS if given.dry_run else SECONDS)
    if given.section:
        return run_section(given.section, given.out, seconds, given.dry_run, given.commit)
    if not given.dry_run and not torch.cuda.is_available():
        print("device: error: torch finds no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    try:
        report.prepare(given.out)
    except UserError as error:
        print(f"device: error: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    compiled = compile_kernels() if given.dry_run else True
    sections = run_stages(seconds, given.dry_run, given.commit)
    found = {
        "seconds": time.perf_counter() - start,
        "dry_run": given.dry_run,
        "machine": next((s["machine"] for s in sections.values() if "machine" in s), None),
        "sections": sections,
    }
    path = given.out / f"{'dry-run' if given.dry_run else _slug()}.json"
    report.write_json(path, found)
    print(f"written: {path} after {found['seconds']:.0f} s")
    return 0 if summarise(found) and compiled else 1


def compile_kernels() -> bool:
    """Every copy of every Triton kernel, for every architecture, in a process that compiles."""
    command = [sys.executable, "-m", f"{__package__}.cubins"]
    return subprocess.run(command, env=_environment(interpret=False)).returncode == 0


def run_stages(seconds: float, dry_run: bool, commit: str | None) -> dict[str, Section]:
    """All sections by name."""
    end = time.perf_counter() + seconds
    sections = {}
    for i, (names, share) in enumerate(STAGES):
        shares = sum(later for _, later in STAGES[i:])
        budget = (end - time.perf_counter()) * share / shares
        sections |= run_stage(names, budget, dry_run, commit)
    return sections


def run_stage(
    names: Sequence[str], seconds: float, dry_run: bool, commit: str | None
) -> dict[str, Section]:
    """Sections side by side; after `seconds` each is killed, and what it wrote is kept."""
    start = time.perf_counter()
    sections = {}
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: (path := Path(folder) / name, _start(name, path, seconds, dry_run, commit))
            for name in names
        }
        try:
            for name, (path, child) in running.items():
                left = start + seconds - time.perf_counter()
                status = _wait(child, max(0.0, left))
                written = json.loads(path.read_text()) if path.exists() else {"rows": []}
                spent = time.perf_counter() - start
                sections[name] = {"status": status, "seconds": spent, **written}
                print(f"{name}: {status} after {spent:.0f} s", flush=True)
        finally:
            for _, child in running.values():
                _end(child)
    return sections


def _wait(child: subprocess.Popen, seconds: float) -> str:
    try:
        code = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "out of time"
    return "done" if code == 0 else f"ended with {code}"


def _end(child: subprocess.Popen) -> None:
    """With its own children: a compiler left behind would disturb the next section's times."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _start(
    name: str, path: Path, seconds: float, dry_run: bool, commit: str | None
) -> subprocess.Popen:
    own = max(1.0, seconds - GRACE_S)
    command = [sys.executable, "-m", f"{__package__}.device", "--section", name]
    command += ["--out", str(path), "--seconds", str(own)]
    command += ["--dry-run"] * dry_run + (["--commit", commit] if commit else [])
    return subprocess.Popen(command, env=_environment(interpret=dry_run), start_new_session=True)


def _environment(interpret: bool) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(memory.PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return env | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpret else {})


def run_section(
    name: str, path: Path, seconds: float, dry_run: bool, commit: str | None = None
) -> int:
    """One section in this process; `path` is written again after each of its cases."""
    deadline = time.perf_counter() + seconds
    device = torch.device("cpu" if dry_run else "cuda")
    found: dict[str, Any] = {"rows": []}
    if name in BENCHES:
        found["machine"] = machine.describe(device, small=dry_run, commit=commit)
    for rows in _rows(name, device, deadline, dry_run):
        found["rows"] += map(asdict, rows)
        report.write_json(path, found)
    return 0


def _rows(name: str, device: torch.device, deadline: float, dry_run: bool) -> Iterator[list[Row]]:
    if name in CHECKS:
        cases = CHECKS[name].cases("triton", device, tiny=dry_run)
        timer = None
    else:
        suite = SUITES[BENCHES[name]]
        shapes = ("small",) if dry_run else SHAPES[name]
        cases = [
            case for s in shapes for x in shapes_of(suite, s) for case in suite.cases(x, device)
        ]
        slice_s = 0.0 if dry_run else 0.02
        timer = Timer.on(device, rounds=7, slice_s=slice_s, deadline=deadline)
    peak = _no_peak if dry_run else memory.cuda_peak
    for case in cases:
        if time.perf_counter() > deadline:
            yield _left_out(case)
        elif timer is None:
            inputs, expected = case.inputs(), case.expected()
            yield [admit(case, provider, inputs, expected)[0] for provider in case.providers]
        else:
            yield run_case(case, timer, peak)


def _left_out(case: Case) -> list[Row]:
    return [
        Row(case.suite, case.name, p.name, dict(case.shape), LEFT_OUT, "out of time")
        for p in case.providers
    ]


def _no_peak(case: Case, provider: Provider, step: Step) -> tuple[None, str]:
    return None, "dry run"


def summarise(found: dict[str, Any]) -> bool:
    """Prints what came out; whether every section was done, in time and right."""
    good = True
    for name, section in found["sections"].items():
        rows = [Row(**row) for row in section["rows"]]
        late = [row for row in rows if row.note.endswith("out of time")]
        bad = faults(rows)
        good = good and section["status"] == "done" and not late and not bad
        print(f"{name}: {section['status']}; {len(rows)} rows, {len(bad)} bad, {len(late)} late")
        for fault in bad:
            print(f"  {fault}")
        if name in BENCHES and found["machine"] is not None:
            try:
                report.show(found["machine"], rows)
            except UserError as error:
                print(error)
    return good


def _slug() -> str:
    name = machine.device_name(torch.device("cuda")).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


if __name__ == "__main__":
    sys.exit(main())
