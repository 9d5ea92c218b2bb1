"""grpo export: the weights of a run, or of one of its checkpoints, as a folder of its own."""

import argparse

from ..paths import path_of
from .common import add_trust, quiet


def run(args: list[str]) -> int:
    """Writes the folder and says where."""
    parser = argparse.ArgumentParser(
        prog="grpo export", description="The weights of a run as a folder that other tools load."
    )
    parser.add_argument("run", type=path_of, help="a run folder")
    parser.add_argument("out", type=path_of, help="the folder to make")
    parser.add_argument("--step", type=int, help="of this checkpoint (default: the final weights)")
    parser.add_argument(
        "--merge", action="store_true", help="the adapter merged into a copy of its base model"
    )
    add_trust(parser)
    given = parser.parse_args(args)
    quiet()
    from ..export import export_run, run_config

    trusted = given.trust_remote_code
    gap = export_run(given.run, given.out, given.step, given.merge, trust_remote_code=trusted)
    print(f"written: {given.out}")
    if gap is not None:
        base = run_config(given.run, trust_remote_code=trusted).model.base
        if base != "none":
            print(f"the adapter was trained on {base} weights, and is merged into unrounded ones")
        print(f"log-probs of a text differ from the adapter's by {gap:.2g} nats in the mean")
    return 0
