"""grpo doctor: the installation, or a run before it is trained; changes nothing."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..doctor.checks import FAIL, Check, check_lines
from ..errors import UserError
from ..paths import path_of
from .common import check_out, positive, quiet

if TYPE_CHECKING:
    from ..doctor.pilot import Pilot

PROBED = 4  # tasks


def run(args: list[str]) -> int:
    """Returns 2 if a check fails; what is missing or a warning is none of these."""
    given, rest = _parser().parse_known_args(args)
    check_out(given.json)
    if rest:
        checks, pilot = _of_run(rest, given.pilot)
    elif given.pilot is not None:
        raise UserError("--pilot needs a run.yaml: what would be sampled?")
    else:
        from ..doctor.installation import check_installation

        checks, pilot = check_installation(), None
        _print(checks)
    if given.json is not None:
        values = {"checks": [asdict(c) for c in checks], "pilot": pilot and _plain(asdict(pilot))}
        given.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    failed = [check.name for check in checks if check.status == FAIL]
    print(f"{len(failed)} of {len(checks)} checks failed{': ' if failed else ''}", end="")
    print(", ".join(failed))
    return 2 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo doctor",
        usage="grpo doctor [run.yaml] [--group.key value ...] [--pilot N] [--json FILE]",
        allow_abbrev=False,  # what is no option here is a key of the config
        description="Without a config: is the installation sound? With one: a real group, and "
        "whether ratio, KL, prompts, advantages and rewards are what they should be. Nothing is "
        "trained, no run folder is made.",
        epilog="Exit code 2 if a check fails. A probe that pays, or an optional package that is "
        "missing, is no failure.",
    )
    parser.add_argument(
        "--pilot", type=positive, metavar="N", help="also sample N prompts, without training"
    )
    parser.add_argument(
        "--json", type=path_of, metavar="FILE", help="checks and pilot; overwritten"
    )
    return parser


def _of_run(args: Sequence[str], prompts: int | None) -> "tuple[list[Check], Pilot | None]":
    from ..parsing import parse_run

    config, resume = parse_run(args)
    if resume:
        raise UserError("grpo doctor looks at a run before it begins: leave out --resume")
    quiet()
    from ..doctor.examine import Examination
    from ..seeds import seed_everything

    seed_everything(config.train.seed, 0)
    with Examination.of(config) as examined:
        for line in examined.group_lines():
            print(line)
        checks = examined.checks()
        _print(checks)
        probes = examined.probe(PROBED)
        _print(probes)
        pilot = None if prompts is None else examined.pilot(prompts)
        if pilot is not None:
            for line in examined.pilot_lines(pilot):
                print(line)
    return [*checks, *probes], pilot


def _print(checks: Sequence[Check]) -> None:
    for line in check_lines(checks):
        print(line)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
