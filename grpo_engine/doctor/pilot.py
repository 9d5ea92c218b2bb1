"""A step that is sampled and not trained on: what a gradient costs, and why groups give none."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan

import numpy as np

from ..groups.batch import Batch
from ..groups.signal import ALL_CORRECT
from ..groups.states import INVALID
from ..guards.figures import unique_share


@dataclass(frozen=True)
class Pilot:
    """Figures of the samples of some prompts; anchors are no samples of the policy."""

    groups: int
    with_signal: int
    causes: dict[str, int]
    """groups without signal by cause"""
    states: dict[str, int]
    """samples"""
    truncated: float
    """share of the samples cut by max_tokens or the context"""
    invalid: float
    """share of the samples"""
    length_mean: float
    """tokens of a completion"""
    length_p95: float
    prompt_mean: float
    """tokens of a prompt"""
    reward: float
    """mean over the valid samples; NaN if there are none"""
    pass_rate: float
    """share of right ones among the valid samples; NaN where no reward says which are right"""
    pass_rates: list[float]
    """the same of each group with a valid sample"""
    unique: float
    """mean share of distinct completions in the groups that are not all right; NaN if all are"""
    tokens_per_signal: float | None
    """tokens sampled for a group with signal; None if there was none"""
    seconds_per_signal: float | None


def figures(batch: Batch, seconds: float, correct_at: float) -> Pilot:
    """seconds: spent in sampling and rewards. correct_at: from where on an answer is right."""
    offsets, sampled = batch.cu_groups.tolist(), ~batch.anchors
    own = sampled.nonzero().flatten().tolist()
    rollouts = [batch.rollouts[i] for i in own]
    lengths = np.array([len(r.completion_ids) for r in rollouts])
    spans = [range(a, b) for a, b in pairwise(offsets)]
    given = [batch.decided_of(span) for span in spans]
    rates = [sum(x >= correct_at for x in group) / len(group) for group in given if group]
    varied = [
        unique_share(batch.rollouts[i].completion_ids for i in span if sampled[i])
        for span, cause in zip(spans, batch.signal_causes, strict=True)
        if cause != ALL_CORRECT
    ]
    states = Counter(batch.states[i] for i in own)
    taught = int(batch.signal.sum())
    lost = zip(batch.signal_causes, batch.signal.tolist(), strict=True)
    every = [x for group in given for x in group]
    return Pilot(
        groups=len(spans),
        with_signal=taught,
        causes=dict(Counter(cause or "preprocessing" for cause, has in lost if not has)),
        states=dict(states),
        truncated=sum(r.cut for r in rollouts) / len(own),
        invalid=states[INVALID] / len(own),
        length_mean=float(lengths.mean()),
        length_p95=float(np.percentile(lengths, 95)),
        prompt_mean=float(np.mean([len(batch.rollouts[span[0]].prompt_ids) for span in spans])),
        reward=_mean(batch.rewards[batch.valid & sampled].tolist()),
        pass_rate=_mean([float(x >= correct_at) for x in every]),
        pass_rates=rates,
        unique=_mean(varied),
        tokens_per_signal=int(lengths.sum()) / taught if taught else None,
        seconds_per_signal=seconds / taught if taught else None,
    )


def pilot_lines(pilot: Pilot) -> Iterator[str]:
    """The figures as statements."""
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(pilot.causes.items()))
    states = ", ".join(f"{state} {count}" for state, count in sorted(pilot.states.items()))
    share = pilot.with_signal / pilot.groups
    yield f"signal      {pilot.with_signal} of {pilot.groups} groups ({share:.0%})"
    yield f"no signal   {causes or 'none'}"
    yield f"states      {states}"
    yield f"truncated   {pilot.truncated:.1%} of the samples"
    yield f"length      mean {pilot.length_mean:.1f}, 95th percentile {pilot.length_p95:.0f} tokens"
    right = "unknown: no reward decides" if isnan(pilot.pass_rate) else f"{pilot.pass_rate:.4f}"
    yield f"reward      mean {pilot.reward:.4f}, pass rate {right}"
    yield f"unique      {pilot.unique:.0%} of the completions of a group that is not all right"
    yield f"price       {_price(pilot)}"


def _price(pilot: Pilot) -> str:
    if pilot.tokens_per_signal is None:
        return "no group carried signal"
    tokens, seconds = pilot.tokens_per_signal, pilot.seconds_per_signal
    return f"{tokens:,.0f} tokens and {seconds:.3g} s for a group with signal"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else nan
