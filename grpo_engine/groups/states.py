"""What became of each sample, with its cause: who is in the statistics, who is in the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from ..rollout import Rollout
from ..sample_config import GroupsConfig

SCORED, LOW, INVALID, ENV_FAILED, TRUNCATED, BUDGET = STATES = (
    "scored",
    "low",
    "invalid",
    "env_failed",
    "truncated",
    "budget",
)
NO_ATTEMPT = {"empty": "empty", "repetition": "pure repetition"}  # in words
PERIODS = range(1, 9)
REPEATS = 4  # of the period, and at least
FLOAT32_MOST = float(np.finfo(np.float32).max)
REPEATED_TOKENS = 24  # in all, to be called pure repetition


@dataclass
class Judged:
    """Judged samples, [S] each."""

    states: list[str]
    causes: list[str | None]
    valid: np.ndarray
    """bool; enters the statistics"""
    in_loss: np.ndarray
    """bool; its tokens enter the loss"""
    penalties: np.ndarray
    """float64; taken off the total"""
    declared: np.ndarray
    """float64; stands in place of the total; NaN: it does not"""
    weights: np.ndarray
    """float64; factor of the advantage"""

    def rewards(self, totals: np.ndarray) -> np.ndarray:
        """[S] float64: `totals` with penalties and declared rewards."""
        return self.in_place(totals - self.penalties)

    def in_place(self, values: np.ndarray) -> np.ndarray:
        """[S] float64: `values`, and declared rewards in place of theirs."""
        return np.where(np.isnan(self.declared), values, self.declared)


def judge(
    rollouts: Sequence[Rollout],
    texts: Sequence[str],
    totals: np.ndarray,
    decided: np.ndarray,
    failures: Sequence[str | None],
    env_failures: Sequence[str | None],
    refused: Sequence[str | None],
    config: GroupsConfig,
) -> Judged:
    """The state of each sample and what it means.

    texts: [S] completions without special tokens. totals: [S] float64, NaN where no reward applies.
    decided: [S] float64, what says whether an answer is right, NaN where nothing does.
    failures, env_failures: [S] the cause where a reward call failed or an environment did.
    refused: [S] the component that makes a sample invalid.
    """
    found = [
        _env_failed(r, env_failures[i])
        or _invalid(r, texts[i], total, failures[i], refused[i], config)
        or _cut(r)
        or _answered(decided[i], config)
        for i, (r, total) in enumerate(zip(rollouts, totals.tolist(), strict=True))
    ]
    of, samples = np.array([state for state, _ in found]), len(rollouts)
    judged = Judged(
        [state for state, _ in found],
        [cause for _, cause in found],
        valid=np.ones(samples, bool),
        in_loss=np.ones(samples, bool),
        penalties=np.zeros(samples),
        declared=np.full(samples, np.nan),
        weights=np.ones(samples),
    )
    for state, reward in (
        (INVALID, config.invalid_reward),
        (ENV_FAILED, config.env_failed_reward),
    ):
        if reward is None:
            judged.valid[of == state] = False
        else:
            judged.declared[of == state] = reward
    _apply_truncation(judged, (of == TRUNCATED) | (of == BUDGET), config)
    judged.in_loss &= judged.valid
    return judged


def no_attempt(rollout: Rollout, text: str) -> str | None:
    """`empty` or `repetition` for a completion that is nothing else; else None."""
    if not text.strip():
        return "empty"
    ids = rollout.completion_ids
    own = ids[:-1] if rollout.finish_reason == "stop" else ids
    return "repetition" if is_pure_repetition(own) else None


def is_pure_repetition(ids: Sequence[int]) -> bool:
    """Whether the tokens are one short sequence over and over; a cut last one counts."""
    if len(ids) < REPEATED_TOKENS:
        return False
    for period in PERIODS:
        enough = max(REPEATED_TOKENS, REPEATS * period)
        if len(ids) >= enough and all(a == b for a, b in zip(ids, ids[period:], strict=False)):
            return True
    return False


def _apply_truncation(judged: Judged, cut: np.ndarray, config: GroupsConfig) -> None:
    policy = config.truncated
    if policy in ("mask", "drop", "resample"):
        judged.in_loss[cut] = False
    if policy == "drop":
        judged.valid[cut] = False
    if policy == "penalty":
        judged.penalties[cut] = config.truncated_penalty
    if policy == "downweight":
        judged.weights[cut] = config.truncated_weight


def _env_failed(rollout: Rollout, cause: str | None) -> tuple[str, str] | None:
    if rollout.finish_reason == "error":
        return ENV_FAILED, "sampling was broken off"
    return None if cause is None else (ENV_FAILED, cause)


def _invalid(
    rollout: Rollout,
    text: str,
    total: float,
    failure: str | None,
    refused: str | None,
    config: GroupsConfig,
) -> tuple[str, str] | None:
    cause = None
    if failure is not None:
        cause = failure
    elif config.invalid and (attempt := no_attempt(rollout, text)) in config.invalid:
        cause = NO_ATTEMPT[attempt]
    elif refused is not None:
        cause = f"broken format: {refused}"
    elif isnan(total):
        cause = "no reward applies"
    elif abs(total) > FLOAT32_MOST:
        cause = "its reward is no finite float32"
    return None if cause is None else (INVALID, cause)


def _cut(rollout: Rollout) -> tuple[str, str] | None:
    if rollout.finish_reason == "budget":
        return BUDGET, "its budget was spent"
    if rollout.finish_reason != "length":
        return None
    if len(rollout.completion_ids) < rollout.params.max_tokens:
        return BUDGET, "the context was full"
    return TRUNCATED, f"max_tokens {rollout.params.max_tokens}"


def _answered(decided: float, config: GroupsConfig) -> tuple[str, str | None]:
    if decided <= config.low_at:
        return LOW, f"reward at most {config.low_at:g}"
    return SCORED, None
