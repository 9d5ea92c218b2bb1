"""The line of metrics that a step leaves behind; it is also what the guards watch."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from .clock import Clock
from .groups.batch import Batch
from .groups.signal import CAUSES
from .groups.states import ENV_FAILED, INVALID, STATES, no_attempt
from .guards.figures import (
    length_bucket,
    mean_by,
    repetition,
    reward_length_correlation,
    unique_share,
)
from .learn import MicroBatches

NONE = float("nan")  # no figure, which is not 0: null in metrics.jsonl


def step_metrics(
    step: int,
    batch: Batch,
    micros: MicroBatches,
    learned: dict[str, Any],
    clock: Clock,
    correct_at: float,
    task_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What the samples were, what was learned from them (`learned`), and how fast it went.

    correct_at: from where on a sample is right, by the reward that decides.
    task_names: [P] the kind of task of each group, by which the KL is split.
    """
    lengths = batch.lengths()
    forwarded = [batch.rollouts[s] for micro in micros for s in micro]
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in forwarded)
    return {
        "step": step,
        "loss": learned["loss"],
        **_rewards(batch, correct_at),
        **learned | ({} if batch.ref_logp else {"kl": NONE}),
        **_shapes(batch, lengths),
        **_states(batch),
        **_signal(batch, lengths),
        **_kl_parts(batch, lengths, task_names),
        "policy_version": batch.rollouts[0].policy_version,
        "tokens_per_s_sample": clock.rate(sum(lengths), "sample"),
        "tokens_per_s_train": clock.rate(tokens, "train", "update"),
    }


def _rewards(batch: Batch, correct_at: float) -> dict[str, Any]:
    counted = batch.valid & ~batch.anchors
    decided = batch.decided_of(range(len(batch.rollouts)))
    given = {n: [x for x in c if x is not None] for n, c in batch.components.items()}
    group = batch.group_of_sample()[counted].tolist()
    rewards = batch.rewards[counted].tolist()
    bands = [batch.origins[g].band or "medium" for g in group]
    return {
        "reward": sum(rewards) / len(rewards) if rewards else NONE,
        "right": sum(x >= correct_at for x in decided) / len(decided) if decided else NONE,
        "samples": int((~batch.anchors).sum()),
        "valid": len(rewards),
        "in_loss": int(batch.in_loss.sum()),
        "reward_std": batch.reward_std() if rewards else NONE,
        "reward_by_band": mean_by(bands, rewards, [1.0] * len(rewards)),
        "valid_by_band": dict(Counter(bands)),
        "components": {name: sum(x) / len(x) for name, x in given.items() if x},
        "components_over": {name: len(x) for name, x in given.items()},
    }


def _shapes(batch: Batch, lengths: Sequence[int]) -> dict[str, float]:
    sampled = [i for i, anchor in enumerate(batch.anchors.tolist()) if not anchor]
    chosen = [batch.rollouts[i] for i in sampled]
    attempts = Counter(no_attempt(batch.rollouts[i], batch.texts[i]) for i in sampled)
    offsets = batch.cu_groups.tolist()
    spans = [range(a, b) for a, b in pairwise(offsets)]
    rewards = batch.rewards.tolist()
    correlation = reward_length_correlation(
        [[rewards[i] for i in span] for span in spans],
        [[lengths[i] for i in span] for span in spans],
    )
    shapes = {
        "completion_length": sum(lengths[i] for i in sampled) / len(sampled),
        "repetition": sum(repetition(r.completion_ids) for r in chosen) / len(chosen),
        "empty": attempts["empty"] / len(chosen),
        "loops": attempts["repetition"] / len(chosen),
        "unique": sum(
            unique_share(batch.rollouts[i].completion_ids for i in span) for span in spans
        )
        / len(spans),
        "group_size": len(chosen) / len(spans),
        "effective_group_size": int((batch.valid & ~batch.anchors).sum()) / len(spans),
        "temperature": sum(r.params.temperature for r in chosen) / len(chosen),
        "max_tokens": max(r.params.max_tokens for r in chosen),
    }
    return shapes if correlation is None else shapes | {"reward_length": correlation}


def _states(batch: Batch) -> dict[str, Any]:
    sampled = [i for i, anchor in enumerate(batch.anchors.tolist()) if not anchor]
    counts, samples = Counter(batch.states[i] for i in sampled), len(sampled)
    return {
        "truncated": sum(batch.rollouts[i].cut for i in sampled) / samples,
        "invalid": counts[INVALID] / samples,
        "env_failed": counts[ENV_FAILED] / samples,
        "anchors": int(batch.anchors.sum()),
        "states": {state: counts[state] for state in STATES if counts[state]},
    }


def _signal(batch: Batch, lengths: Sequence[int]) -> dict[str, Any]:
    causes = Counter(batch.signal_causes)
    taught = int(batch.signal.sum())
    rounds = [origin.round for origin in batch.origins]
    sampled = int((torch.tensor(lengths) * ~batch.anchors).sum())
    return {
        "no_signal": 1 - taught / len(batch.signal),
        "no_signal_causes": {cause: causes[cause] for cause in CAUSES},
        "groups_drawn": len(batch.signal),
        "groups_extra": sum(round_ > 0 for round_ in rounds),
        "tokens_sampled": sampled,
        "tokens_per_signal_group": sampled / taught if taught else None,
    }


def _kl_parts(
    batch: Batch, lengths: Sequence[int], task_names: Sequence[str] | None
) -> dict[str, dict[str, float]]:
    if not batch.kl:
        return {}
    samples = sorted(batch.kl)
    group = batch.group_of_sample().tolist()
    values, weights = [batch.kl[s] for s in samples], [float(lengths[s]) for s in samples]
    bands = [batch.origins[group[s]].band or "medium" for s in samples]
    parts = {
        "kl_by_length": mean_by([length_bucket(lengths[s]) for s in samples], values, weights),
        "kl_by_band": mean_by(bands, values, weights),
    }
    if task_names is not None:
        names = [task_names[group[s]] for s in samples]
        parts["kl_by_task"] = mean_by(names, values, weights)
    return parts
