"""One generation as the loss takes it: groups, who counts, advantages; its micro-batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import fmean

import torch
from torch import Tensor

from ..ops import pack_groups
from ..rollout import Rollout


@dataclass(frozen=True)
class Origin:
    """How a group came about; identity is given when the prompt is drawn, not by its text."""

    task: int
    """number among the tasks"""
    row: int
    """of the data that the group answers"""
    variant: int = 0
    """of its prompt"""
    band: str | None = None
    """of its difficulty, when it was drawn"""
    round: int = 0
    """0: the step's first draw; later ones make up for groups without signal"""


@dataclass
class Batch:
    """One generation: samples in the order of their groups. Tensors lie on the CPU."""

    origins: list[Origin]
    """[P]"""
    rollouts: list[Rollout]
    texts: list[str]
    """[S] completions without special tokens"""
    cu_groups: Tensor
    """[P+1] int32"""
    rewards: Tensor
    """[S] f32, the raw totals; NaN where a sample has none"""
    decided: Tensor
    """[S] f64, what says whether an answer is right; NaN where nothing does"""
    components: dict[str, list[float | None]]
    states: list[str]
    """[S] of groups/states.py"""
    causes: list[str | None]
    """[S] of the state"""
    valid: Tensor
    """[S] bool, enters the statistics"""
    in_loss: Tensor
    """[S] bool, its tokens enter the loss"""
    anchors: Tensor
    """[S] bool, deliberately wrong, not sampled"""
    advantages: Tensor
    """[S] f32"""
    token_advantages: dict[int, Tensor]
    """by sample, [len] f32, where rewards of steps make its tokens differ"""
    signal: Tensor
    """[P] bool"""
    signal_causes: list[str | None]
    """[P] why a group has no signal, by its raw rewards"""
    discarded: Tensor
    """[P] bool, drawn and recorded, but another group was drawn in its place"""
    fingerprint: dict[str, str | int]
    """what all samples of the step share: reward version, adapter, sampling settings, ..."""
    old_logp: dict[int, Tensor] = field(default_factory=dict)
    """by sample; empty: on-policy"""
    ref_logp: dict[int, Tensor] = field(default_factory=dict)
    """by sample"""
    kl: dict[int, float] = field(default_factory=dict)
    """by sample, mean over its tokens (k3), when it was last learned from"""

    def lengths(self) -> list[int]:
        """[S] tokens of the completions."""
        return [len(r.completion_ids) for r in self.rollouts]

    def decided_of(self, samples: Iterable[int]) -> list[float]:
        """Of those samples that count and of which something says whether they are right."""
        counted = (self.valid & ~self.anchors & ~self.decided.isnan()).tolist()
        decided = self.decided.tolist()
        return [decided[i] for i in samples if counted[i]]

    def group_of_sample(self) -> Tensor:
        """[S] int64."""
        return torch.repeat_interleave(torch.arange(len(self.signal)), self.cu_groups.diff())

    def reward_std(self) -> float:
        """Mean over the groups of the standard deviation of the valid samples within a group."""
        rewards, valid = self.rewards.tolist(), self.valid.tolist()
        groups = [
            [rewards[i] for i in range(first, last) if valid[i]]
            for first, last in pairwise(self.cu_groups.tolist())
        ]
        stds = [_std(group) for group in groups if group]
        return fmean(stds) if stds else 0.0


def _std(values: list[float]) -> float:
    # Less the first: equal values must give 0, whatever the mean rounds to.
    moved = [value - values[0] for value in values]
    mean = sum(moved) / len(moved)
    return sqrt(sum((x - mean) ** 2 for x in moved) / len(moved))


def micro_batches(batch: Batch, token_budget: int, *, without_signal: bool) -> list[list[int]]:
    """Sample numbers of the micro-batches: whole groups under the budget, a prompt paid once each.

    Only samples in the loss get a forward; those of groups without signal have no policy gradient,
    so they get one only if `without_signal` (for the KL).
    """
    group = batch.group_of_sample()
    needed = batch.in_loss if without_signal else batch.in_loss & batch.signal[group]
    # An empty completion counts in the denominators and has no token to run.
    needed = needed & (torch.tensor(batch.lengths()) > 0)
    kept = needed.nonzero().flatten().tolist()
    per_group = torch.bincount(group[needed], minlength=len(batch.signal))
    prompts = [len(batch.rollouts[first].prompt_ids) for first in batch.cu_groups[:-1].tolist()]
    packed = pack_groups(
        prompts,
        [len(batch.rollouts[s].completion_ids) for s in kept],
        [0, *per_group.cumsum(0).tolist()],
        token_budget,
        shared_prompt=True,
    )
    return [[kept[i] for _, a, b in micro for i in range(a, b)] for micro in packed]
