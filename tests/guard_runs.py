"""Figures of runs for the tests of the guards: recorded ones, and steady ones made up."""

import json
from pathlib import Path

from grpo_engine.guards import Context, Guards, GuardsConfig

RECORDED = Path(__file__).parent / "data" / "guards"
SETTINGS = {"lr": 2e-4, "default_lr": 1e-6}


def recorded(name: str) -> tuple[list[dict], Context]:
    """The lines of a recorded run of the quickstart, oldest first, and what its guards know."""
    run = json.loads((RECORDED / f"{name}.json").read_text())
    steps = [
        _nested(run["same"] | dict(zip(run["columns"], values, strict=True)))
        for values in zip(*run["columns"].values(), strict=True)
    ]
    return steps, Context(**{**SETTINGS, "lr": run["lr"]})


def steady(steps: int, first: int = 1, **changes: object) -> list[dict]:
    """Lines of a run in which nothing happens."""
    line = {
        "reward": 0.5,
        "reward_std": 0.4,
        "no_signal": 0.2,
        "kl": 0.05,
        "beta": 0.04,
        "entropy": 0.5,
        "grad_norm": 2.0,
        "lr": 2e-4,
        "advantage_abs": 0.8,
        "completion_length": 4.0,
        "group_size": 8,
        "unique": 0.9,
        "temperature": 1.0,
        **changes,
    }
    return [{"step": step, **line} for step in range(first, first + steps)]


def alarms(lines: list[dict], context: Context | None = None, **config: object) -> list:
    """Everything the guards say of these lines."""
    guards = Guards(GuardsConfig(**config), context or Context(**SETTINGS))
    return [alarm for line in lines for alarm in guards.observe(line)]


def said(lines: list[dict], context: Context | None = None, **config: object) -> list[tuple]:
    """(step, guard) of everything they say."""
    found = alarms(lines, context, **config)
    return [(alarm.step, guard) for alarm in found for guard in alarm.guards]


def _nested(line: dict) -> dict:
    flat = {key: value for key, value in line.items() if "." not in key and value is not None}
    causes = {key.partition(".")[2]: value for key, value in line.items() if "." in key}
    return flat | {"no_signal_causes": causes}
