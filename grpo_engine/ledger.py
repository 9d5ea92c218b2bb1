"""What happened, on disk: config, environment, a line of metrics a step, a row a sample."""

import json
import math
import platform
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
from .disk import append_line, remove_folder, write_text, writing
from .errors import UserError, require
from .groups.batch import Batch
from .guards.audit import audit
from .lock import RunLock
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

    def lock(self, resume: bool) -> RunLock:
        """Takes the folder for this process, before anything is looked at or written there.

        UserError if another process has it, it can't be made, or there is no run to resume.
        """
        if resume and not self.holds_run():
            raise UserError(f"{self.out} holds no run to resume: leave out --resume")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"can't make the run folder {self.out}: {error.strerror}; give another --train.out"
            ) from error
        return RunLock(self.out)

    def create(self) -> None:
        """Makes the folders of a new run; UserError if there is a run already."""
        if self.holds_run():
            raise UserError(
                f"{self.out} already holds a run: go on with --resume, or give another --train.out"
            )
        self._make_folders()
        self._error_path.unlink(missing_ok=True)  # of an attempt that did not start

    def write_header(
        self, config: RunConfig, device: torch.device, reward_versions: dict[str, str]
    ) -> None:
        """Writes config.yaml and environment.json; reward_versions: by reward function."""
        write_text(self.out / "config.yaml", dump_config(config))
        found = environment(device) | {"rewards": reward_versions}
        write_text(self.out / "environment.json", json.dumps(found, indent=2) + "\n")

    def rewind(self, step: int, evaluated: bool = False) -> None:
        """Goes on after `step`: forgets what a killed process wrote about later steps.

        evaluated: whether `step` has been; if not, a line of an evaluation alone goes as well.
        """
        self._make_folders()
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
        write_text(self._metrics_path, "".join(kept))
        self._error_path.unlink(missing_ok=True)
        for path in (*self.rollouts.glob("step-*.parquet"), *self.out.glob("audit/step-*.md")):
            number = path.stem.removeprefix("step-")
            if number.isdigit() and int(number) > step:
                path.unlink()
        for path in sorted(self.out.rglob(".*.tmp")):  # a folder before what lies in it
            remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)

    def holds_run(self) -> bool:
        """Whether a run has been started here."""
        return self._metrics_path.exists() or any(self.checkpoints.glob("step-*"))

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line; a number that is not finite is written as null, as JSON wants it.

        What a line tells of has been recorded before it. DiskError if it can't be written.
        """
        self.flush()
        if self._board is not None:
            with writing(self.out / "tensorboard"):
                self._board.add(values)
        append_line(self._metrics_path, json.dumps(_finite(values), allow_nan=False))

    def samples(
        self, step: int, batch: Batch, asked: Sequence[Asked], completions: Sequence[str]
    ) -> None:
        """Writes rollouts/step-000012.parquet, a row a sample; see `rollout_table`.

        In a thread, beside the training of the step: `flush` raises what goes wrong there.
        """
        self.flush()
        require("pyarrow.parquet", "train", "recording rollouts")
        self._writing = self._writer.submit(self._write_part, step, batch, asked, completions)

    def flush(self) -> None:
        """Waits until the samples are written; DiskError if they could not be."""
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
        path = self._audit_path(step)
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        write_text(path, audit(rows))
        return path

    def has_audit(self, step: int) -> bool:
        """Whether that of `step` has been written."""
        return self._audit_path(step).exists()

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
        temporary = target.with_name(f".{target.name}.tmp")
        with writing(target):
            try:
                parquet.write_table(rollout_table(step, batch, asked, completions), temporary)
                temporary.rename(target)
            finally:
                temporary.unlink(missing_ok=True)

    def _make_folders(self) -> None:
        with writing(self.out):
            for folder in (self.checkpoints, self.rollouts):
                folder.mkdir(exist_ok=True)

    def _audit_path(self, step: int) -> Path:
        return self.out / "audit" / f"step-{step:06d}.md"

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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, if it runs from one."""
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return None  # installed, maybe inside somebody's repository
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """The output of a git command in the folder of this file; None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
