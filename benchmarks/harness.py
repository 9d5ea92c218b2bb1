"""How a case is measured: a correctness gate, interleaved timing rounds, peak memory."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, first_line

Step = Callable[[], dict[str, Tensor]]

# Row.status. A provider that is not timed stays in the table and says why.
OK, FLOOR, CHECKED = "ok", "floor", "checked, not timed"
WRONG, FAILED = "wrong", "failed"
NOT_INSTALLED, CANNOT_RUN, LEFT_OUT = "not installed", "cannot run here", "left out"


@dataclass(frozen=True)
class Provider:
    """A named way to do the work of a case.

    build: from the inputs of the case to a step, which does the whole work once and returns its
    outputs by name.
    limits: tolerances tighter than the case's, by output.
    floor: it leaves out a part of the work (a bare GEMM, say); its outputs are not checked.
    share: of the case's bytes or FLOP, what it does; 0: it has no rate.
    compiles: its first call at a shape compiles, and that is not its memory.
    check: what the gate builds and runs instead where a step draws at random: the same code, but
    with outputs that have a truth.
    unavailable, left_out, untimed: why it can't run, is not run, or is only checked.
    """

    name: str
    build: Callable[[Any], Step]
    limits: Mapping[str, float] = field(default_factory=dict)
    floor: bool = False
    share: float = 1.0
    compiles: bool = False
    check: Callable[[Any], Step] | None = None
    unavailable: str = ""
    left_out: str = ""
    untimed: str = ""


@dataclass(frozen=True)
class Expected:
    """An output's truth, in float64.

    values: [n] or [n, D]; the whole output, or its rows `rows` [n].
    scale: number or [n]; the error is max |x - values| / scale, the norm of a row where it has D.
    """

    values: Tensor
    tolerance: float
    scale: float | Tensor = 1.0
    rows: Tensor | None = None

    def error(self, output: Tensor) -> float:
        """The largest scaled error; NaN if the output holds one."""
        found = output.detach() if self.rows is None else output.detach()[self.rows]
        found = found.to(self.values.device, torch.float64).reshape(self.values.shape)
        difference = found - self.values
        size = difference.norm(dim=-1) if difference.dim() > 1 else difference.abs()
        return float((size / self.scale).max())


@dataclass(frozen=True)
class Case:
    """One comparison: the same inputs and the same work for every provider.

    inputs, expected: called once. work: bytes, FLOP or tokens that the case needs at least;
    rate_unit: GB/s, GFLOP/s or tokens/s, which is `rate_scale` of them a second; machine_rate: this
    machine's own rate in that unit. A case of checks has none.
    figures: outputs of the gate that are no results to be checked but numbers to be noted.
    most_rounds: where a call takes minutes. peak_memory: of providers that have own processes.
    """

    suite: str
    name: str
    shape: Mapping[str, int]
    device: torch.device
    inputs: Callable[[], Any]
    expected: Callable[[], Mapping[str, Expected]]
    providers: tuple[Provider, ...]
    work: float = 0.0
    rate_unit: str = ""
    rate_scale: float = 1e9
    machine_rate: Callable[[], float] = lambda: math.inf
    figures: tuple[str, ...] = ()
    most_rounds: int | None = None
    peak_memory: "PeakMemory | None" = None


@dataclass
class Row:
    """What was found out about a provider."""

    suite: str
    case: str
    provider: str
    shape: Mapping[str, int]
    status: str = OK
    note: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    peak_mem_mib: float | None = None
    rate: float | None = None
    rate_unit: str = ""
    of_machine: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Timer:
    """Rounds over all steps in turn. A slice is as many calls as take about slice_s seconds.

    deadline: in the seconds of `now`; past it no further round begins.
    """

    rounds: int = 9
    slice_s: float = 0.02
    deadline: float = math.inf
    now: Callable[[], float] = time.perf_counter
    sync: Callable[[], None] = lambda: None

    @staticmethod
    def on(device: torch.device, **settings: Any) -> "Timer":
        """A timer that waits for the device at both ends of a slice."""
        if device.type == "cuda":
            settings["sync"] = lambda: torch.cuda.synchronize(device)
        return Timer(**settings)

    def rounds_ms(self, steps: Mapping[str, Step]) -> dict[str, list[float]]:
        """Milliseconds a call, one a round, by name; finding the calls of a slice warms up."""
        calls = {name: self._calls(step) for name, step in steps.items()}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        names = list(steps)
        collecting = gc.isenabled()
        gc.disable()
        try:
            for i in range(self.rounds):
                if i and self.now() > self.deadline:
                    break
                # Another one begins each round, so that none always follows the same neighbour.
                first = i % max(1, len(names))
                for name in names[first:] + names[:first]:
                    seconds = self._slice(steps[name], calls[name])
                    samples[name].append(1000 * seconds / calls[name])
        finally:
            if collecting:
                gc.enable()
        return samples

    def _calls(self, step: Step) -> int:
        calls = 1
        while self._slice(step, calls) < self.slice_s / 2:
            calls *= 2
        return calls

    def _slice(self, step: Step, calls: int) -> float:
        self.sync()
        start = self.now()
        for _ in range(calls):
            step()
        self.sync()
        return self.now() - start


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, linear between the order statistics."""
    if len(samples) == 1:
        return (samples[0],) * 3
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[1], deciles[4], deciles[7]


