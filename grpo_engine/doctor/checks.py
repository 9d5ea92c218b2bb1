"""A check and its line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OK, MISSING, WARNING, FAIL = "ok", "missing", "warning", "FAIL"
# missing: an optional package. warning: to be looked at. FAIL: training can't go well.


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, and the figures or what to do."""

    name: str
    status: str
    """ok | missing | warning | FAIL"""
    text: str


def check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """One aligned line each."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        yield f"{check.status:<7}  {check.name:<{width}}  {' '.join(check.text.split())}"
