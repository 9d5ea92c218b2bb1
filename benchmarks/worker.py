"""A training loop in a process of its own that makes a step when it is told to.

`python -m grpo_engine.benchmarks.worker REQUEST`: a line `go` on stdin is a step, answered by a
line of JSON. The loop's own printing goes to stderr.
"""

import json
import os
import subprocess
import sys
import tempfile
import weakref
from typing import IO, Any

import torch
from torch import Tensor

from .memory import MALLOC, MIB, PACKAGE_ROOT, cpu_mark

PATIENCE_S = 10  # for a loop that was told to end


class Worker:
    """A harness.Step: a call is a step of the loop, with all that the loop does between steps.

    peak_mem_mib, note: after a call, the memory above what was there before the first step.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        """request: loop (of loops.LOOPS), runs, device and threads.

        runs: folder, shape and steps of each; all but the last go on to their end and only load
        the code of a step, which is not its memory. Returns when the last stands before its first
        step. Raises ModuleNotFoundError where the loop's package is missing, RuntimeError where
        it fails.
        """
        self.peak_mem_mib: float | None = None
        self.note = ""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", json.dumps(request)],
            env={**os.environ, **MALLOC, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        weakref.finalize(self, _end, self._process)
        self._answer()

    def __call__(self) -> dict[str, Tensor]:
        """{"tokens": trained on, "finite": 1 where loss and gradient norm are}."""
        print("go", file=self._process.stdin, flush=True)
        answer = self._answer()
        self.peak_mem_mib, self.note = answer["peak_mem_mib"], answer["note"]
        return {name: torch.tensor(float(answer[name])) for name in ("tokens", "finite")}

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"failed": self._last_words()}
        if "missing" in answer:
            raise ModuleNotFoundError(f"no package {answer['missing']}", name=answer["missing"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"its process ended with {code}"


class Pace:
    """The loop's side: it stops before every step until that is asked for."""

    def __init__(self, orders: IO[str], answers: IO[str], device: torch.device) -> None:
        self.orders, self.answers, self.device = orders, answers, device
        self.result: dict[str, float] | None = None

    def before_step(self) -> None:
        """Answers with the result of the step before; memory is counted from the first time on."""
        if self.result is None:
            self._mark()
            self._say({})
        else:
            peak = self._risen()
            self._say(self.result | {"peak_mem_mib": peak, "note": self.note})
        if not self.orders.readline():
            os._exit(0)  # an exception would have the loop save what it has trained

    def after_step(self, tokens: float, *finite: float) -> None:
        """tokens: completion tokens in the loss; finite: numbers that must be."""
        holds = bool(torch.isfinite(torch.tensor(finite)).all())
        self.result = {"tokens": tokens, "finite": float(holds)}

    def _mark(self) -> None:
        if self.device.type == "cpu":
            self._risen, self.note = cpu_mark()
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before, self.note = torch.cuda.memory_allocated(self.device), ""
        self._risen = lambda: (torch.cuda.max_memory_allocated(self.device) - before) / MIB

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self.answers, flush=True)


class Unpaced:
    """In place of a Pace: the loop runs to its end."""

    def before_step(self) -> None:
        """Nothing is waited for."""

    def after_step(self, tokens: float, *finite: float) -> None:
        """Nobody asks."""


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(request: dict[str, Any]) -> None:
    """Runs the loop; it ends when stdin does."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from .loops import LOOPS

    torch.set_num_threads(request["threads"])
    loop = LOOPS[request["loop"]]
    *before, measured = ({"device": request["device"]} | run for run in request["runs"])
    try:
        for run in before:
            loop(run, Unpaced())
        loop(measured, Pace(sys.stdin, answers, torch.device(request["device"])))
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
