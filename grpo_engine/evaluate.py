"""Held-out tasks, answered greedily and scored as in training."""

from dataclasses import dataclass, replace

from .answers import answer_tasks
from .config import RunConfig
from .curriculum.presets import Setting
from .rewards.score import Scorer
from .rollout import Rollout
from .sampler import GroupSampler, Progress
from .taskset import TaskSet


@dataclass(frozen=True)
class Evaluation:
    """Answers to the tasks of a source, one each."""

    rollouts: list[Rollout]
    texts: list[str]
    rewards: list[float | None]
    """None: no reward applied, or its call failed"""

    @property
    def mean(self) -> float:
        """Over the answers that have a reward; NaN if none has."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) / len(given) if given else float("nan")


def evaluate(
    source: TaskSet,
    scorer: Scorer,
    sampler: GroupSampler,
    config: RunConfig,
    step: int,
    progress: Progress | None = None,
) -> Evaluation:
    """Greedy answers to the first `data.eval_limit` tasks of `source`, at temperature 0."""
    greedy = replace(config.sampling.params(Setting(1.0), seed=0), temperature=0.0)
    limit = config.data.eval_limit
    found = answer_tasks(source, scorer, sampler, greedy, limit=limit, step=step, progress=progress)
    return Evaluation(found.rollouts, found.texts, found.rewards)
