"""Groups that teach nothing, by cause."""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from statistics import pstdev, stdev

import numpy as np

from ..sample_config import GroupsConfig
from .states import ENV_FAILED, INVALID

ALL_CORRECT, ALL_WRONG, ALL_MALFORMED, ENVIRONMENT, LOW_VARIANCE = CAUSES = (
    "all_correct",
    "all_wrong",
    "all_malformed",
    "environment",
    "low_variance",
)


def signal_causes(
    rewards: np.ndarray,
    decided: np.ndarray,
    valid: np.ndarray,
    states: Sequence[str],
    gate_failed: Sequence[str | None],
    cu_groups: Sequence[int],
    config: GroupsConfig,
    min_std: float,
    ddof: int = 0,
) -> list[str | None]:
    """[P] why a group carries no signal; None where it does.

    rewards: [S] float64 raw totals, before ranks and scaling, which would turn noise into spread.
    decided: [S] float64, what says whether an answer is right, NaN where nothing does.
    valid: [S] bool. gate_failed: [S] the gate that a sample failed. A group carries signal if at
    least two valid samples differ and their standard deviation, with `ddof`, is above `min_std`.
    """
    with np.errstate(over="ignore"):  # such a sample is not valid
        narrow, counts = rewards.astype(np.float32).tolist(), valid.tolist()
    return [
        _cause(
            [narrow[i] for i in range(first, last) if counts[i]],
            [x for x in decided[first:last][valid[first:last]].tolist() if not isnan(x)],
            states[first:last],
            gate_failed[first:last],
            config,
            min_std,
            ddof,
        )
        for first, last in pairwise(cu_groups)
    ]


def _cause(
    rewards: list[float],
    decided: list[float],
    states: Sequence[str],
    gate_failed: Sequence[str | None],
    config: GroupsConfig,
    min_std: float,
    ddof: int,
) -> str | None:
    if len(rewards) >= 2 and max(rewards) > min(rewards) and _std_above(rewards, min_std, ddof):
        return None
    lost = [state for state in states if state in (INVALID, ENV_FAILED)]
    if len(rewards) < 2 and lost:
        return ENVIRONMENT if lost.count(ENV_FAILED) * 2 > len(lost) else ALL_MALFORMED
    judged = zip(gate_failed, states, strict=True)
    if all(gate is not None or state == INVALID for gate, state in judged):
        return ALL_MALFORMED
    if decided and min(decided) >= config.correct_at:
        return ALL_CORRECT
    if decided and max(decided) <= config.low_at:
        return ALL_WRONG
    return LOW_VARIANCE


def _std_above(rewards: list[float], least: float, ddof: int) -> bool:
    return least == 0 or (stdev if ddof else pstdev)(rewards) > least
