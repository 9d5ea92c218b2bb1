"""Answers to tasks, scored as in training, and what they say: mean reward, pass rate, pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nan, sqrt

import numpy as np

from .rewards.score import Scorer, Scores
from .rollout import Rollout, SamplingParams
from .sampler import GroupSampler, Progress
from .taskset import TaskSet, score_answers


@dataclass(frozen=True)
class Answers:
    """`samples` answers to each task; those of a task stand together, [S] in all."""

    tasks: list[int]
    """[P] numbers in their source"""
    samples: int
    rollouts: list[Rollout]
    texts: list[str]
    """without special tokens"""
    scores: Scores
    rewards: list[float | None]
    """None: no reward applied, or its call failed"""

    @property
    def mean(self) -> float:
        """Over the answers that have a reward; NaN if none has."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) / len(given) if given else nan

    def by_task(self) -> list[list[float]]:
        """[P] the rewards of each task, those that there are."""
        spans = range(0, len(self.rewards), self.samples)
        return [
            [r for r in self.rewards[first : first + self.samples] if r is not None]
            for first in spans
        ]


@dataclass(frozen=True)
class Summary:
    """Figures of a set of answers; NaN where no answer has a reward."""

    reward: float
    """mean over the tasks of their mean reward"""
    reward_error: float | None
    """its standard error over the tasks; None for fewer than two"""
    pass_rate: float
    """mean over the tasks of the share of right answers"""
    pass_error: float | None
    pass_at: dict[int, float]
    """pass@k by k, over the tasks with at least k scored answers"""
    components: dict[str, float]
    """mean of each over the answers that it applies to"""
    tasks: int
    answers: int
    unscored: int
    """answers without a reward"""
    truncated: float
    """share cut by max_tokens or the context"""


def answer_tasks(
    source: TaskSet,
    scorer: Scorer,
    sampler: GroupSampler,
    params: SamplingParams,
    *,
    limit: int | None = None,
    samples: int = 1,
    step: int = 0,
    progress: Progress | None = None,
) -> Answers:
    """Draws `samples` answers to each of the first `limit` tasks and scores them.

    step: what reward functions are told that the step is.
    """
    chosen = list(range(len(source.tasks))[:limit])
    groups = sampler.generate([source.ids(i) for i in chosen], samples, params, progress=progress)
    prompts = [source.prompt(i) for i in chosen]
    texts, scores = score_answers(scorer, source, chosen, prompts, groups, step)
    rollouts = [rollout for group in groups for rollout in group]
    lengths = [len(r.completion_ids) for r in rollouts]
    rewards = scores.rewards(lengths, scorer.scoring.floor)
    return Answers(chosen, samples, rollouts, texts, scores, rewards)


def summarize(answers: Answers, correct_at: float) -> Summary:
    """correct_at: the reward from which on an answer is right."""
    tasks = [rewards for rewards in answers.by_task() if rewards]
    right = [sum(r >= correct_at for r in rewards) for rewards in tasks]
    means = [sum(rewards) / len(rewards) for rewards in tasks]
    shares = [c / len(rewards) for c, rewards in zip(right, tasks, strict=True)]
    pass_at = {}
    for k in _powers_of_two(answers.samples):
        enough = [
            pass_at_k(len(rewards), c, k)
            for c, rewards in zip(right, tasks, strict=True)
            if len(rewards) >= k
        ]
        if enough:
            pass_at[k] = sum(enough) / len(enough)
    cut = sum(r.finish_reason in ("length", "budget") for r in answers.rollouts)
    return Summary(
        reward=_mean(means),
        reward_error=standard_error(means),
        pass_rate=_mean(shares),
        pass_error=standard_error(shares),
        pass_at=pass_at,
        components={
            name: _mean([x for x in column if x is not None])
            for name, column in answers.scores.components.items()
        },
        tasks=len(answers.tasks),
        answers=len(answers.rewards),
        unscored=answers.rewards.count(None),
        truncated=cut / len(answers.rollouts) if answers.rollouts else nan,
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, from `right` of `samples`, without bias.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021, arXiv 2107.03374. ValueError unless
    0 <= right <= samples and 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@k of {right} right in {samples} samples and k {k} has no meaning")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values, by their sample deviation; None for fewer than two."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / sqrt(len(values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*powers, most]
