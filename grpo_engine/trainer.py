"""The loop: sample groups, reward, advantages, micro-batches, log-probs, loss, step.

All randomness is a function of the seed and the number of the step. So a checkpoint needs no state
of a generator, and a step that was dropped is made again as it would have been.
"""

from contextlib import suppress
from typing import Any

import numpy as np

from .clock import Clock
from .collect import Collector
from .config import RunConfig
from .disk import DiskError, write_folder
from .display import Display
from .errors import Interrupted, UserError, first_line
from .evaluate import evaluate, evaluation_line, evaluation_metrics
from .groups.batch import Batch, micro_batches
from .groups.nothing import nothing_learned
from .guards import Alarm
from .kernels.options import GRPOOptions
from .learn import MicroBatches, accumulate_gradient, score_logprobs
from .ledger import Ledger
from .metrics import step_metrics
from .optim import Optimizer, learning_rate
from .parts import NO_DECIDER, load_parts, over_context
from .replay_loss import accumulate_replay
from .saving import Saver, State, newest_checkpoint, resumed, with_now
from .seeds import seed_everything
from .signals import StopSignals
from .watch import Watch

SKIPS_BEFORE_STOP = 5


class Trainer:
    """A run of `grpo train`: `Trainer(config).run()`."""

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        self.config = config
        self.ledger = Ledger(config.out, tensorboard=config.train.tensorboard)
        self.lock = self.ledger.lock(resume)
        try:
            self._open(resume)
        except BaseException:
            self.lock.release()
            raise

    def _open(self, resume: bool) -> None:
        self.config = config = with_now(self.config, resume=resume)
        checkpoint = None
        if resume:
            checkpoint = newest_checkpoint(self.ledger, config.to_dict())
        else:
            self.ledger.create()
        seed_everything(config.train.seed, 0)
        resume_from = checkpoint and checkpoint.folder / config.weights_name
        self.parts = load_parts(config, resume_from)
        self.policy, self.sampler = self.parts.policy, self.parts.sampler
        self.collector = Collector(config, self.parts)
        self.watch = Watch(config)
        self.optimizer = Optimizer(self.policy.trainable(), config.train)
        self.saver = Saver(
            config, self.ledger, self.parts, self.collector, self.watch, self.optimizer
        )
        self.state = State() if checkpoint is None else self.saver.restore(checkpoint)
        versions = {r.name: r.version for r in self.parts.scorer.rewards}
        self.ledger.write_header(config, self.policy.device, versions)
        self.signals = StopSignals()
        self.display = Display(self.state.step, config.train.steps)
        if resume:
            self.display.say(resumed(checkpoint, config.train.steps))
        for said in filter(None, (self.lock.warning, over_context(config, self.parts))):
            self.display.say(said)
        if checkpoint and checkpoint.values["reward_version"] != self.parts.scorer.version:
            self.display.say("the reward functions changed since the checkpoint was written")
        self._changing = False  # weights and state disagree: not a moment to save
        self._counted: dict[str, int] = {}  # what failed up to the last line of metrics

    def run(self) -> State:
        """All steps that are left, then the adapter or model in its final folder.

        A signal raises Interrupted and an error is passed on, both after a checkpoint of the last
        whole step. Raises DiskError if that can't be written.
        """
        with self.lock, self.signals, self.display, self.parts:
            try:
                self._loop()
            except BaseException as error:
                unsaved = self._rescue(error)
                if unsaved and isinstance(error, Interrupted):
                    raise unsaved from error
                if unsaved and not isinstance(error, DiskError):
                    self.display.say(f"the last step could not be saved: {first_line(unsaved)}")
                raise
        return self.state

    def step(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics."""
        seed_everything(self.config.train.seed, self.state.step + 1)
        clock = Clock()
        fresh = self.state.batch is None
        batch = self._sample_and_reward(clock) if fresh else self.state.batch
        options = self.watch.loss_options(self.state.step + 1)
        micros = self._micro_batches(batch, options)
        if fresh:
            self._score(batch, micros, clock)
        self.optimizer.zero_grad()
        with clock("train"):
            learned = accumulate_gradient(self.policy.model, batch, micros, options)
            learned |= self._replay(batch)
        self.ledger.flush()  # a step whose samples can't be recorded is not made
        with self.signals.shield():
            self._changing = True
            learned |= self._update(learned, clock) | {"beta": options.beta}
            self._commit(batch, fresh, skipped=bool(learned["skipped"]))
            with clock("guard"):
                tasks = self.parts.kinds(batch.origins, self.config.data.task_column)
                right = self.config.groups.correct_at
                metrics = step_metrics(self.state.step, batch, micros, learned, clock, right, tasks)
                alarms = self.watch.observe(metrics)
            said = {"alarms": [name for alarm in alarms for name in alarm.guards]}
            self.state.unwritten = metrics | said | {"time_ms": clock.rounded()}
            self._count(self.state.unwritten)
            self._changing = False
        self._speak(batch, learned, alarms)
        return self.state.unwritten

    def _loop(self) -> None:
        train, state = self.config.train, self.state
        self._evaluate_if_due()
        self._write_metrics()
        self._audit_if_due()
        while state.step < train.steps and self.watch.stop is None:
            metrics = self.step()
            self._evaluate_if_due()
            self._write_metrics()
            self._audit_if_due()
            self.display.step(metrics)
            if state.skipped_in_row >= SKIPS_BEFORE_STOP:
                raise UserError(
                    f"{SKIPS_BEFORE_STOP} steps in a row had a loss or gradient that is not finite "
                    f"(last: step {state.step}); the weights are those from before them: lower "
                    "train.lr and go on with --resume"
                )
            if state.step % train.checkpoint_every == 0:
                self._save()
        self._save()
        for alarm in self.watch.finish(state.step):
            self.display.say(str(alarm))
        left = train.steps - state.step
        if self.watch.stop is not None and left > 0:
            self.display.say(
                f"stopped after step {state.step}, {left} of {train.steps} left: {self.watch.stop}"
            )
        with self.signals.shield():
            write_folder(self.ledger.out / self.config.weights_name, self.policy.save)

    def _rescue(self, error: BaseException) -> Exception | None:
        """Saves the last whole step after `error`; returns what makes that impossible."""
        if self._changing:
            return None
        self.signals.ignore()
        try:
            with suppress(DiskError):  # then the checkpoint holds them
                self._write_metrics()
            # CUDA's errors and want of memory, both RuntimeErrors, would be met again in a forward.
            self._save(probed=not isinstance(error, RuntimeError))
        except Exception as unsaved:
            return unsaved
        return None

    def _sample_and_reward(self, clock: Clock) -> Batch:
        return self.collector.collect(
            self.state.step + 1, self.ledger, clock, self.display.sampling
        )

    def _micro_batches(self, batch: Batch, options: GRPOOptions) -> MicroBatches:
        config = self.config
        every_group = options.beta > 0 or config.groups.no_signal == "keep"
        return micro_batches(batch, config.train.token_budget, without_signal=every_group)

    def _score(self, batch: Batch, micros: MicroBatches, clock: Clock) -> None:
        """Old log-probs where the batch is used more than once, reference's where there is one."""
        with clock("score"):
            if self.config.train.num_iterations > 1:
                batch.old_logp = score_logprobs(self.policy.model, batch, micros)
            if self.policy.reference is not None:
                # A signal between switching adapters and back would leave a policy of both.
                with self.signals.shield(), self.policy.reference() as reference:
                    batch.ref_logp = score_logprobs(reference, batch, micros)

    def _replay(self, batch: Batch) -> dict[str, float]:
        """The gradient of old samples, beside that of the batch."""
        config = self.config
        if config.replay.mode == "none":
            return {}
        old = self.collector.old_samples(self.state.step + 1, len(batch.rollouts))
        policy, budget = self.policy, config.train.token_budget
        loss = accumulate_replay(policy.model, policy.reference, old, config.replay, budget)
        return {"replay_loss": loss, "replay_samples": len(old)}

    def _update(self, metrics: dict[str, float], clock: Clock) -> dict[str, Any]:
        """The optimiser step, or none if loss or gradient is not finite."""
        train = self.config.train
        lr = learning_rate(self.state.step, self.config.lr, train)
        with clock("update"):
            norm = float(self.optimizer.clip(train.max_grad_norm))
            finite = np.isfinite([norm, metrics["loss"]]).all() and metrics["nonfinite"] == 0
            if finite:
                self.optimizer.step(lr)
        return {"grad_norm": norm, "lr": lr, "skipped": int(not finite)}

    def _commit(self, batch: Batch, fresh: bool, skipped: bool) -> None:
        state = self.state
        state.step += 1
        if fresh:
            self.collector.commit()
        state.iteration += 1
        used_up = state.iteration == self.config.train.num_iterations
        if used_up:
            self.collector.retire(batch)
        state.batch, state.iteration = (None, 0) if used_up else (batch, state.iteration)
        if skipped:
            state.skipped += 1
            state.skipped_in_row += 1
            self.display.say(
                f"step {state.step}: loss or gradient not finite, no update "
                f"({state.skipped} skipped so far)"
            )
        else:
            state.skipped_in_row = 0
            self.sampler.update_policy()

    def _speak(self, batch: Batch, learned: dict[str, Any], alarms: list[Alarm]) -> None:
        if not learned["tokens"]:
            why = nothing_learned(batch, self.config.groups)
            self.display.say(f"step {self.state.step}: nothing to learn from: {why}")
        if self.parts.scorer.decider is None and self.state.step == self.display.first_step + 1:
            self.display.say(f"the share of right answers is unknown: {NO_DECIDER}")
        for alarm in alarms:
            self.display.say(str(alarm))

    def _evaluate_if_due(self) -> None:
        """Before the first step, every so often and after the last; once a step, resumed or not."""
        state, train, parts = self.state, self.config.train, self.parts
        last = state.step == train.steps or self.watch.stop is not None
        due = last or state.step % train.eval_every == 0
        if not due or state.evaluated == state.step or parts.heldout is None:
            return
        clock = Clock()
        with clock("evaluate"):
            found = evaluate(parts, self.config, state.step, self.display.sampling)
        rewards = {name: answers.rewards for name, answers in found.items()}
        with self.signals.shield():
            compared = self.watch.evaluated(state.step, rewards)["reward"]
            state.evaluated, state.eval_last = state.step, compared
            state.eval_unscored = rewards["reward"].count(None)
            if state.step == 0:
                state.eval_before = compared
            # A step that was resumed from has its line already; it gets one for the evaluation.
            line = self.state.unwritten or {"step": state.step, "time_ms": {}}
            for name, answers in found.items():
                line |= evaluation_metrics(name, answers, self.config)
            line |= self.collector.difficulty()
            self._count(line)
            line["time_ms"] |= clock.rounded()
            self.state.unwritten = line
            self._write_metrics()
        self.display.say(
            f"step {state.step}: " + "  ".join(evaluation_line(name, line) for name in found)
        )
        if self.watch.early_stop.best_step == state.step and state.step > 0:
            self._save()

    def _count(self, line: dict[str, Any]) -> None:
        """Adds to a line what failed since the last one, and why the run ends, if it does."""
        scorer = self.parts.scorer
        totals = {"reward_failures": scorer.failed, "worker_restarts": scorer.restarts}
        for name, total in totals.items():
            line[name] = line.get(name, 0) + total - self._counted.get(name, 0)
        self._counted = totals
        if self.watch.stop is not None and self.state.step < self.config.train.steps:
            line["stopped"] = self.watch.stop

    def _audit_if_due(self) -> None:
        every, step = self.config.train.audit_every, self.state.step
        if every is None or step == 0 or step % every or self.ledger.has_audit(step):
            return
        path = self.ledger.audit(step, every)
        self.display.say(f"step {step}: highest rewards to look at: {path}")

    def _write_metrics(self) -> None:
        with self.signals.shield():
            if self.state.unwritten is not None:
                self.ledger.metrics(self.state.unwritten)
                self.state.unwritten = None

    def _save(self, probed: bool = True) -> None:
        self.saver.save(self.state, self.signals, probed=probed)
