"""What another reward changes: order within groups, signal, means, gates; plain values."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

import numpy as np

from .rescore import Rescored


@dataclass(frozen=True)
class Figures:
    """Of a step or of a run."""

    samples: int
    pairs: int
    """pairs of a group, valid before and after, that both rewards order strictly"""
    flips: int
    """of these, pairs whose order is the other one now"""
    ties_broken: int
    """pairs that were equal and differ now"""
    ties_made: int
    """pairs that differed and are equal now"""
    groups: int
    signal_before: int
    """groups"""
    signal_after: int
    signal_gained: int
    signal_lost: int
    old_mean: float
    """reward of the samples that were valid, anchors left out; NaN if there are none"""
    new_mean: float
    """reward of the samples that are valid now"""
    correlation: float | None
    """Pearson, over the samples valid before and after; None where one reward is constant"""
    became_valid: int
    became_invalid: int
    gate_failures: dict[str, int]
    """samples by the gate that they fail now"""
    failures: int
    """samples for which a call of the new reward failed"""


def figures(samples: Sequence[Rescored]) -> Figures:
    """samples: of whole groups, those of a group together."""
    groups = [list(part) for _, part in groupby(samples, key=lambda s: (s.step, s.group))]
    pairs = np.array([_pairs(group) for group in groups]).reshape(-1, 4).sum(0).tolist()
    before = [group[0].old_signal for group in groups]
    after = [group[0].new_signal for group in groups]
    both = list(zip(before, after, strict=True))
    sampled = [s for s in samples if not s.anchor]
    return Figures(
        len(samples),
        *pairs,
        groups=len(groups),
        signal_before=sum(before),
        signal_after=sum(after),
        signal_gained=both.count((False, True)),
        signal_lost=both.count((True, False)),
        old_mean=_mean([s.old_reward for s in sampled if s.old_valid]),
        new_mean=_mean([s.new_reward for s in sampled if s.new_valid]),
        correlation=_correlation([s for s in sampled if s.old_valid and s.new_valid]),
        became_valid=sum(s.new_valid and not s.old_valid for s in samples),
        became_invalid=sum(s.old_valid and not s.new_valid for s in samples),
        gate_failures=dict(Counter(s.gate_failed for s in samples if s.gate_failed is not None)),
        failures=sum(s.failed for s in samples),
    )


def by_step(samples: Sequence[Rescored]) -> Iterator[tuple[int, Figures]]:
    """The figures of each step, in order."""
    for step, part in groupby(samples, key=lambda s: s.step):
        yield step, figures(list(part))


def largest_changes(samples: Sequence[Rescored], count: int) -> list[Rescored]:
    """The samples whose reward changed most, where it has one before and after."""
    changed = [s for s in samples if isfinite(_change(s)) and _change(s) > 0]
    return sorted(changed, key=_change, reverse=True)[:count]


def _change(sample: Rescored) -> float:
    return abs(sample.new_reward - sample.old_reward)


def _pairs(group: Sequence[Rescored]) -> tuple[int, int, int, int]:
    """Pairs that both order, flips, ties broken, ties made."""
    counted = [s for s in group if s.old_valid and s.new_valid]
    old, new = (
        np.array([getattr(s, name) for s in counted]) for name in ("old_reward", "new_reward")
    )
    i, j = np.triu_indices(len(counted), 1)
    before, after = np.sign(old[i] - old[j]), np.sign(new[i] - new[j])
    return (
        int(((before != 0) & (after != 0)).sum()),
        int((before * after < 0).sum()),
        int(((before == 0) & (after != 0)).sum()),
        int(((before != 0) & (after == 0)).sum()),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _correlation(samples: Sequence[Rescored]) -> float | None:
    old, new = (
        np.array([getattr(s, name) for s in samples]) for name in ("old_reward", "new_reward")
    )
    if len(samples) < 2 or old.min() == old.max() or new.min() == new.max():
        return None
    return float(np.corrcoef(old, new)[0, 1])
