"""From tasks to a batch: prompts are drawn, groups sampled, completions rewarded and judged."""

from typing import Any

import torch

from .clock import Clock
from .config import RunConfig
from .curriculum.bands import PassRates
from .curriculum.draw import Draw, PromptDraw
from .curriculum.replay import OldSample, Replay
from .data import TaskStream
from .groups.batch import Batch
from .groups.make import Samples, judge_samples, make_batch
from .groups.preprocess import PercentileWindow
from .groups.rules import Rules
from .groups.states import BUDGET, TRUNCATED
from .ledger import Ledger
from .parts import Parts, check_decider
from .prompts import decode_all
from .rollout import Rollout, SamplingParams
from .rollout_table import Asked
from .rounds import Rounds
from .sampler import Progress
from .taskset import score_answers


class Collector:
    """Makes the batches of a run; what a batch changes for later ones waits for `commit`."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config, self.parts, self.train = config, parts, parts.train
        self.rounds = Rounds(config, parts)
        self.rules = Rules(config.scoring, config.groups, config.loss)
        curriculum, seed = config.curriculum, config.train.seed
        self.rates = PassRates(curriculum.easy_at, curriculum.hard_at, curriculum.newest_weight)
        stream = TaskStream(len(self.train.tasks), seed)
        self.prompts = PromptDraw(len(self.train.tasks), seed, curriculum, self.rates, stream)
        self.window = PercentileWindow(config.scoring.clip_window)
        self.old = Replay(config.replay)
        self._pending: tuple[int, list[Draw], Batch, PercentileWindow] | None = None

    def collect(self, step: int, ledger: Ledger, clock: Clock, progress: Progress) -> Batch:
        """The generation of `step`: what was committed, the seed and the step decide it."""
        with clock("record"):
            plan = self.rounds.plan(step)
        draws: list[Draw] = []
        parts: list[Samples] = []
        without_signal: list[bool] = []
        wanted = self.config.train.prompts_per_step
        while wanted:
            draw = self.prompts.draw(step, wanted, draws)
            if not draw.prompts:
                break  # every task has been drawn in this step
            first = sum(len(part.origins) for part in parts)
            parts.append(self.rounds.sample(plan, draw, len(draws), first, clock, progress))
            draws.append(draw)
            wanted = 0
            if self.config.groups.no_signal == "resample":
                with clock("reward"):
                    causes = judge_samples(parts[-1], self.rules).causes
                    without_signal += [cause is not None for cause in causes]
                    wanted = self._still_wanted(without_signal)
        with clock("reward"):
            window = self.window.copy()
            discarded = self._discarded(without_signal) if without_signal else None
            batch = make_batch(Samples.join(parts), self.rules, window, discarded)
        check_decider(self.config, self.parts.scorer)  # it may have returned parts
        self._pending = step, draws, batch, window
        with clock("record"):
            ids = [r.completion_ids for r in batch.rollouts]
            tokenizer = self.parts.policy.tokenizer
            completions = decode_all(tokenizer, ids, skip_special_tokens=False)
            ledger.samples(step, batch, self._asked(batch), completions)
        return batch

    def commit(self) -> None:
        """The batch was used: its prompts had their turn, its rewards move the pass rates."""
        if self._pending is None:
            return
        step, draws, batch, self.window = self._pending
        self._pending = None
        self.prompts.commit(step, draws)
        offsets, correct_at = batch.cu_groups.tolist(), self.config.groups.correct_at
        for g, origin in enumerate(batch.origins):
            span = range(offsets[g], offsets[g + 1])
            decided = batch.decided_of(span)
            cause = _failure(batch, span, decided, g, correct_at)
            self.rates.update(origin.task, decided, correct_at, cause)

    def retire(self, batch: Batch) -> None:
        """The batch is used up: from now on its samples are old ones."""
        self.old.add(_old_samples(batch, self.config.groups.correct_at))

    def difficulty(self) -> dict[str, Any]:
        """Tasks by band, and by why their last group failed that did."""
        bands = self.rates.counts(len(self.train.tasks))
        return {"bands": bands, "failure_causes": self.rates.causes()}

    def old_samples(self, step: int, new: int) -> list[OldSample]:
        """Those that serve beside the `new` samples of a step, with the reward of now."""
        self._score_again(step)
        return self.old.choose(
            round(self.config.replay.share * new),
            self.parts.sampler.policy_version,
            self.parts.scorer.version,
            seed=self.config.train.seed,
            step=step,
        )

    def _score_again(self, step: int) -> None:
        """Old samples whose reward is of another version: the function was changed on the way."""
        version = self.parts.scorer.version
        stale = self.old.stale(self.parts.sampler.policy_version, version)
        if not stale:
            return
        tasks = [sample.task for sample in stale]
        prompts = [self.train.prompt(task) for task in tasks]
        groups = [[_as_rollout(sample)] for sample in stale]
        _, scores = score_answers(self.parts.scorer, self.train, tasks, prompts, groups, step)
        lengths = [len(sample.completion_ids) for sample in stale]
        floor = self.config.scoring.floor
        rewards = scores.rewards(lengths, floor)
        decided = scores.prepared(lengths).decided(scores.decider, floor)
        for sample, reward, number in zip(stale, rewards, decided, strict=True):
            right = bool(number >= self.config.groups.correct_at)
            self.old.rescored(sample, reward, right, version)

    def _asked(self, batch: Batch) -> list[Asked]:
        decode, train = self.parts.policy.tokenizer.decode, self.train
        firsts = batch.cu_groups.tolist()[:-1]
        return [
            Asked(
                decode(batch.rollouts[first].prompt_ids),
                train.prompt(origin.task, origin.variant),
                train.columns(origin.task),
            )
            for first, origin in zip(firsts, batch.origins, strict=True)
        ]

    def _still_wanted(self, without_signal: list[bool]) -> int:
        """Prompts that are to be drawn in place of groups without signal."""
        config = self.config
        count = config.train.prompts_per_step
        missing = count - without_signal.count(False)
        left = int(count * (1 + config.groups.most_extra)) - len(without_signal)
        return max(0, min(missing, left))

    def _discarded(self, without_signal: list[bool]) -> list[bool]:
        """Groups in whose place others stand: none if no other carries signal either."""
        others = len(without_signal) > self.config.train.prompts_per_step
        return [others and lost and not all(without_signal) for lost in without_signal]

    def state(self) -> dict[str, Any]:
        """Plain values from which `load` goes on."""
        return {
            "prompts": self.prompts.state(),
            "rates": self.rates.state(),
            "window": self.window.values,
            "old": self.old.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self.prompts.load(state["prompts"])
        self.rates.load(state["rates"])
        self.window.values = list(state["window"])
        self.old.load(state["old"])


def _old_samples(batch: Batch, correct_at: float) -> list[OldSample]:
    """What may serve again: whole samples that were in the loss."""
    group = batch.group_of_sample().tolist()
    return [
        OldSample(
            batch.origins[group[i]].task,
            r.prompt_ids,
            r.completion_ids,
            r.params.temperature,
            float(batch.rewards[i]),
            bool(batch.decided[i] >= correct_at),
            r.policy_version,
            str(batch.fingerprint["reward_version"]),
        )
        for i, r in enumerate(batch.rollouts)
        if batch.in_loss[i] and r.completion_ids
    ]


def _as_rollout(sample: OldSample) -> Rollout:
    """For the reward functions; its log-probs of then are not kept."""
    params, none = SamplingParams(temperature=sample.temperature), torch.empty(0)
    ids = sample.prompt_ids, sample.completion_ids
    return Rollout(*ids, none, none, "stop", 0, 0, params, sample.policy_version)


def _failure(
    batch: Batch, span: range, decided: list[float], group: int, correct_at: float
) -> str | None:
    """Why a group has no right answer; None if it has one."""
    if any(number >= correct_at for number in decided):
        return None
    if all(batch.states[i] in (TRUNCATED, BUDGET) for i in span if not batch.anchors[i]):
        return TRUNCATED
    return batch.signal_causes[group] or "wrong"
