"""A finished run as something that can be used: its policy in memory, or a folder of weights."""

import shutil
from pathlib import Path

from .config import RunConfig
from .disk import write_folder
from .errors import UserError
from .model import Policy, load_policy
from .parsing import load_run


def open_run(run: Path, step: int | None = None) -> tuple[RunConfig, Policy]:
    """The config and the trained policy of a run, or of its checkpoint at `step`."""
    config, weights = _weights(run, step)
    policy = load_policy(config.model, config.lora, needs_reference=False, resume=weights)
    return config, policy


def export_run(run: Path, out: Path, step: int | None, merge: bool) -> None:
    """Copies the weights of a run to `out`, or merges its adapter into a copy of the base model.

    Raises UserError if `out` exists, or for a merge into quantised weights, which would round.
    """
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    config, weights = _weights(run, step)
    if not merge or config.lora is None:
        write_folder(out, lambda folder: shutil.copytree(weights, folder, dirs_exist_ok=True))
        return
    if config.model.base != "none":
        raise UserError(
            f"can't merge into the {config.model.base} weights of this run: they would be rounded; "
            "export without --merge and load the adapter on the full-precision base"
        )
    policy = open_run(run, step)[1]
    merged = policy.model.merge_and_unload()

    def write(folder: Path) -> None:
        merged.save_pretrained(str(folder))
        policy.tokenizer.save_pretrained(str(folder))

    write_folder(out, write)


def run_config(run: Path) -> RunConfig:
    """The config of a run folder; UserError if it is none."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no config.yaml")
    return load_run(run / "config.yaml")


def _weights(run: Path, step: int | None) -> tuple[RunConfig, Path]:
    config = run_config(run)
    name = config.weights_name
    folder = run / name if step is None else run / "checkpoints" / f"step-{step:06d}" / name
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; a run writes it at its end, checkpoints before")
    return config, folder
