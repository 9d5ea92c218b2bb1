"""The suites by the name that `grpo bench --suite` takes."""

from types import ModuleType
from typing import Any

from . import head_suite, loss_suite, sampler_suite, step_suite

SUITES = {
    "loss": loss_suite,
    "head": head_suite,
    "sampler": sampler_suite,
    "step": step_suite,
}


def shapes_of(suite: ModuleType, name: str) -> tuple[Any, ...]:
    """What stands under `name` in the suite's SHAPES: one shape, or several in their order."""
    found = suite.SHAPES[name]
    return found if isinstance(found, tuple) else (found,)
