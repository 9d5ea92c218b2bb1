"""grpo bench: this project's kernels against others, on this machine."""

import argparse
import importlib.util
from pathlib import Path

from ..paths import path_of
from .common import fail, positive, quiet


def run(args: list[str]) -> int:
    """Returns 1 where a result of ours is wrong."""
    parser = argparse.ArgumentParser(
        prog="grpo bench",
        description="Time and memory of the kernels against others; what is wrong is not timed.",
    )
    parser.add_argument("--suite", default="all", help="loss, head, sampler, step or all (default)")
    parser.add_argument(
        "--out", type=path_of, default=Path("runs/bench"), help="default: runs/bench; overwritten"
    )
    parser.add_argument("--loss-shape", metavar="SxT", help="samples x tokens of each: 512x512")
    parser.add_argument(
        "--head-shape", metavar="NxDxV", help="tokens x hidden size x vocabulary: 2048x1024x151936"
    )
    parser.add_argument(
        "--shapes", choices=("full", "small"), default="full", help="small: does everything run?"
    )
    parser.add_argument(
        "--quick", action="store_true", help="without what holds all logits; smaller models sampled"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=positive, help="of the CPU (default: torch's choice)")
    parser.add_argument("--case", default="", help="words of its name or shape, e.g. 'generate 4m'")
    parser.add_argument("--rounds", type=positive, default=9, help="at least 7 (default: 9)")
    given = parser.parse_args(args)
    if importlib.util.find_spec("transformers") is not None:
        quiet()
    from ..benchmarks.run import BenchConfig, faults
    from ..benchmarks.run import run as run_suites

    found = faults(run_suites(BenchConfig(**vars(given))))
    return fail("; ".join(found), code=1) if found else 0
