"""A batch as plain values, for checkpoints: the same again, bit for bit."""

import dataclasses

import torch

from ..rollout import Rollout, SamplingParams
from .batch import Batch, Origin

TENSORS = {
    "cu_groups": torch.int32,
    "rewards": torch.float32,
    "decided": torch.float64,
    "valid": torch.bool,
    "in_loss": torch.bool,
    "anchors": torch.bool,
    "advantages": torch.float32,
    "signal": torch.bool,
    "discarded": torch.bool,
}
BY_SAMPLE = ("token_advantages", "old_logp", "ref_logp")
PLAIN = ("texts", "components", "states", "causes", "signal_causes", "fingerprint")


def batch_to_json(batch: Batch) -> dict:
    """Plain values from which `batch_from_json` makes the same batch, bit for bit."""
    return {
        "origins": [dataclasses.asdict(origin) for origin in batch.origins],
        "rollouts": [_rollout_to_json(r) for r in batch.rollouts],
        **{name: getattr(batch, name) for name in PLAIN},
        **{name: getattr(batch, name).tolist() for name in TENSORS},
        **{name: {s: x.tolist() for s, x in getattr(batch, name).items()} for name in BY_SAMPLE},
    }


def batch_from_json(values: dict) -> Batch:
    """The batch that `batch_to_json` described."""
    tensors = {name: torch.tensor(values[name], dtype=kind) for name, kind in TENSORS.items()}
    by_sample = {
        name: {int(s): torch.tensor(x, dtype=torch.float32) for s, x in values[name].items()}
        for name in BY_SAMPLE
    }
    return Batch(
        origins=[Origin(**origin) for origin in values["origins"]],
        rollouts=[_rollout_from_json(r) for r in values["rollouts"]],
        **{name: values[name] for name in PLAIN},
        **tensors,
        **by_sample,
    )


def _rollout_to_json(rollout: Rollout) -> dict:
    return {
        **dataclasses.asdict(rollout),
        "logp_sampler": rollout.logp_sampler.tolist(),
        "logp_processed": rollout.logp_processed.tolist(),
    }


def _rollout_from_json(values: dict) -> Rollout:
    tensors = {
        name: torch.tensor(values[name], dtype=torch.float32)
        for name in ("logp_sampler", "logp_processed")
    }
    return Rollout(**{**values, "params": SamplingParams(**values["params"]), **tensors})
