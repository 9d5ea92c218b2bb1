"""Peak memory of one call beyond what was there right before it, outputs included.

On a CPU in a fresh process each: `python -m grpo_engine.benchmarks.memory REQUEST`. On CUDA the
allocator's own counter is exact whatever ran before, so no process is spent on it.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .harness import Case, Provider, Step

MIB = 1 << 20
# With a fixed threshold glibc hands freed tensors back, so that none hides in its free lists.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
PACKAGE_ROOT = Path(__file__).absolute().parents[2]


@dataclass(frozen=True)
class FreshProcess:
    """A harness.PeakMemory: runs one provider of one case in a process of its own."""

    threads: int

    def __call__(self, case: Case, provider: Provider, step: Step) -> tuple[float | None, str]:
        """MiB, and a note where it is not exact or not known."""
        request = {
            "suite": case.suite,
            "case": case.name,
            "shape": dict(case.shape),
            "provider": provider.name,
            "threads": self.threads,
        }
        found, note = measure_in_child(request)
        if found is None:
            return None, f"memory not measured: {note}"
        return found, note


def measure_in_child(request: dict[str, Any]) -> tuple[float | None, str]:
    """Runs this module on a request; (None, why) if it fails."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-m", f"{__package__}.memory", json.dumps(request)],
        env={**os.environ, **MALLOC, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"its process ended with {child.returncode}"
    answer = json.loads(child.stdout.splitlines()[-1])
    return answer["mib"], answer["note"]


def cuda_peak(case: Case, provider: Provider, step: Step) -> tuple[float | None, str]:
    """A harness.PeakMemory by the counter of torch's CUDA allocator."""
    gc.collect()
    torch.cuda.synchronize(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    before = torch.cuda.memory_allocated(case.device)
    step()
    torch.cuda.synchronize(case.device)
    return (torch.cuda.max_memory_allocated(case.device) - before) / MIB, ""


def cpu_peak(step: Callable[[], Any]) -> tuple[float | None, str]:
    """The rise of this process's resident memory while `step` runs, from Linux's own high mark."""
    risen, note = cpu_mark()
    result = step()
    mib = risen()
    del result
    return mib, note


def cpu_mark() -> tuple[Callable[[], float | None], str]:
    """Resets the high mark; -> what says by how many MiB it rose above the present size, a note."""
    gc.collect()
    if not Path("/proc/self/status").exists():
        return lambda: None, "this system has no /proc/self/status"
    ctypes.CDLL(None).malloc_trim(0)
    note = ""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high mark falls to the present size
    except OSError:
        note = "memory is an upper bound: the high mark can't be reset here"
    before = _status_kib("VmRSS")
    return lambda: (_status_kib("VmHWM") - before) / 1024, note


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def main(request: dict[str, Any]) -> None:
    """One provider of one case: a call at a tiny shape loads its code, the next is measured."""
    from .suites import SUITES, shapes_of

    torch.set_num_threads(request["threads"])
    suite = SUITES[request["suite"]]
    small, shape = shapes_of(suite, "small"), suite.Shape(**request["shape"])
    device = torch.device("cpu")

    def prepare(*shapes: Any) -> tuple[Provider, Step]:
        cases = {case.name: case for shape in shapes for case in suite.cases(shape, device)}
        case = cases[request["case"]]
        provider = next(p for p in case.providers if p.name == request["provider"])
        return provider, provider.build(case.inputs())

    provider, step = prepare(*small)
    step()
    if shape not in small:
        provider, step = prepare(shape)
    if provider.compiles:
        step()
    mib, note = cpu_peak(step)
    print(json.dumps({"mib": mib, "note": note}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
