"""Steps, clocks and cases without work, for the tests of the benchmark."""

from collections.abc import Callable
from dataclasses import replace

import torch

from grpo_engine.benchmarks.harness import Case, Expected, Provider, Timer

CPU = torch.device("cpu")
ONE = torch.ones(1, dtype=torch.float64)


class FakeTime:
    """A clock that moves only when a step says so; it writes down who ran."""

    def __init__(self) -> None:
        self.seconds, self.ran = 0.0, []

    def step(self, name: str, *durations_ms: float) -> Callable[[], dict[str, torch.Tensor]]:
        """A step of these durations in turn, the last of them from then on."""
        left = list(durations_ms)

        def run() -> dict[str, torch.Tensor]:
            self.ran.append(name)
            self.seconds += (left.pop(0) if len(left) > 1 else left[0]) / 1000
            return {"x": ONE}

        return run

    def timer(self, **settings: float) -> Timer:
        return Timer(slice_s=0.0, now=lambda: self.seconds, **settings)


def fake_case(*providers: Provider, **changes: object) -> Case:
    case = Case(
        suite="fake",
        name="case",
        shape={"n": 1},
        device=CPU,
        inputs=lambda: None,
        expected=lambda: {"x": Expected(ONE, 1e-6)},
        providers=providers,
        work=8e6,
        rate_unit="GB/s",
        machine_rate=lambda: 4.0,
    )
    return replace(case, **changes)


def no_memory(case: Case, provider: Provider, step: object) -> tuple[None, str]:
    return None, ""
