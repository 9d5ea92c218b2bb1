"""A step's samples as a table with their whole lineage: one schema, so that steps can be joined."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .data import Messages
from .errors import require
from .groups.batch import Batch
from .guards.figures import repetition

PURPOSE = "recording rollouts"
OF_GROUP = {
    "group": "int32",
    "task_row": "int64",
    "task": "string",
    "variant": "int32",
    "band": "string",
    "round": "int32",
    "signal": "bool",
    "signal_cause": "string",
    "discarded": "bool",
    "prompt": "string",
    "sent": "string",
}
OF_SAMPLE = {
    "sample": "int32",
    "completion": "string",
    "text": "string",
    "reward": "float",
    "advantage": "float",
    "state": "string",
    "cause": "string",
    "valid": "bool",
    "in_loss": "bool",
    "anchor": "bool",
    "finish_reason": "string",
    "policy_version": "int64",
    "temperature": "double",
    "top_p": "double",
    "top_k": "int64",
    "min_p": "double",
    "repetition_penalty": "double",
    "max_tokens": "int64",
    "seed": "uint64",
}
AUDITED = "step task_row text reward components completion_ids anchor".split()
OF_STEP = {
    "adapter": "string",
    "reward_version": "string",
    "sampling": "string",
    "environment": "string",
    "tools": "string",
}


@dataclass(frozen=True)
class Asked:
    """What a group was asked, as far as the token ids don't say it."""

    text: str
    """the prompt decoded, special tokens with it"""
    sent: str | Messages
    """the prompt before it was encoded"""
    columns: dict[str, Any]
    """the other columns of the data, so that the samples can be scored again"""


@cache
def schema() -> Any:
    """The pyarrow schema of a part."""
    pa = require("pyarrow", "train", PURPOSE)
    plain = {"step": "int64"} | OF_GROUP | OF_SAMPLE | OF_STEP
    fields = [pa.field(name, pa.type_for_alias(kind)) for name, kind in plain.items()]
    fields.append(pa.field("components", pa.map_(pa.string(), pa.float64())))
    for name in ("prompt_ids", "completion_ids"):
        fields.append(pa.field(name, pa.list_(pa.int32())))
    # token_advantages: in place of `advantage` where steps are rewarded; null elsewhere.
    for name in ("logp_sampler", "logp_processed", "token_advantages"):
        fields.append(pa.field(name, pa.list_(pa.float32())))
    return pa.schema(fields)


def rollout_table(
    step: int, batch: Batch, asked: Sequence[Asked], completions: Sequence[str]
) -> Any:
    """A pyarrow table with a row a sample.

    asked: [P]. completions: [S], decoded with special tokens.
    """
    pa = require("pyarrow", "train", PURPOSE)
    of_group = _of_groups(batch, asked)
    of_sample = _of_samples(batch, completions)
    of_step = {"step": step} | {name: batch.fingerprint[name] for name in OF_STEP}
    count, offsets = len(batch.rollouts), batch.cu_groups.numpy()
    # Not by torch: a second thread that uses OpenMP would slow down that of the training.
    group = pa.array(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))

    def array(name: str, kind: Any) -> Any:
        if name in of_group:
            return pa.array(of_group[name], kind).take(group)
        if name in of_step:
            return pa.repeat(pa.scalar(of_step[name], kind), count)
        return pa.array(of_sample[name], kind)

    return pa.table([array(f.name, f.type) for f in schema()], schema=schema())


def _of_groups(batch: Batch, asked: Sequence[Asked]) -> dict[str, list]:
    return {
        "group": list(range(len(batch.origins))),
        "task_row": [o.row for o in batch.origins],
        "task": [json.dumps(a.columns) for a in asked],
        "variant": [o.variant for o in batch.origins],
        "band": [o.band for o in batch.origins],
        "round": [o.round for o in batch.origins],
        "signal": batch.signal.tolist(),
        "signal_cause": batch.signal_causes,
        "discarded": batch.discarded.tolist(),
        "prompt": [a.text for a in asked],
        "prompt_ids": [batch.rollouts[i].prompt_ids for i in batch.cu_groups.tolist()[:-1]],
        "sent": [json.dumps(a.sent) for a in asked],
    }


def _of_samples(batch: Batch, completions: Sequence[str]) -> dict[str, list]:
    rollouts = batch.rollouts
    params = "temperature top_p top_k min_p repetition_penalty max_tokens seed".split()
    own = "sample finish_reason policy_version completion_ids".split()
    logps = "logp_sampler logp_processed".split()
    names, rows = list(batch.components), zip(*batch.components.values(), strict=True)
    return {
        "completion": list(completions),
        "text": batch.texts,
        "reward": [None if x != x else x for x in batch.rewards.tolist()],
        "advantage": batch.advantages.tolist(),
        "token_advantages": [
            batch.token_advantages[i].numpy() if i in batch.token_advantages else None
            for i in range(len(rollouts))
        ],
        "state": batch.states,
        "cause": batch.causes,
        "valid": batch.valid.tolist(),
        "in_loss": batch.in_loss.tolist(),
        "anchor": batch.anchors.tolist(),
        "components": [list(zip(names, row, strict=True)) for row in rows],
        **{name: [getattr(r.params, name) for r in rollouts] for name in params},
        **{name: [getattr(r, name) for r in rollouts] for name in own},
        **{name: [getattr(r, name).numpy() for r in rollouts] for name in logps},
    }


def audit_rows(table: Any) -> list[dict[str, Any]]:
    """Rows of the columns AUDITED as `guards.audit` takes them, without anchors."""
    return [
        {
            "step": row["step"],
            "task_row": row["task_row"],
            "reward": row["reward"],
            "completion": row["text"],
            "length": len(row["completion_ids"]),
            "repetition": repetition(row["completion_ids"]),
            "components": dict(row["components"]),
        }
        for row in table.to_pylist()
        if not row["anchor"]
    ]
