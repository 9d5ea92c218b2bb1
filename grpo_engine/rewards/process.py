"""Process rewards: rewards of the steps of a completion, as an advantage per token.

Pure functions on lists and numpy arrays, for any trainer whose loss takes an advantage per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError


@dataclass(frozen=True)
class StepReward:
    """The reward of the tokens [start, end) of a completion."""

    start: int
    """first token of the step, counted from the completion's first"""
    end: int
    """the token after its last"""
    reward: float
    """finite"""


def check_steps(steps: Sequence[StepReward], length: int, function: str, sample: int) -> None:
    """UserError, naming function and sample, for steps that a completion of `length` can't have."""
    where = f"the reward {function}, sample {sample}"
    for step in steps:
        if not isinstance(step, StepReward):
            raise UserError(
                f"{where}: a list of StepReward is wanted; it holds {type(step).__name__}"
            )
        if not 0 <= step.start < step.end <= length:
            raise UserError(
                f"{where}: the step [{step.start}, {step.end}) is no span of a completion of "
                f"{length} tokens; give 0 <= start < end <= {length}"
            )
        if not math.isfinite(step.reward):
            raise UserError(
                f"{where}: the step [{step.start}, {step.end}) has the reward {step.reward}; "
                "it must be finite, or the whole sample None"
            )


def step_advantages(
    steps: Sequence[Sequence[StepReward] | None],
    lengths: Sequence[int],
    *,
    ddof: int = 0,
    epsilon_std: float = 1e-4,
    to_go: bool = True,
) -> list[np.ndarray]:
    """Advantages of a group from its step rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    Step rewards are normalised over all steps of all samples of the group, (r - mean) / (std +
    epsilon_std); equal ones, or fewer than two, give exactly 0.

    steps: one list per sample; None or empty: the sample has no steps, takes no part in the
    statistics and gets zeros.
    lengths: tokens of each completion.
    ddof: 0 for the standard deviation of the population, 1 for that of a sample.
    to_go: True: a token's advantage is the sum of the normalised rewards of the steps that end at
    it or later, as in the paper. False: of the steps whose span holds it.
    Returns float32 [length] per sample. UserError for a step outside its completion.
    """
    for sample, (own, length) in enumerate(zip(steps, lengths, strict=True)):
        check_steps(own or [], length, "of a process", sample)
    rewards = np.array([s.reward for own in steps for s in own or []], dtype=np.float64)
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return [np.zeros(length, dtype=np.float32) for length in lengths]
    mean, scale = rewards.mean(), rewards.std(ddof=ddof) + epsilon_std
    results = []
    for own, length in zip(steps, lengths, strict=True):
        advantage = np.zeros(length, dtype=np.float64)
        for step in own or []:
            first = 0 if to_go else step.start
            advantage[first : step.end] += (step.reward - mean) / scale
        results.append(advantage.astype(np.float32))
    return results
