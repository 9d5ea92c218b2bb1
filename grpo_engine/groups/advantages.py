"""From the rewards of a step to advantages: preprocessing, statistics, groups without signal."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.options import GRPOOptions
from ..ops import group_advantages
from ..rewards.process import step_advantages
from ..rewards.total import Components
from ..sample_config import GroupsConfig, ScoringConfig
from .preprocess import PercentileWindow, members, preprocess
from .rules import Rules
from .signal import LOW_VARIANCE
from .states import Judged


@dataclass
class Advantages:
    """What the loss weighs tokens with."""

    samples: np.ndarray
    """[S] float32"""
    signal: np.ndarray
    """[P] bool"""
    tokens: dict[int, np.ndarray]
    """by sample, [len] float32: where rewards of steps make its tokens differ"""


def compute_advantages(
    judged: Judged,
    components: Components,
    cu_groups: Sequence[int],
    causes: Sequence[str | None],
    rules: Rules,
    window: PercentileWindow,
) -> Advantages:
    """The advantages of the whole step at once; `window` takes in its valid totals.

    causes: [P] of `signal_causes`, which judged the raw totals. Groups without signal get 0, unless
    groups.no_signal keeps those of low variance.
    """
    scoring, config = rules.scoring, rules.groups
    rewards = preprocess(judged, components, cu_groups, scoring, rules.options, window)
    # The raw totals were held to min_std; what ranks and scaling made of them is not.
    options = dataclasses.replace(rules.options, min_std=0.0)
    if scoring.aggregate == "normalize_then_sum":
        samples, spread = _of_normalized(rewards, judged.valid, cu_groups, scoring, options)
    else:
        samples, spread = _of_rewards(rewards, judged.valid, cu_groups, options)
    factors = np.array([_factor(cause, config) for cause in causes])
    group = np.repeat(np.arange(len(causes)), np.diff(cu_groups))
    samples = samples * factors[group] * judged.weights
    tokens = _of_tokens(samples, judged, components, cu_groups, options)
    signal = spread & (factors > 0)
    for sample, values in tokens.items():
        signal[group[sample]] |= bool(values.any())
    return Advantages(samples.astype(np.float32), signal, tokens)


def _factor(cause: str | None, config: GroupsConfig) -> float:
    if cause is None:
        return 1.0
    if cause != LOW_VARIANCE:
        return 0.0
    return {"keep": 1.0, "downweight": config.no_signal_weight}.get(config.no_signal, 0.0)


def _of_rewards(
    rewards: np.ndarray, valid: np.ndarray, cu_groups: Sequence[int], options: GRPOOptions
) -> tuple[np.ndarray, np.ndarray]:
    advantages, signal = group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(cu_groups, dtype=torch.int32),
        torch.tensor(valid),
        options,
    )
    return advantages.numpy().astype(np.float64), signal.numpy()


def _of_normalized(
    sums: np.ndarray,
    valid: np.ndarray,
    cu_groups: Sequence[int],
    scoring: ScoringConfig,
    options: GRPOOptions,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of components that are z-scores already: centred, which gates and penalties undid."""
    scale = scoring.renormalize
    options = dataclasses.replace(options, baseline="mean", scale_rewards=scale)
    return _of_rewards(sums, valid, cu_groups, options)


def _of_tokens(
    samples: np.ndarray,
    judged: Judged,
    components: Components,
    cu_groups: Sequence[int],
    options: GRPOOptions,
) -> dict[int, np.ndarray]:
    """The advantage of the sample plus those of its steps (DeepSeekMath, section 4.1.3)."""
    found: dict[int, np.ndarray] = {}
    for part in members(cu_groups, judged.valid) if components.steps else []:
        lengths = [components.lengths[i] for i in part]
        for name, rewards in components.steps.items():
            # A failed gate takes what the steps earned as well.
            given = [None if components.gate_failed[i] else rewards[i] for i in part]
            if not any(given):
                continue
            of_steps = step_advantages(
                given, lengths, ddof=options.ddof, epsilon_std=options.epsilon_std
            )
            weight = components.weight(name)
            for i, values in zip(part.tolist(), of_steps, strict=True):
                whole = found.get(i, np.full(len(values), samples[i], np.float32))
                found[i] = whole + np.float32(weight * judged.weights[i]) * values
    return found
