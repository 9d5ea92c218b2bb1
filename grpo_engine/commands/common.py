"""What several commands need: numbers as arguments, quiet libraries, one line for an error."""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError, require

if TYPE_CHECKING:
    from ..sample_config import RewardConfig


def positive(text: str) -> int:
    """An argument of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; given {text}")
    return value


def not_negative(text: str) -> float:
    """A finite argument of at least 0."""
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and not negative; given {text}")
    return value


def fail(text: str, code: int = 2) -> int:
    """Prints an error as one line; returns the exit code."""
    print(f"grpo: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def check_out(out: Path | None, run: Path | None = None) -> None:
    """Raises UserError for a file that can't be written, or lies in the folder of the run."""
    if out is None:
        return
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; make it first")
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; give a file")
    if run is not None and run.resolve() in out.resolve().parents:
        raise UserError(f"--out: {out} lies in the run folder, which is not changed; give another")


def add_trust(parser: argparse.ArgumentParser, rewards: bool = False) -> None:
    """The options by which code that a run folder names may run: its own word doesn't count."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="code that the run's model brings may run"
    )
    if rewards:
        parser.add_argument(
            "--run-rewards",
            action="store_true",
            help="the files and modules may run that the run's config names as rewards; built-ins "
            "always may",
        )


def check_trust(given: argparse.Namespace, rewards: "Sequence[RewardConfig]") -> None:
    """Raises UserError if one of these, named by a run folder, is code and was not allowed."""
    from ..rewards.load import named_code

    code = named_code(rewards)
    if code and not given.run_rewards:
        raise UserError(
            f"the config of {given.run} names {', '.join(code)} as rewards, and that code would "
            "run here; if you trust it, say so: --run-rewards"
        )


def quiet() -> None:
    """No progress bars and advice of the libraries between our lines."""
    transformers = require("transformers", "train", "this command")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")
