"""The group as unit: which samples count, their advantages, and the batch the loss learns from."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .config import GroupsConfig
from .kernels.options import GRPOOptions
from .ops import group_advantages, pack_groups
from .rewards import Scores
from .rollout import Rollout, SamplingParams


@dataclass
class Batch:
    """One generation: samples in the order of their groups. Tensors lie on the CPU."""

    task_rows: list[int]
    """[P] the row of the data that a group answers; identity is given at drawing, not by text"""
    rollouts: list[Rollout]
    cu_groups: Tensor
    """[P+1] int32"""
    rewards: Tensor
    """[S] f32, NaN where a sample has none"""
    components: dict[str, list[float | None]]
    valid: Tensor
    """[S] bool, enters the statistics"""
    in_loss: Tensor
    """[S] bool, its tokens enter the loss"""
    advantages: Tensor
    """[S] f32"""
    signal: Tensor
    """[P] bool"""
    old_logp: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """by sample; empty: on-policy"""
    ref_logp: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """by sample"""

    def lengths(self) -> list[int]:
        """[S] tokens of the completions."""
        return [len(r.completion_ids) for r in self.rollouts]

    def group_of_sample(self) -> Tensor:
        """[S] int64."""
        return torch.repeat_interleave(torch.arange(len(self.signal)), self.cu_groups.diff())

    def reward_std(self) -> float:
        """Mean over the groups of the standard deviation within a group."""
        groups = zip(self._split(self.rewards), self._split(self.valid), strict=True)
        valid = [group[ok].double() for group, ok in groups if ok.any()]
        # Less the first: equal rewards must give 0, whatever the mean rounds to.
        stds = [(group - group[0]).std(correction=0) for group in valid]
        return float(torch.stack(stds).mean()) if stds else 0.0

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.cu_groups.diff().tolist())


def make_batch(
    task_rows: Sequence[int],
    groups: Sequence[Sequence[Rollout]],
    scores: Scores,
    config: GroupsConfig,
    options: GRPOOptions,
) -> Batch:
    """Decides who counts, and computes the advantages of the whole generation at once."""
    rollouts = [rollout for group in groups for rollout in group]
    cu_groups = torch.tensor([0, *accumulate(map(len, groups))], dtype=torch.int32)
    rewards = torch.tensor([float("nan") if r is None else r for r in scores.total])
    truncated = torch.tensor([r.finish_reason == "length" for r in rollouts])
    failed = torch.tensor([r.finish_reason == "error" for r in rollouts])
    valid = torch.isfinite(rewards) & ~failed
    if config.truncated == "drop":
        valid &= ~truncated
    in_loss = valid if config.truncated == "keep" else valid & ~truncated
    advantages, signal = group_advantages(rewards, cu_groups, valid, options)
    return Batch(
        list(task_rows),
        rollouts,
        cu_groups,
        rewards,
        scores.components,
        valid,
        in_loss,
        advantages,
        signal,
    )


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


def batch_to_json(batch: Batch) -> dict:
    """Plain values from which `batch_from_json` makes the same batch, bit for bit."""
    return {
        "task_rows": batch.task_rows,
        "rollouts": [_rollout_to_json(r) for r in batch.rollouts],
        "components": batch.components,
        **{name: getattr(batch, name).tolist() for name in _TENSORS},
        **{name: {s: x.tolist() for s, x in getattr(batch, name).items()} for name in _BY_SAMPLE},
    }


def batch_from_json(values: dict) -> Batch:
    """The batch that `batch_to_json` described."""
    tensors = {name: torch.tensor(values[name], dtype=kind) for name, kind in _TENSORS.items()}
    by_sample = {
        name: {int(s): torch.tensor(x, dtype=torch.float32) for s, x in values[name].items()}
        for name in _BY_SAMPLE
    }
    rollouts = [
        Rollout(
            **{
                **r,
                "params": SamplingParams(**r["params"]),
                "logp_sampler": torch.tensor(r["logp_sampler"]),
                "logp_processed": torch.tensor(r["logp_processed"]),
            }
        )
        for r in values["rollouts"]
    ]
    return Batch(
        task_rows=values["task_rows"],
        rollouts=rollouts,
        components=values["components"],
        **tensors,
        **by_sample,
    )


_TENSORS = {
    "cu_groups": torch.int32,
    "rewards": torch.float32,
    "valid": torch.bool,
    "in_loss": torch.bool,
    "advantages": torch.float32,
    "signal": torch.bool,
}
_BY_SAMPLE = ("old_logp", "ref_logp")


def _rollout_to_json(rollout: Rollout) -> dict:
    return {
        **dataclasses.asdict(rollout),
        "logp_sampler": rollout.logp_sampler.tolist(),
        "logp_processed": rollout.logp_processed.tolist(),
    }
