"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up milliseconds by stage."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = 1000 * (time.perf_counter() - start)
            self.ms[stage] = self.ms.get(stage, 0.0) + spent

    def rounded(self) -> dict[str, float]:
        """To microseconds, for the record."""
        return {stage: round(ms, 3) for stage, ms in self.ms.items()}

    def rate(self, count: float, *stages: str) -> float:
        """Count per second of these stages, 0 if they took no time."""
        seconds = sum(self.ms.get(stage, 0.0) for stage in stages) / 1000
        return count / seconds if seconds > 0 else 0.0
