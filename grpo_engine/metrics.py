"""The line of metrics that a step leaves behind."""

from typing import Any

import torch

from .clock import Clock
from .groups import Batch
from .learn import MicroBatches


def step_metrics(
    step: int, batch: Batch, micros: MicroBatches, learned: dict[str, Any], clock: Clock
) -> dict[str, Any]:
    """What the samples were, what was learned from them (`learned`), and how long it took."""
    lengths = torch.tensor(batch.lengths(), dtype=torch.float32)
    forwarded = [batch.rollouts[s] for micro in micros for s in micro]
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in forwarded)
    truncated = [r.finish_reason == "length" for r in batch.rollouts]
    return {
        "step": step,
        "loss": learned["loss"],
        "reward": float(batch.rewards[batch.valid].mean()) if batch.valid.any() else 0.0,
        "reward_std": batch.reward_std(),
        "no_signal": 1 - float(batch.signal.float().mean()),
        **learned,
        "completion_length": float(lengths.mean()),
        "truncated": sum(truncated) / len(truncated),
        "invalid": 1 - float(torch.isfinite(batch.rewards).float().mean()),
        "policy_version": batch.rollouts[0].policy_version,
        "tokens_per_s_sample": clock.rate(float(lengths.sum()), "sample"),
        "tokens_per_s_train": clock.rate(tokens, "train", "update"),
        "time_ms": {stage: round(ms, 3) for stage, ms in clock.ms.items()},
    }
