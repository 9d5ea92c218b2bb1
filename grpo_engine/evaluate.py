"""Held-out tasks, answered greedily and scored as in training."""

from dataclasses import replace

from .answers import Answers, answer_tasks
from .config import RunConfig
from .curriculum.presets import Setting
from .rewards.score import Scorer
from .sampler import GroupSampler, Progress
from .taskset import TaskSet


def evaluate(
    source: TaskSet,
    scorer: Scorer,
    sampler: GroupSampler,
    config: RunConfig,
    step: int,
    progress: Progress | None = None,
) -> Answers:
    """Greedy answers to the first `data.eval_limit` tasks of `source`, at temperature 0."""
    greedy = replace(config.sampling.params(Setting(1.0), seed=0), temperature=0.0)
    limit = config.data.eval_limit
    return answer_tasks(source, scorer, sampler, greedy, limit=limit, step=step, progress=progress)
