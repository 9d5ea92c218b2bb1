"""For a human's eye: the samples that were paid most, and whether what was paid for is real."""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

# Of the largest training reward. Less may be sharpening: sampled answers come closer to the greedy
# ones, and the held-out reward of greedy answers rightly stands still.
LEAST_GAIN = 0.2
LEAST_EVALUATIONS = 3
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


def heldout_share(evaluations: Sequence[tuple[float, float]]) -> float | None:
    """Gain of the held-out reward as a share of the gain of the training reward.

    `evaluations`: (training reward, held-out reward), oldest first. The gain is from the mean of
    the earlier half to that of the later. None for fewer than 3, or where training gained less
    than a fifth of its largest reward: there is no rise to explain.
    """
    if len(evaluations) < LEAST_EVALUATIONS:
        return None
    training, heldout = (_gain(column) for column in zip(*evaluations, strict=True))
    largest = max(abs(reward) for reward, _ in evaluations)
    return heldout / training if training > LEAST_GAIN * largest else None


def _gain(x: Sequence[float]) -> float:
    half = len(x) // 2
    return fmean(x[-half:]) - fmean(x[:half])


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
