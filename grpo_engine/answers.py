"""Answers to tasks, scored as in training, and what they say: mean reward, pass rate, pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, isnan, nan, sqrt
from typing import Any

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
    decided: list[float | None]
    """what says whether an answer is right; None: nothing does, or it has no reward"""

    def right(self, correct_at: float, cut_counts: bool) -> list[bool | None]:
        """Whether each answer is right, from `correct_at` on; None: nothing says so.

        cut_counts: one that was cut before its end may be right as well.
        """
        return [
            None if number is None else number >= correct_at and (cut_counts or not rollout.cut)
            for number, rollout in zip(self.decided, self.rollouts, strict=True)
        ]

    def by_task(self, values: Sequence[Any]) -> list[list[Any]]:
        """[P] the values [S] of each task, those that are not None; not the tasks without any."""
        spans = range(0, len(values), self.samples)
        tasks = [[x for x in values[a : a + self.samples] if x is not None] for a in spans]
        return [task for task in tasks if task]


@dataclass(frozen=True)
class Summary:
    """Figures of a set of answers; NaN where no answer has what they are means of."""

    reward: float
    """mean over the tasks of their mean reward"""
    reward_error: float | None
    """its standard error over the tasks; None for fewer than two"""
    pass_rate: float
    """mean over the tasks of the share of right answers among those that could be judged"""
    pass_error: float | None
    pass_at: dict[int, float]
    """pass@k by k, over the tasks with at least k judged answers"""
    components: dict[str, float]
    """mean of each over the answers that it applies to"""
    tasks: int
    scored_tasks: int
    """those with an answer that has a reward, over which the means are"""
    answers: int
    unscored: int
    """answers without a reward"""
    truncated: int
    """answers cut by max_tokens or the context"""


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
    floor = scorer.scoring.floor
    rewards = scores.rewards(lengths, floor)
    numbers = scores.prepared(lengths).decided(scores.decider, floor).tolist()
    decided = [
        None if reward is None or isnan(number) else number
        for reward, number in zip(rewards, numbers, strict=True)
    ]
    return Answers(chosen, samples, rollouts, texts, scores, rewards, decided)


def summarize(answers: Answers, correct_at: float, cut_counts: bool) -> Summary:
    """correct_at, cut_counts: see `Answers.right`."""
    means = [_mean(rewards) for rewards in answers.by_task(answers.rewards)]
    right = answers.by_task(answers.right(correct_at, cut_counts))
    shares = [_mean(task) for task in right]
    pass_at = {}
    for k in _powers_of_two(answers.samples):
        enough = [pass_at_k(len(task), sum(task), k) for task in right if len(task) >= k]
        if enough:
            pass_at[k] = _mean(enough)
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
        scored_tasks=len(means),
        answers=len(answers.rewards),
        unscored=answers.rewards.count(None),
        truncated=sum(rollout.cut for rollout in answers.rollouts),
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
