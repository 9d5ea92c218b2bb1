"""Rewards before the statistics: scaled components, running percentiles, ranks. Each is optional.

Plain float64 arrays; `valid` [S] says who enters a statistic: the others change nothing for them.
"""

from collections.abc import Sequence

import numpy as np

from ..kernels.options import GRPOOptions
from ..rewards.total import Components
from ..sample_config import ScoringConfig
from .states import Judged


class PercentileWindow:
    """The totals of the last valid samples, for cutting new ones to their percentiles."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[float] = []

    def copy(self) -> "PercentileWindow":
        """One that goes its own way."""
        window = PercentileWindow(self.size)
        window.values = list(self.values)
        return window

    def add(self, rewards: np.ndarray) -> None:
        """rewards: [n] finite."""
        self.values = [*self.values, *map(float, rewards)][-self.size :]

    def cut(self, rewards: np.ndarray, percentiles: Sequence[float]) -> np.ndarray:
        """`rewards` [n] between the percentiles of the window (as they are, if it is empty)."""
        if not self.values:
            return rewards
        return np.clip(rewards, *np.percentile(self.values, percentiles))


def preprocess(
    judged: Judged,
    components: Components,
    cu_groups: Sequence[int],
    scoring: ScoringConfig,
    options: GRPOOptions,
    window: PercentileWindow,
) -> np.ndarray:
    """[S] float64, in the order of the options: scaled components, sum and gates, clip, rank.

    The window takes in the valid totals of this step before they are cut.
    """
    groups = members(cu_groups, judged.valid)
    rewards = judged.rewards(_totals(judged, components, groups, scoring, options))
    if scoring.clip_percentiles is not None:
        window.add(rewards[judged.valid])
        rewards[judged.valid] = window.cut(rewards[judged.valid], scoring.clip_percentiles)
    if scoring.rank:
        for part in groups:
            rewards[part] = rank(rewards[part])
    return rewards


def _totals(
    judged: Judged,
    components: Components,
    groups: list[np.ndarray],
    scoring: ScoringConfig,
    options: GRPOOptions,
) -> np.ndarray:
    scales = [c.scale for c in components.configs]
    if scoring.aggregate == "normalize_then_sum":
        scales = ["group"] * len(scales)
    if all(scale == "none" for scale in scales):
        return components.outcome(components.values, scoring.floor)
    parts = {"group": groups, "batch": [np.flatnonzero(judged.valid)]}
    scaled = [
        row if scale == "none" else scale_over(row, parts[scale], options)
        for row, scale in zip(components.values, scales, strict=True)
    ]
    # A floor of raw rewards may lie high among z-scores: a failed gate is never above an answer.
    passed = np.array([gate is None for gate in components.gate_failed]) & judged.valid
    totals = components.outcome(np.array(scaled), scoring.floor)
    least = min([scoring.floor, *totals[passed & ~np.isnan(totals)]])
    return components.outcome(np.array(scaled), least)


def scale_over(values: np.ndarray, parts: Sequence[np.ndarray], options: GRPOOptions) -> np.ndarray:
    """z-scores of `values` [S] within each of `parts` (index arrays); 0 where all are equal.

    `ddof` and `epsilon_std` of the options hold. NaN (not applicable) stays, and enters no mean.
    """
    scaled = np.full(len(values), np.nan)
    for part in parts:
        chosen = part[~np.isnan(values[part])]
        if len(chosen) <= options.ddof:
            scaled[chosen] = 0.0
            continue
        # Less the first: equal values must give 0, whatever their mean rounds to.
        moved = values[chosen] - values[chosen[0]]
        std = moved.std(ddof=options.ddof) + options.epsilon_std
        scaled[chosen] = (moved - moved.mean()) / std if moved.any() else 0.0
    return scaled


def rank(values: np.ndarray) -> np.ndarray:
    """Ranks of `values` [n] from -1 (least) to 1 (most); ties share theirs; one alone: 0."""
    if len(values) < 2:
        return np.zeros(len(values))
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, "left")
    last = np.searchsorted(ordered, values, "right") - 1
    return (first + last) / (len(values) - 1) - 1.0


def members(cu_groups: Sequence[int], valid: np.ndarray) -> list[np.ndarray]:
    """The valid samples of each group, as index arrays."""
    chosen = np.flatnonzero(valid)
    return np.split(chosen, np.searchsorted(chosen, cu_groups[1:-1]))
