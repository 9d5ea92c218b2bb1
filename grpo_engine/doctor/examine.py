"""A run as it would begin: one group, its checks, its rewards' probes, a pilot."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..clock import Clock
from ..collect import Collector
from ..config import RunConfig
from ..errors import UserError
from ..groups.batch import Batch
from ..groups.make import make_batch
from ..groups.rules import Rules
from ..parts import Parts, load_parts
from . import advice, pilot
from .arithmetic import check_arithmetic
from .checks import FAIL, Check
from .pilot import Pilot
from .policy import EXACT_GAP, MOST_GAP, check_bos, check_ends, check_logprobs, check_tail, logprobs
from .probes import check_probes, probe
from .show import group_lines

FIRST_STEP = 1


@dataclass
class Examination:
    """Used as a context: the reward workers end with it."""

    config: RunConfig
    parts: Parts
    collector: Collector
    batch: Batch
    """the first group of the first step, as training would draw it"""

    @classmethod
    def of(cls, config: RunConfig) -> "Examination":
        """Loads what training would and samples one group. Raises UserError as training would."""
        parts = load_parts(config, None)
        try:
            # One group is too few for anchors to keep their share of it.
            alone = replace(config, anchors=replace(config.anchors, share=0.0))
            collector = Collector(alone, parts)
            batch, _ = _sampled(collector, 1)
        except BaseException:
            parts.scorer.close()
            raise
        return cls(config, parts, collector, batch)

    def __enter__(self) -> "Examination":
        return self

    def __exit__(self, *_: object) -> None:
        self.parts.scorer.close()

    @property
    def rules(self) -> Rules:
        """What decides who counts."""
        return self.collector.rules

    def group_lines(self) -> Iterator[str]:
        """The group, for a person."""
        return group_lines(self.batch, self.parts.policy.tokenizer)

    def checks(self) -> list[Check]:
        """Those of the group and of the config's statistics."""
        policy, config = self.parts.policy, self.config
        origin, rollouts = self.batch.origins[0], self.batch.rollouts
        prompt, ids = self.parts.train.prompt(origin.task, origin.variant), rollouts[0].prompt_ids
        own = config.model.reference is not None
        dropout = 0.0 if config.lora is None else config.lora.dropout
        exact = config.model.dtype == "float32" and config.model.base == "none"
        gap = EXACT_GAP if exact else MOST_GAP
        found = logprobs(policy, rollouts, config.train.token_budget)
        return [
            *check_logprobs(found, most_gap=gap, dropout=dropout, own_reference=own),
            check_bos(policy.tokenizer, prompt, ids),
            check_tail(policy, prompt, ids),
            check_ends(rollouts, self.parts.sampler.eos_ids, prompt, policy.tokenizer),
            *check_arithmetic(self.rules),
        ]

    def probe(self, tasks: int) -> list[Check]:
        """Completions that are no answers to the first `tasks` tasks of the data."""
        chosen = range(len(self.parts.train.tasks))[:tasks]
        column, most = self.config.data.answer_column, self.config.sampling.max_tokens
        try:
            found = probe(self.parts.scorer, self.parts.train, chosen, column, self.rules, most)
        except UserError as error:
            return [Check("probes", FAIL, str(error))]
        return list(check_probes(found))

    def pilot(self, prompts: int) -> Pilot:
        """So many prompts of the data, or all, sampled once as for the first step."""
        batch, seconds = _sampled(self.collector, min(prompts, len(self.parts.train.tasks)))
        return pilot.figures(batch, seconds, self.config.groups.correct_at)

    def pilot_lines(self, found: Pilot) -> Iterator[str]:
        """The pilot's figures, and first guesses at group size and temperature."""
        yield f"pilot of {found.groups} prompts, not trained on:"
        yield from pilot.pilot_lines(found)
        params = self.collector.rounds.plan(FIRST_STEP).params
        now = sum(p.temperature for p in params) / len(params)
        size, right = len(params), self.config.groups.correct_at
        yield from advice.advice_lines(found, size, now, right)


@torch.no_grad()
def _sampled(collector: Collector, prompts: int) -> tuple[Batch, float]:
    """A batch of the first step's first prompts, and the seconds of sampling and rewards."""
    clock = Clock()
    plan = collector.rounds.plan(FIRST_STEP)
    draw = collector.prompts.draw(FIRST_STEP, prompts)
    samples = collector.rounds.sample(plan, draw, 0, 0, clock, _ignore)
    return make_batch(samples, collector.rules), sum(clock.ms.values()) / 1000


def _ignore(drawn: int, most: int) -> None:
    """No progress is shown."""
