"""Old samples, for a KL or for behaviour cloning alone.

They are no rollouts and have no advantage, so that none can join a current group. What they serve
needs log-probs under the policy as it is now; those of the time when they were drawn are not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .config import ReplayConfig
from .randomness import generator


@dataclass(frozen=True)
class OldSample:
    """A sample of an earlier generation."""

    task: int
    prompt_ids: list[int]
    completion_ids: list[int]
    temperature: float
    """it was drawn at; the logits are divided by it"""
    reward: float
    right: bool
    """by the reward that decides"""
    policy_version: int
    """that drew it"""
    reward_version: str
    """that gave the reward"""

    def age(self, policy_version: int) -> int:
        """Updates of the policy since it was drawn."""
        return policy_version - self.policy_version


class Replay:
    """The samples of the last `config.steps` generations that may serve again.

    Mode clone: only those that are right. Mode none: nothing is kept.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self._generations: list[list[OldSample]] = []

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def add(self, samples: Sequence[OldSample]) -> None:
        """Keeps a generation; the oldest one goes when there are too many."""
        kept = [sample for sample in samples if self._serves(sample)]
        self._generations = [*self._generations, kept][-self.config.steps :]

    def choose(
        self, count: int, policy_version: int, reward_version: str, *, seed: int, step: int
    ) -> list[OldSample]:
        """At most `count` samples that are not too old.

        kl: any, by chance. clone: one a task, the best rewards first and equal ones by chance;
        those with the reward of another version are left out until they are scored again, see
        `stale`. `policy_version`, `reward_version`: those of now.
        """
        found = self._young(policy_version)
        chance = generator("replay", seed, step)
        found = [found[i] for i in chance.permutation(len(found))]
        if self.config.mode == "clone":
            found = [sample for sample in found if sample.reward_version == reward_version]
            found.sort(key=lambda sample: -sample.reward)
            best: dict[int, OldSample] = {}
            for sample in found:
                best.setdefault(sample.task, sample)
            found = list(best.values())
        return found[:count]

    def stale(self, policy_version: int, reward_version: str) -> list[OldSample]:
        """Samples that are not too old, and whose reward is of another version than that of now.

        Mode clone alone: a KL reads no reward.
        """
        if self.config.mode != "clone":
            return []
        young = self._young(policy_version)
        return [sample for sample in young if sample.reward_version != reward_version]

    def rescored(
        self, sample: OldSample, reward: float | None, right: bool, reward_version: str
    ) -> None:
        """Gives a sample of `stale` its reward of now; it goes if that one doesn't let it serve.

        `reward`: None if it has none now.
        """
        for generation in self._generations:
            for at, old in enumerate(generation):
                if old is sample:
                    del generation[at]
                    if reward is not None:
                        new = replace(
                            old, reward=reward, right=right, reward_version=reward_version
                        )
                        generation[at:at] = [new] if self._serves(new) else []
                    return
        raise ValueError("the sample is not in the buffer any more")

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {"generations": [[dict(vars(s)) for s in samples] for samples in self._generations]}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._generations = [[OldSample(**s) for s in samples] for samples in state["generations"]]

    def _serves(self, sample: OldSample) -> bool:
        if self.config.mode == "clone":
            return sample.right
        return self.config.mode == "kl"

    def _young(self, policy_version: int) -> list[OldSample]:
        samples = [sample for generation in self._generations for sample in generation]
        return [s for s in samples if s.age(policy_version) <= self.config.most_age]
