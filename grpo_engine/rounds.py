"""One round of a step: groups for some prompts, sampled, scored, with what they were made by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .clock import Clock
from .config import RunConfig
from .curriculum.anchors import anchor_text, choose_groups
from .curriculum.draw import Draw
from .curriculum.presets import draw_settings
from .groups.batch import Origin
from .groups.fingerprints import Fingerprint
from .groups.make import Samples
from .lineage import short_hash, weights_hash
from .parts import Parts
from .rewards.builtin.golds import first_gold
from .rollout import Rollout, SamplingParams
from .sampler import Progress
from .seeds import step_seed
from .taskset import score_answers


@dataclass(frozen=True)
class StepPlan:
    """What holds for all groups of a step."""

    step: int
    params: list[SamplingParams]
    """of the samples of a group, in their order; so many are drawn"""
    sampling: str
    """hash of the settings"""
    adapter: str
    """hash of the trained weights"""


class Rounds:
    """Samples and scores; changes nothing that a later step depends on."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config, self.policy, self.train = config, parts.policy, parts.train
        self.scorer, self.sampler = parts.scorer, parts.sampler
        # As the rewards read them: of a list one, of a solution what it ends with.
        self._answers = [first_gold(x) for x in self.train.column(config.data.answer_column)]

    def plan(self, step: int) -> StepPlan:
        """The settings of a step."""
        config, seed = self.config, self.config.train.seed
        settings = config.curriculum.settings_at(step, config.sampling.settings())
        size = config.curriculum.group_size_at(step, config.sampling.group_size)
        chosen = draw_settings(settings, size, seed, step) if len(settings) > 1 else [0] * size
        return StepPlan(
            step,
            [config.sampling.params(settings[i], step_seed(seed, step)) for i in chosen],
            short_hash(settings, config.sampling),
            weights_hash(self.policy.trainable()),
        )

    def sample(
        self,
        plan: StepPlan,
        draw: Draw,
        round_: int,
        first: int,
        clock: Clock,
        progress: Progress,
    ) -> Samples:
        """Scored groups for the drawn prompts. first: the number in the step of the first group."""
        origins = [self._origin(d.task, d.band, round_, plan.step) for d in draw.prompts]
        prompts = [self.train.prompt(o.task, o.variant) for o in origins]
        with clock("sample"):
            groups = self._generate(plan, origins, round_, progress)
            superseded = [[False] * len(group) for group in groups]
            if self.config.groups.truncated == "resample":
                self._draw_again(plan, groups, superseded, round_)
            anchored = self._add_anchors(plan, origins, groups) if round_ == 0 else []
        groups = [
            [replace(r, group=first + g, sample=i) for i, r in enumerate(group)]
            for g, group in enumerate(groups)
        ]
        with clock("reward"):
            tasks = [origin.task for origin in origins]
            texts, scores = score_answers(
                self.scorer, self.train, tasks, prompts, groups, plan.step
            )
        samples = Samples(origins, groups, texts, scores, [], [], [])
        for g, group in enumerate(groups):
            samples.fingerprints += self._fingerprints(plan, origins[g], group)
            samples.superseded += superseded[g] + [False] * (len(group) - len(superseded[g]))
            samples.anchors += [g in anchored and i == len(group) - 1 for i in range(len(group))]
        return samples

    def _origin(self, task: int, band: str, round_: int, step: int) -> Origin:
        found = self.train.tasks[task]
        seed = self.config.train.seed
        variant = self.train.variants.choose(task, found.columns, seed, step)
        return Origin(task, found.row, variant, band, round_)

    def _generate(
        self, plan: StepPlan, origins: Sequence[Origin], round_: int, progress: Progress
    ) -> list[list[Rollout]]:
        ids = [self.train.ids(o.task, o.variant) for o in origins]
        params = plan.params
        if round_ > 0:  # the groups of a call are numbered from 0: other random numbers
            seed = step_seed(self.config.train.seed, plan.step, round_)
            params = [replace(p, seed=seed) for p in params]
        return self.sampler.generate(ids, len(params), params, progress=progress)

    def _draw_again(
        self,
        plan: StepPlan,
        groups: list[list[Rollout]],
        superseded: list[list[bool]],
        round_: int,
    ) -> None:
        """Other samples beside the truncated ones, which are kept for the record."""
        for again in range(1, self.config.groups.truncated_rounds + 1):
            cut = [
                [i for i, r in enumerate(group) if r.finish_reason == "length" and not old[i]]
                for group, old in zip(groups, superseded, strict=True)
            ]
            if not any(cut):
                return
            # Each in the setting of the sample that it replaces: the shares of a mixture hold.
            for number, setting in enumerate(dict.fromkeys(plan.params)):
                seed = step_seed(self.config.train.seed, plan.step, round_, again, number)
                self._replace(groups, superseded, cut, replace(setting, seed=seed))

    def _replace(
        self,
        groups: list[list[Rollout]],
        superseded: list[list[bool]],
        cut: list[list[int]],
        params: SamplingParams,
    ) -> None:
        """One sample more for each of `cut` that was drawn with `params`, whatever its seed."""
        old = [
            [i for i in samples if replace(group[i].params, seed=params.seed) == params]
            for group, samples in zip(groups, cut, strict=True)
        ]
        chosen = [g for g, samples in enumerate(old) if samples]
        prompts = [groups[g][0].prompt_ids for g in chosen]
        drawn = self.sampler.generate(prompts, [len(old[g]) for g in chosen], params)
        for g, rollouts in zip(chosen, drawn, strict=True):
            for i in old[g]:
                superseded[g][i] = True
            groups[g] += rollouts
            superseded[g] += [False] * len(rollouts)

    def _add_anchors(
        self, plan: StepPlan, origins: Sequence[Origin], groups: list[list[Rollout]]
    ) -> list[int]:
        """Puts a wrong answer at the end of some groups; returns which."""
        config, seed = self.config.anchors, self.config.train.seed
        samples = sum(map(len, groups))
        chosen = choose_groups(len(groups), samples, config.share, seed, plan.step)
        for g in chosen:
            task = origins[g].task
            text = anchor_text(
                self.train.tasks[task].columns
                | {self.config.data.answer_column: self._answers[task]},
                config.column,
                self.config.data.answer_column,
                self._answers,
                seed=seed,
                step=plan.step,
                task=task,
            )
            groups[g].append(self._anchor(groups[g][0], text))
        return chosen

    def _anchor(self, sibling: Rollout, text: str) -> Rollout:
        ids = self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, *sorted(self.sampler.eos_ids)[:1]]
        # It was not sampled, and is never trained on.
        unknown = torch.full((len(ids),), float("nan"))
        return replace(
            sibling,
            completion_ids=ids,
            logp_sampler=unknown,
            logp_processed=unknown,
            finish_reason="stop",
        )

    def _fingerprints(
        self, plan: StepPlan, origin: Origin, group: Sequence[Rollout]
    ) -> list[Fingerprint]:
        """[G]; what a sampler of another make mixes up is seen in its rollouts."""
        seen = [(tuple(r.prompt_ids), r.policy_version, r.params.max_tokens) for r in group]
        made = {
            (ids, version, budget): Fingerprint(
                short_hash(ids),
                f"{self.train.path}:{origin.row}",
                version,
                plan.adapter,
                self.scorer.version,
                plan.sampling,
                budget,
            )
            for ids, version, budget in set(seen)
        }
        return [made[conditions] for conditions in seen]
