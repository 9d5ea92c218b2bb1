"""Calls the reward functions of a step, each where it runs, and puts their answers side by side."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..sample_config import ComponentConfig, ScoringConfig
from .builtin.ensemble import combine_members
from .decider import find_decider
from .here import call_here
from .load import Reward, version_of
from .loop import LoopThread
from .process import check_steps
from .protocol import EnvFailed
from .total import Components, StepRows, prepare_components
from .workers import Job, Outcome, WorkerPool


@dataclass
class Scores:
    """What the reward functions said of the samples of a step."""

    components: dict[str, list[float | None]]
    """[S] each, as returned. None: not applicable, which is not the same as 0"""
    failures: list[str | None]
    """[S] why a reward call failed for this sample, which makes it invalid"""
    env_failures: list[str | None]
    """[S] why its environment failed"""
    steps: dict[str, StepRows] = field(default_factory=dict)
    """[S] each, of functions that reward steps of a completion; `components` has their means"""
    configs: dict[str, ComponentConfig] = field(default_factory=dict)
    """by component"""
    decider: str | None = None
    """the component that says whether an answer is right; None: there is none"""

    def prepared(self, lengths: Sequence[int]) -> Components:
        """As numbers that can be summed; lengths: [S] tokens of the completions."""
        return prepare_components(self.components, self.steps, self.configs, lengths)

    def rewards(self, lengths: Sequence[int], floor: float) -> list[float | None]:
        """Weighted sums; None where no reward applies, or a call or an environment failed."""
        totals = self.prepared(lengths).total(floor).tolist()
        failed = zip(self.failures, self.env_failures, strict=True)
        return [
            None if any(causes) or math.isnan(total) else total
            for total, causes in zip(totals, failed, strict=True)
        ]

    @classmethod
    def join(cls, parts: "Sequence[Scores]") -> "Scores":
        """Those of several draws, in order."""
        joined = cls({}, [], [])
        for part in parts:
            samples, before = len(part.failures), len(joined.failures)
            for mine, theirs in (
                (joined.components, part.components),
                (joined.steps, part.steps),
            ):
                for name in mine | theirs:  # in order of appearance: sums depend on it
                    rows = mine.setdefault(name, [None] * before)
                    rows.extend(theirs.get(name, [None] * samples))
            joined.failures += part.failures
            joined.env_failures += part.env_failures
            joined.configs |= part.configs
            joined.decider = part.decider
        return joined


class Scorer:
    """Reward functions with the workers that run them; usable without a trainer of ours.

    `Scorer([reward_of(f), *load_rewards(...)]).score(arguments, columns)`; close it after use.
    """

    def __init__(self, rewards: Sequence[Reward], scoring: ScoringConfig | None = None) -> None:
        self.rewards = list(rewards)
        self.scoring = scoring or ScoringConfig()
        self.version = version_of(self.rewards, self.scoring)
        self.decider = find_decider(self.rewards)
        """the component that says whether an answer is right; None: there is none"""
        self.failed = 0
        """calls that failed so far, counted by sample"""
        self._seen: set[str] = set()  # rewards that have answered
        self._leaves = [m for r in self.rewards for m in (r.members or (r,))]
        self._isolated = [leaf for leaf in self._leaves if leaf.spec is not None]
        self._loop = LoopThread()
        self._pool = None
        if self._isolated:
            specs = [leaf.spec for leaf in self._isolated]
            self._pool = WorkerPool(specs, self.scoring.workers, self.scoring.calls_per_worker)
        self.named = self._named_arguments()
        """arguments that a function names; of PASSED_WHEN_NAMED no others need to be there"""

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """Workers that were replaced so far."""
        return self._pool.restarts if self._pool is not None else 0

    def _named_arguments(self) -> set[str]:
        here = [leaf.function for leaf in self._leaves if leaf.spec is None]
        signatures = [inspect.signature(function) for function in here]
        if self._pool is not None:
            signatures += self._pool.signatures
        return {name for signature in signatures for name in signature.parameters}

    def close(self) -> None:
        """Ends the workers."""
        self._loop.close()
        if self._pool is not None:
            self._pool.close()

    def score(self, arguments: dict[str, Any], columns: dict[str, list]) -> Scores:
        """Calls every function for all samples; a call that fails makes its sample invalid.

        arguments: lists over the samples under the names of `protocol.RESERVED` (`step` is a
        number). columns: the other columns of the data, one value a sample.
        Raises UserError if a function returns no list of the right length, or if more than
        `max_failed` of the samples failed.
        """
        count = self._check_arguments(arguments, columns)
        outcomes = self._call_all(arguments, columns, count)
        scores = Scores({}, [None] * count, [None] * count)
        for reward in self.rewards:
            given = outcomes[id(reward)] if not reward.members else self._combined(reward, outcomes)
            _enter(scores, reward, given, arguments["completion_ids"])
            self._check_parts(scores, reward, given)
        self._check_failures(scores, count)
        scores.decider = self.decider
        return scores

    def _check_arguments(self, arguments: dict[str, Any], columns: dict[str, list]) -> int:
        """The number of samples."""
        given = arguments | columns
        for name in ("completions", "completion_ids"):
            if name not in given:
                raise UserError(f"the rewards need {name}: a list over the samples")
        count = len(given["completions"])
        for name, values in given.items():
            if isinstance(values, list) and len(values) != count:
                raise UserError(f"{name} has {len(values)} values for {count} completions")
        for leaf in self._leaves:
            for column in leaf.renames.values():
                if column not in given:
                    raise UserError(f"the reward {leaf.name} needs the column {column!r}")
        return count

    def _call_all(
        self, arguments: dict[str, Any], columns: dict[str, list], count: int
    ) -> dict[int, Outcome]:
        jobs, most = [], int(self.scoring.max_failed * count)
        for index, leaf in enumerate(self._isolated):
            jobs.append(
                Job(
                    index,
                    leaf.name,
                    arguments | columns,
                    count,
                    leaf.config.timeout_s,
                    split=not leaf.config.compares,
                    most_failures=most,
                )
            )
        outcomes = self._pool.call(jobs) if jobs else []
        found = {id(leaf): o for leaf, o in zip(self._isolated, outcomes, strict=True)}
        for leaf in self._leaves:
            if leaf.spec is None:
                found[id(leaf)] = call_here(leaf, arguments | columns, count, self._loop, most)
        return found

    def _combined(self, reward: Reward, outcomes: dict[int, Outcome]) -> Outcome:
        members = [outcomes[id(member)] for member in reward.members]
        for member, outcome in zip(reward.members, members, strict=True):
            for value in outcome.values:
                if not (value is None or isinstance(value, float)):
                    raise UserError(
                        f"the reward {member.name} is a member of an ensemble and must return "
                        f"plain numbers; given {str(value)[:40]!r}"
                    )
        options = reward.config.options
        values = combine_members(
            [m.values for m in members],
            rule=options.get("rule", "mean"),
            tolerance=options.get("tolerance", 0.0),
        )
        failures = [
            next((cause for cause in causes if cause is not None), None)
            for causes in zip(*(m.failures for m in members), strict=True)
        ]
        return Outcome(values, failures)

    def _check_parts(self, scores: Scores, reward: Reward, outcome: Outcome) -> None:
        """A component that the config has keys for is there, or a gate on it would never close."""
        answered = [v for v in outcome.values if v is not None and not isinstance(v, EnvFailed)]
        if not answered or reward.name in self._seen:
            return
        self._seen.add(reward.name)
        if reward.name == self.decider and reward.name not in scores.components:
            self._no_single_number(reward, scores)
        for part in reward.config.components:
            if f"{reward.name}.{part}" not in scores.components:
                raise UserError(
                    f"rewards: components of {reward.name} has keys for {part}, which the function "
                    "did not return (None is for where it does not apply); is the name right?"
                )

    def _no_single_number(self, reward: Reward, scores: Scores) -> None:
        """The reward that was to decide returned parts, of which none is named."""
        self.decider = None
        if reward.config.decides:
            parts = [name for name in scores.components if name.startswith(f"{reward.name}.")]
            raise UserError(
                f"rewards: {reward.name} has decides: true and returned {', '.join(parts)}: say "
                "it of one of them, as components: {NAME: {decides: true}}"
            )

    def _check_failures(self, scores: Scores, count: int) -> None:
        causes = [cause for cause in scores.failures if cause is not None]
        self.failed += len(causes)
        if len(causes) > self.scoring.max_failed * count:
            raise UserError(
                f"{len(causes)} of {count} samples of this step have no reward: {causes[0]}; "
                "mend the function, or raise scoring.max_failed"
            )
        applies = [x for column in scores.components.values() for x in column if x is not None]
        if count and not applies and not causes and not any(scores.env_failures):
            names = ", ".join(reward.name for reward in self.rewards)
            raise UserError(
                f"no sample of this step has a reward: {names} returned None for all {count}; "
                "does the function know these prompts?"
            )


def _enter(
    scores: Scores, reward: Reward, outcome: Outcome, completion_ids: Sequence[Sequence[int]]
) -> None:
    for i, (value, failure) in enumerate(zip(outcome.values, outcome.failures, strict=True)):
        if failure is not None:
            scores.failures[i] = scores.failures[i] or f"the reward {reward.name} {failure}"
        elif isinstance(value, EnvFailed):
            scores.env_failures[i] = scores.env_failures[i] or value.cause
        elif isinstance(value, dict):
            for part, number in value.items():
                _enter_number(scores, reward, part, number, i)
        elif isinstance(value, list):
            rewards = [step.reward for step in value]
            mean = sum(rewards) / len(rewards) if rewards else None
            _enter_number(scores, reward, None, mean, i)
            if all(map(math.isfinite, rewards)):
                check_steps(value, len(completion_ids[i]), reward.name, i)
                rows = scores.steps.setdefault(reward.name, [None] * len(scores.failures))
                rows[i] = value
        else:
            _enter_number(scores, reward, None, value, i)


def _enter_number(
    scores: Scores, reward: Reward, part: str | None, number: float | None, sample: int
) -> None:
    name = reward.name if part is None else f"{reward.name}.{part}"
    if name not in scores.components:
        scores.components[name] = [None] * len(scores.failures)
        scores.configs[name] = reward.config.component(part)
    if number is not None and not math.isfinite(number):
        scores.failures[sample] = f"the reward {name} returned {number}"
    else:
        scores.components[name][sample] = number
