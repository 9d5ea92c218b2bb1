"""The metrics of a run for TensorBoard, beside metrics.jsonl."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import require


class Board:
    """Writes event files into a folder; a resumed run writes a file of its own."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "tensorboard", "train.tensorboard")
        self._folder, self._writer = folder, None

    def add(self, metrics: dict[str, Any]) -> None:
        """One line of metrics: its numbers, those of parts as part/name."""
        if self._writer is None:  # only now: a folder that is refused must not be written to
            from torch.utils.tensorboard import SummaryWriter

            # What a killed process wrote from here on is forgotten, as in metrics.jsonl.
            first = metrics["step"] if "loss" in metrics else metrics["step"] + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=first)
        for name, value in _numbers(metrics):
            self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