PeakMemory = Callable[[Case, Provider, Step], tuple[float | None, str]]


def run_case(case: Case, timer: Timer, peak_memory: PeakMemory) -> list[Row]:
    """A row for every provider, in their order.

    peak_memory: -> MiB beyond what was there before the call, or None, and a note.
    """
    inputs, expected = case.inputs(), case.expected()
    rows, steps = [], {}
    for provider in case.providers:
        row, step = admit(case, provider, inputs, expected)
        rows.append(row)
        if step is not None:
            steps[provider.name] = step
    if not steps:
        return rows
    machine_rate = case.machine_rate()
    peak_memory = case.peak_memory or peak_memory
    timer = replace(timer, rounds=min(timer.rounds, case.most_rounds or timer.rounds))
    samples = timer.rounds_ms(steps)
    first = None
    for provider, row in zip(case.providers, rows, strict=True):
        if provider.name not in steps:
            continue
        row.p20_ms, row.p50_ms, row.p80_ms = percentiles(samples[provider.name])
        row.rounds = len(samples[provider.name])
        first = row.p50_ms if first is None else first
        row.ratio = row.p50_ms / first if first > 0 else None
        if provider.share and row.p50_ms > 0:
            row.rate = provider.share * case.work / (row.p50_ms / 1000) / case.rate_scale
            row.rate_unit = case.rate_unit
            row.of_machine = row.rate / machine_rate if math.isfinite(machine_rate) else None
        if row.rounds < timer.rounds:
            row.note = f"{row.rounds} of {timer.rounds} rounds: out of time"
        row.peak_mem_mib, note = peak_memory(case, provider, steps[provider.name])
        row.note = "; ".join(filter(None, (row.note, note)))
    return rows


def admit(
    case: Case, provider: Provider, inputs: Any, expected: Mapping[str, Expected]
) -> tuple[Row, Step | None]:
    """The gate: a step is handed back only if its outputs are right, or if it is a floor."""
    row = Row(case.suite, case.name, provider.name, dict(case.shape))
    if provider.unavailable or provider.left_out:
        row.status = CANNOT_RUN if provider.unavailable else LEFT_OUT
        row.note = provider.unavailable or provider.left_out
        return row, None
    try:
        step = provider.build(inputs)
        outputs = dict(provider.check(inputs)() if provider.check else step())
        if provider.floor:
            row.status = FLOOR
            return row, step
        row.figures = {n: float(outputs.pop(n)) for n in case.figures if n in outputs}
        row.errors = {name: expected[name].error(x) for name, x in outputs.items()}
    except Exception as error:
        row.status, row.note = _why(error)
        return row, None
    limits = {name: provider.limits.get(name, expected[name].tolerance) for name in outputs}
    wrong = [name for name in outputs if not row.errors[name] <= limits[name]]  # NaN is wrong
    if wrong or not outputs:
        row.status = WRONG
        row.note = ", ".join(f"{n} is off by {row.errors[n]:.2g} > {limits[n]:g}" for n in wrong)
        return row, None
    if provider.untimed:
        row.status, row.note = CHECKED, provider.untimed
        return row, None
    return row, step


def _why(error: Exception) -> tuple[str, str]:
    wrapped = isinstance(error, ImportError | UserError)
    for missing in (error, error.__cause__ if wrapped else None):
        if isinstance(missing, ModuleNotFoundError):
            return NOT_INSTALLED, f"no package {(missing.name or '').partition('.')[0]}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return CANNOT_RUN, "out of memory"
    return FAILED, f"{type(error).__name__}: {first_line(error)}"
