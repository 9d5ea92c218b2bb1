"""What several commands need: numbers as arguments, quiet libraries, one line for an error."""

import argparse
import logging
import sys
import warnings
from pathlib import Path

from ..errors import UserError, require


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


def quiet() -> None:
    """No progress bars and advice of the libraries between our lines."""
    transformers = require("transformers", "train", "this command")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")
