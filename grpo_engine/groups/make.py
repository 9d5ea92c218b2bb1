"""From scored samples to a batch: states, signal, advantages of the whole generation at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ..rewards.score import Scores
from ..rewards.total import Components
from ..rollout import Rollout
from .advantages import compute_advantages
from .batch import Batch, Origin
from .fingerprints import Fingerprint, check_groups
from .preprocess import PercentileWindow, members
from .rules import Rules
from .signal import signal_causes
from .states import INVALID, Judged, judge

DRAWN_AGAIN = "drawn again"
RIGHT_ANCHOR = "an anchor that scores as right"


@dataclass
class Samples:
    """Groups with their scores, before it is decided what they are worth."""

    origins: list[Origin]
    """[P]"""
    groups: list[list[Rollout]]
    """[P]; an anchor is a rollout as well"""
    texts: list[str]
    """[S] completions without special tokens"""
    scores: Scores
    fingerprints: list[Fingerprint]
    """[S]"""
    anchors: list[bool]
    """[S]"""
    superseded: list[bool]
    """[S] truncated, and another sample was drawn in its place"""

    @classmethod
    def join(cls, parts: "Sequence[Samples]") -> "Samples":
        """Those of several draws, in order."""
        lists = "origins groups texts fingerprints anchors superseded".split()
        joined = {name: [x for part in parts for x in getattr(part, name)] for name in lists}
        return cls(scores=Scores.join([part.scores for part in parts]), **joined)

    def offsets(self) -> list[int]:
        """[P+1]."""
        return [0, *accumulate(map(len, self.groups))]

    def rollouts(self) -> list[Rollout]:
        """[S]."""
        return [rollout for group in self.groups for rollout in group]


@dataclass
class Verdicts:
    """Samples with their states, raw rewards and signal."""

    judged: Judged
    components: Components
    rewards: np.ndarray
    """[S] float64 raw totals, NaN where there is none"""
    decided: np.ndarray
    """[S] float64, what says whether an answer is right; NaN where nothing does"""
    causes: list[str | None]
    """[P] why a group has no signal"""


def judge_samples(samples: Samples, rules: Rules) -> Verdicts:
    """Who counts, and which groups carry signal; UserError for a group of mixed fingerprints."""
    check_groups(samples.fingerprints, samples.offsets(), samples.anchors)
    scores, rollouts = samples.scores, samples.rollouts()
    lengths = [len(r.completion_ids) for r in rollouts]
    components = scores.prepared(lengths)
    totals = components.total(rules.scoring.floor)
    decided = components.decided(scores.decider, rules.scoring.floor)
    judged = judge(
        rollouts,
        samples.texts,
        totals,
        decided,
        scores.failures,
        scores.env_failures,
        components.refused,
        rules.groups,
    )
    for i, superseded in enumerate(samples.superseded):
        if superseded:
            judged.causes[i] = f"{judged.causes[i]}, {DRAWN_AGAIN}"
            judged.valid[i] = False
        if samples.anchors[i] and decided[i] >= rules.groups.correct_at:
            judged.states[i], judged.causes[i] = INVALID, RIGHT_ANCHOR
            judged.valid[i] = False
    judged.in_loss &= judged.valid & ~np.array(samples.anchors, bool)
    rewards = judged.rewards(totals)
    if scores.decider is not None:
        decided = judged.in_place(decided)
    causes = signal_causes(
        rewards,
        decided,
        judged.valid,
        judged.states,
        components.gate_failed,
        samples.offsets(),
        rules.groups,
        rules.options.min_std,
        rules.options.ddof,
    )
    for g, part in enumerate(members(samples.offsets(), judged.valid)):
        if components.steps_differ(part):
            causes[g] = None
    return Verdicts(judged, components, rewards, decided, causes)


def make_batch(
    samples: Samples,
    rules: Rules,
    window: PercentileWindow | None = None,
    discarded: Sequence[bool] | None = None,
) -> Batch:
    """The batch of a step. discarded: [P], groups in whose place others were drawn.

    window: what scoring.clip_percentiles looks back on; it takes in the totals of this step.
    """
    found = judge_samples(samples, rules)
    judged, cu_groups = found.judged, samples.offsets()
    window = window or PercentileWindow(rules.scoring.clip_window)
    advantages = compute_advantages(
        judged, found.components, cu_groups, found.causes, rules, window
    )
    out = np.array(discarded if discarded is not None else [False] * len(samples.origins), bool)
    in_loss = judged.in_loss & ~np.repeat(out, np.diff(cu_groups))
    first = samples.fingerprints[0]
    return Batch(
        origins=samples.origins,
        rollouts=samples.rollouts(),
        texts=samples.texts,
        cu_groups=torch.tensor(cu_groups, dtype=torch.int32),
        rewards=torch.tensor(_as_float32(found.rewards)),
        decided=torch.tensor(found.decided),
        components=samples.scores.components,
        states=judged.states,
        causes=judged.causes,
        valid=torch.tensor(judged.valid),
        in_loss=torch.tensor(in_loss),
        anchors=torch.tensor(samples.anchors, dtype=torch.bool),
        advantages=torch.tensor(advantages.samples),
        token_advantages={i: torch.tensor(x) for i, x in advantages.tokens.items()},
        signal=torch.tensor(advantages.signal),
        signal_causes=found.causes,
        discarded=torch.tensor(out),
        fingerprint={name: getattr(first, name) for name in SHARED},
    )


SHARED = ("policy_version", "adapter", "reward_version", "sampling", "environment", "tools")


def _as_float32(rewards: np.ndarray) -> np.ndarray:
    """NaN where there is no reward, or none that is finite in float32."""
    with np.errstate(over="ignore"):
        narrow = rewards.astype(np.float32)
    return np.where(np.isfinite(narrow), narrow, np.float32("nan"))
