"""`grpo bench`: the suites one after the other, each written down when it is done."""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from . import machine, memory, report
from .harness import FAILED, WRONG, Case, Row, Timer, run_case
from .suites import SUITES, shapes_of

LEAST_ROUNDS = 7
SHAPE_FIELDS = {"loss": ("samples", "length"), "head": ("tokens", "hidden", "vocab")}


@dataclass(frozen=True)
class BenchConfig:
    """What `grpo bench` was asked for."""

    suite: str = "all"
    out: Path = Path("runs/bench")
    shapes: str = "full"
    """full | small: tiny ones that show whether everything runs, not how fast"""
    loss_shape: str | None = None
    """SAMPLESxLENGTH"""
    head_shape: str | None = None
    """TOKENSxHIDDENxVOCAB"""
    device: str | None = None
    """cpu or cuda; CUDA if there is one"""
    threads: int | None = None
    rounds: int = 9
    case: str = ""
    """words that all stand in a case's name or shape, as in "generate 135m bfloat16"; empty: all"""
    quick: bool = False
    """leaves out what holds all logits and takes the suites' quick shapes, where they have some"""

    def wants(self, case: Case) -> bool:
        """Whether the case is to be measured."""
        said = {case.name, *map(str, case.shape.values())}
        return said.issuperset(self.case.split())


def run(config: BenchConfig) -> list[Row]:
    """Measures, writes and shows; UserError for what can't be measured or written."""
    if config.suite != "all" and config.suite not in SUITES:
        raise UserError(f"no suite {config.suite!r}; there are {', '.join(SUITES)}, all")
    if config.rounds < LEAST_ROUNDS:
        raise UserError(f"--rounds must be at least {LEAST_ROUNDS}; given {config.rounds}")
    device = _device(config.device)
    names = list(SUITES) if config.suite == "all" else [config.suite]
    shapes = {name: _shapes(name, config, device) for name in names}
    report.prepare(config.out)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    small = config.shapes == "small"
    described = machine.describe(device, small)
    timer = Timer.on(device, rounds=config.rounds, slice_s=0.0 if small else 0.02)
    on_cuda = device.type == "cuda"
    peak = memory.cuda_peak if on_cuda else memory.FreshProcess(torch.get_num_threads())
    found = []
    for name in names:
        rows = []
        cases = (SUITES[name].cases(shape, device, config.quick) for shape in shapes[name])
        for case in filter(config.wants, chain.from_iterable(cases)):
            print(f"{name} {case.name}: {len(case.providers)} providers", flush=True)
            rows += run_case(case, timer, peak)
            paths = report.write(config.out, name, described, rows)
        if rows:
            report.show(described, rows)
            print("written:", *paths)
        found += rows
    if config.case and not found:
        raise UserError(f"--case {config.case!r}: no such case in {', '.join(names)}")
    return found


def faults(rows: list[Row]) -> list[str]:
    """Our own providers that gave a wrong result or none, with the reason."""
    return [
        f"{row.suite} {row.case} {row.provider}: {row.note}"
        for row in rows
        if row.status in (WRONG, FAILED) and row.provider.startswith("ours")
    ]


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device cuda: torch finds no CUDA device")
    return torch.device(name or ("cuda" if available else "cpu"))


def _shapes(suite: str, config: BenchConfig, device: torch.device) -> tuple[Any, ...]:
    name = config.shapes
    if name == "full" and device.type == "cuda":
        name = "cuda"
    elif name == "full" and config.quick and "quick" in SUITES[suite].SHAPES:
        name = "quick"
    shapes = shapes_of(SUITES[suite], name)
    text = {"loss": config.loss_shape, "head": config.head_shape}.get(suite)
    if text is None:
        return shapes
    names = SHAPE_FIELDS[suite]
    parts = text.split("x")
    if len(parts) != len(names) or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(
            f"--{suite}-shape must be {'x'.join(map(str.upper, names))}; given {text!r}"
        )
    try:
        return (replace(shapes[0], **dict(zip(names, map(int, parts), strict=True))),)
    except ValueError as error:
        raise UserError(f"--{suite}-shape {text}: {error}") from error
