"""What happened, on disk: config, environment, a line of metrics a step, a row a sample."""

import json
import math
import os
import platform
import shutil
import subprocess
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .board import Board
from .config import RunConfig
from .errors import UserError, require
from .groups.batch import Batch
from .guards.audit import audit
from .parsing import dump_config
from .rollout_table import AUDITED, Asked, audit_rows, rollout_table

PACKAGES = "grpo-engine torch transformers peft bitsandbytes safetensors tokenizers numpy".split()


class Ledger:
    """The run folder, apart from its checkpoints."""

    def __init__(self, out: Path, *, tensorboard: bool = False) -> None:
        self.out = out
        self._board = Board(out / "tensorboard") if tensorboard else None
        self.checkpoints = out / "checkpoints"
        self.rollouts = out / "rollouts"
        self._metrics_path = out / "metrics.jsonl"
        self._error_path = out / "error.txt"
        self._writer = ThreadPoolExecutor(1)  # starts its thread with the first samples
        self._writing: Future | None = None

    def create(self) -> None:
        """Makes the folder; UserError if it can't be made or already holds a run."""
        if self.holds_run():
            raise UserError(
                f"{self.out} already holds a run: go on with --resume, or give another --train.out"
            )
        try:
            for folder in (self.checkpoints, self.rollouts):
                folder.mkdir(parents=True, exist_ok=True)
            self._error_path.unlink(missing_ok=True)  # of an attempt that did not start
        except OSError as error:
            raise UserError(
                f"can't make the run folder {self.out}: {error.strerror}; give another --train.out"
            ) from error

    def write_header(
        self, config: RunConfig, device: torch.device, reward_versions: dict[str, str]
    ) -> None:
        """Writes config.yaml and environment.json; reward_versions: by reward function."""
        _replace(self.out / "config.yaml", dump_config(config))
        found = environment(device) | {"rewards": reward_versions}
        _replace(self.out / "environment.json", json.dumps(found, indent=2) + "\n")

    def rewind(self, step: int, evaluated: bool = False) -> None:
        """Goes on after `step`: forgets what a killed process wrote about later steps.

        evaluated: whether `step` has been; if not, a line of an evaluation alone goes as well.
        """
        for folder in (self.checkpoints, self.rollouts):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            lines = [json.loads(line) for line in self._whole_lines()]
            kept = [
                json.dumps(line) + "\n"
                for line in lines
                if line["step"] < step
                or (line["step"] == step and (evaluated or not _is_evaluation(line)))
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._metrics_path} is damaged ({error}): remove the lines that are no metrics"
            ) from error
        _replace(self._metrics_path, "".join(kept))
        self._error_path.unlink(missing_ok=True)
        for path in (*self.rollouts.glob("step-*.parquet"), *self.out.glob("audit/step-*.md")):
            number = path.stem.removeprefix("step-")
            if number.isdigit() and int(number) > step:
                path.unlink()
        for path in self.rollouts.glob("*.tmp"):
            path.unlink()
        for path in (*self.checkpoints.glob(".*.tmp"), *self.out.glob(".*.tmp")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def holds_run(self) -> bool:
        """Whether a run has been started here."""
        return self._metrics_path.exists() or any(self.checkpoints.glob("step-*"))

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line; a number that is not finite is written as null, as JSON wants it.

        What a line tells of has been recorded before it.
        """
        self.flush()
        with self._metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(values), allow_nan=False) + "\n")
        if self._board is not None:
            self._board.add(values)

    def samples(
        self, step: int, batch: Batch, asked: Sequence[Asked], completions: Sequence[str]
    ) -> None:
        """Writes rollouts/step-000012.parquet, a row a sample; see `rollout_table`.

        In a thread, beside the training of the step: an error of the disk is raised by `flush`.
        """
        self.flush()
        require("pyarrow.parquet", "train", "recording rollouts")
        self._writing = self._writer.submit(self._write_part, step, batch, asked, completions)

    def flush(self) -> None:
        """Waits until the samples are written; raises OSError if they could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def audit(self, step: int, steps: int) -> Path:
        """Lists the highest-rewarded samples of the last `steps` steps in audit/step-000500.md."""
        parquet = require("pyarrow.parquet", "train", "reading rollouts")
        rows = []
        for number in range(step - steps + 1, step + 1):
            path = self._part(number)
            if path.exists():  # a generation may serve several steps
                rows += audit_rows(parquet.read_table(path, columns=AUDITED))
        path = self.out / "audit" / f"step-{step:06d}.md"
        path.parent.mkdir(exist_ok=True)
        _replace(path, audit(rows))
        return path

    def traceback(self, error: BaseException) -> Path:
        """Keeps the traceback for whoever looks for the cause."""
        text = "".join(traceback.format_exception(error))
        self._error_path.write_text(text, encoding="utf-8")
        return self._error_path

    def _write_part(
        self, step: int, batch: Batch, asked: Sequence[Asked], completions: Sequence[str]
    ) -> None:
        parquet = require("pyarrow.parquet", "train", "recording rollouts")
        target = self._part(step)
        temporary = target.with_suffix(".tmp")
        try:
            parquet.write_table(rollout_table(step, batch, asked, completions), temporary)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)

    def _part(self, step: int) -> Path:
        return self.rollouts / f"step-{step:06d}.parquet"

    def _whole_lines(self) -> list[str]:
        if not self._metrics_path.exists():
            return []
        text = self._metrics_path.read_text(encoding="utf-8")
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit, so that a result can be traced to what made it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        # torch says of itself whether it is a CUDA build; the package's metadata may not.
        "packages": {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _is_evaluation(line: dict[str, Any]) -> bool:
    """Whether a line has no step in it, as before the first and after a resume."""
    return "eval_reward" in line and "loss" not in line


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, if it runs from one."""
    try:
        run = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None
