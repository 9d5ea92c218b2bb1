"""For a human's eye: the samples that were paid most, and whether what was paid for is real."""

import json
from collections.abc import Mapping, Sequence
from math import hypot, sqrt
from statistics import fmean
from typing import Any, NamedTuple

# Of the largest training reward. Less may be sharpening: sampled answers come closer to the greedy
# ones, and the held-out reward of greedy answers rightly stands still.
LEAST_GAIN = 0.2
LEAST_EVALUATIONS = 3
LEAST_STEPS = 20  # from the first to the last; what happens in fewer is noise
SHOWN = 160  # characters of a completion
COLUMNS = "reward times length repetition components step task_row completion".split()


def audit(rows: Sequence[Mapping[str, Any]], count: int = 20) -> str:
    """Markdown table of the `count` highest-rewarded answers, highest first.

    A row has reward, completion (text), length (tokens), repetition (0 to 1), components (by name),
    step and task_row. One without a reward is left out. Equal answers to a task with one reward are
    a line, of the first, with how many `times` there were; equal rewards stay in the order given.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if row["reward"] is not None:
            key = row["task_row"], row["completion"], row["reward"]
            found.setdefault(key, {**row, "times": 0})["times"] += 1
    best = sorted(found.values(), key=lambda row: -row["reward"])[:count]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(row[c]) for c in COLUMNS] for row in best)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Evaluation(NamedTuple):
    """The held-out reward, and what training earned at that time."""

    step: int
    training: float
    """mean over the last steps"""
    count: int
    """of those steps"""
    heldout: float


def heldout_share(evaluations: Sequence[Evaluation], noise: float) -> float | None:
    """Gain of the held-out reward as a share of the gain of the training reward.

    Oldest first. The gain is from the mean of the earlier half to that of the later. `noise`: the
    standard deviation of a step's training reward. None for fewer than 3 evaluations or 20 steps,
    or where training gained less than a fifth of its largest reward, or no more than twice the
    standard error of that gain: there is no rise to explain.
    """
    if len(evaluations) < LEAST_EVALUATIONS:
        return None
    if evaluations[-1].step - evaluations[0].step < LEAST_STEPS:
        return None
    half = len(evaluations) // 2
    early, late = evaluations[:half], evaluations[-half:]
    training = fmean(e.training for e in late) - fmean(e.training for e in early)
    heldout = fmean(e.heldout for e in late) - fmean(e.heldout for e in early)
    # The steps of neighbours overlap, so that more of them don't make the mean of a half surer.
    error = noise * hypot(*(fmean(1 / sqrt(e.count) for e in part) for part in (early, late)))
    largest = max(abs(e.training) for e in evaluations)
    return heldout / training if training > max(LEAST_GAIN * largest, 2 * error) else None


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:.3f}"
    if not isinstance(value, str):
        return "-" if value is None else str(value)
    text = value if len(value) <= SHOWN else value[:SHOWN] + "..."
    # As JSON, so that line breaks and control characters show; a bare | would end the cell.
    return json.dumps(text, ensure_ascii=False).replace("|", "\\|")
