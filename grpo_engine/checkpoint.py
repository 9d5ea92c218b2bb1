"""Checkpoints that appear whole or not at all, and hold all that an exact resume needs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .disk import remove_folder, write_folder
from .errors import UserError, require

STATE, OPTIMIZER = "state.json", "optimizer.safetensors"


@dataclass
class Checkpoint:
    """A saved state: `values` is plain data, `tensors` the optimiser's, weights lie in `folder`."""

    folder: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]


def save_checkpoint(
    root: Path,
    step: int,
    values: dict[str, Any],
    tensors: dict[str, Tensor],
    save_weights: Callable[[Path], None],
    keep: int,
    spare: int | None = None,
) -> Path:
    """Writes root/step-000012 and removes all but the newest `keep` and that of step `spare`.

    `save_weights` gets the folder for the weights. DiskError if it can't be written; the
    checkpoints that were there stay.
    """
    target = _folder(root, step)

    def write(folder: Path) -> None:
        save_weights(folder)
        save_file = require("safetensors.torch", "train", "checkpoints").save_file
        save_file(tensors, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps(values))

    write_folder(target, write)
    for old in list_checkpoints(root)[:-keep]:
        if spare is None or old != _folder(root, spare):
            remove_folder(old)
    return target


def is_saved(root: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step."""
    return (_folder(root, step) / STATE).is_file()


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints below `root`, oldest first."""
    named = [p for p in root.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    found = [p for p in named if (p / STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads what `save_checkpoint` wrote; UserError if it is damaged."""
    load_file = require("safetensors.torch", "train", "checkpoints").load_file
    try:
        values = json.loads((folder / STATE).read_text())
        tensors = load_file(folder / OPTIMIZER)
    except Exception as error:  # safetensors' error type is not an OSError
        raise UserError(
            f"the checkpoint {folder} is damaged ({error}); remove it to go on from an older one"
        ) from error
    return Checkpoint(folder, values, tensors)


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"
