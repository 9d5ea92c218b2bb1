"""The loop: sample groups, reward, advantages, micro-batches, log-probs, loss, step.

All randomness is a function of the seed and the number of the step. So a checkpoint needs no state
of a generator, and a step that was dropped is made again as it would have been.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import (
    Checkpoint,
    is_saved,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    write_folder,
)
from .clock import Clock
from .collect import Collector, step_seed
from .config import RunConfig
from .display import Display
from .errors import UserError
from .forward import causal_lm, context_length
from .groups import Batch, batch_from_json, batch_to_json, micro_batches
from .learn import MicroBatches, accumulate_gradient, score_logprobs
from .ledger import Ledger
from .metrics import step_metrics
from .model import load_policy
from .optim import Optimizer, learning_rate
from .resume import check_same_config, check_same_data, check_same_policy, probe
from .signals import StopSignals

SKIPS_BEFORE_STOP = 5


@dataclass
class State:
    """Where the run stands after its last whole step."""

    step: int = 0
    drawn: int = 0
    """tasks taken from the stream"""
    iteration: int = 0
    """optimiser steps made on `batch`"""
    batch: Batch | None = None
    """a generation that is not used up"""
    skipped: int = 0
    skipped_in_row: int = 0
    evaluated: int | None = None
    """the step of the last evaluation"""
    eval_before: float | None = None
    eval_last: float | None = None


class Trainer:
    """A run of `grpo train`: `Trainer(config).run()`."""

    def __init__(self, config: RunConfig, *, resume: bool = False) -> None:
        self.config, self.options = config, config.loss
        self.ledger = Ledger(Path(config.train.out))
        checkpoint = None
        if resume:
            checkpoint = self._newest_checkpoint()
        else:
            self.ledger.create()
        _seed_everything(config.train.seed, 0)
        self.policy = load_policy(
            config.model,
            config.lora,
            needs_reference=config.loss.beta > 0,
            resume=checkpoint and checkpoint.folder / config.weights_name,
        )
        if config.train.gradient_checkpointing:
            causal_lm(self.policy.model).gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.collector = Collector(config, self.policy)
        self._check_budget()
        self.optimizer = Optimizer(self.policy.trainable(), config.train)
        self.state = State()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.ledger.write_header(config, self.policy.device)
        self.signals = StopSignals()
        self.display = Display(self.state.step, config.train.steps)
        self._changing = False  # weights and state disagree: not a moment to save
        self._unwritten: dict[str, Any] | None = None  # metrics of the last step

    def run(self) -> State:
        """All steps that are left, then the adapter or model in its final folder.

        A signal raises Interrupted and an error is passed on, both after a checkpoint of the last
        whole step. Raises UserError if the disk fails.
        """
        with self.signals, self.display:
            try:
                self._loop()
            except BaseException as error:
                disk = self._rescue() or error
                if isinstance(disk, OSError):
                    raise UserError(
                        f"can't write to {self.ledger.out}: {disk}; make room there, then go on "
                        "from the newest checkpoint with --resume"
                    ) from error
                raise
        return self.state

    def step(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics."""
        _seed_everything(self.config.train.seed, self.state.step + 1)
        clock = Clock()
        fresh = self.state.batch is None
        batch = self._sample_and_reward(clock) if fresh else self.state.batch
        micros = self._micro_batches(batch)
        if fresh:
            self._score(batch, micros, clock)
        self.optimizer.zero_grad()
        with clock("train"):
            learned = accumulate_gradient(self.policy.model, batch, micros, self.options)
        with self.signals.shield():
            self._changing = True
            learned |= self._update(learned, clock)
            self._commit(batch, fresh, skipped=bool(learned["skipped"]))
            self._changing = False
            self._unwritten = step_metrics(self.state.step, batch, micros, learned, clock)
        if not learned["tokens"]:
            self.display.say(
                f"step {self.state.step}: nothing to learn from: of {len(batch.rollouts)} samples "
                f"{int(batch.in_loss.sum())} are in the loss, of {len(batch.signal)} groups "
                f"{int(batch.signal.sum())} carry signal"
            )
        return self._unwritten

    def _loop(self) -> None:
        train, state = self.config.train, self.state
        self._evaluate_if_due()
        while state.step < train.steps:
            metrics = self.step()
            self._evaluate_if_due()
            self._write_metrics()
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
        with self.signals.shield():
            write_folder(self.ledger.out / self.config.weights_name, self.policy.save)

    def _rescue(self) -> OSError | None:
        """Saves the last whole step; returns the error of the disk if that is not possible."""
        if self._changing:
            return None
        try:
            with self.signals.shield():
                self._write_metrics()
                self._save()
        except OSError as error:
            return error
        return None

    def _sample_and_reward(self, clock: Clock) -> Batch:
        state = self.state
        return self.collector.collect(
            state.step + 1, state.drawn, self.ledger, clock, self.display.sampling
        )

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        budget = self.config.train.token_budget
        return micro_batches(batch, budget, without_signal=self.options.beta > 0)

    def _score(self, batch: Batch, micros: MicroBatches, clock: Clock) -> None:
        """Old log-probs where the batch is used more than once, reference's where there is one."""
        with clock("score"):
            if self.config.train.num_iterations > 1:
                batch.old_logp = score_logprobs(self.policy.model, batch, micros)
            if self.policy.reference is not None:
                # A signal between switching adapters and back would leave a policy of both.
                with self.signals.shield(), self.policy.reference() as reference:
                    batch.ref_logp = score_logprobs(reference, batch, micros)

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
        state.drawn += len(batch.task_rows) if fresh else 0
        state.iteration += 1
        used_up = state.iteration == self.config.train.num_iterations
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
            self.collector.sampler.update_policy()

    def _evaluate_if_due(self) -> None:
        """Before the first step, every so often and after the last; once a step, resumed or not."""
        state, train = self.state, self.config.train
        due = state.step % train.eval_every == 0 or state.step == train.steps
        if not due or state.evaluated == state.step or self.collector.heldout is None:
            return
        clock = Clock()
        with clock("evaluate"):
            reward = self.collector.evaluate(state.step, self.display.sampling)
        with self.signals.shield():
            state.evaluated, state.eval_last = state.step, reward
            if state.step == 0:
                state.eval_before = reward
            # A step that was resumed from has its line already; it gets one for the evaluation.
            line = self._unwritten or {"step": state.step, "time_ms": {}}
            line["eval_reward"] = reward
            line["time_ms"] |= clock.ms
            self._unwritten = line
            self._write_metrics()
        self.display.say(f"step {state.step}: held-out reward {reward:.3f}")

    def _write_metrics(self) -> None:
        with self.signals.shield():
            if self._unwritten is not None:
                self.ledger.metrics(self._unwritten)
                self._unwritten = None

    def _save(self) -> None:
        state = self.state
        if is_saved(self.ledger.checkpoints, state.step):
            return
        tensors, optimizer = self.optimizer.state()
        values = {
            "state": {**vars(state), "batch": state.batch and batch_to_json(state.batch)},
            "policy_version": self.collector.sampler.policy_version,
            "optimizer": optimizer,
            "config": self.config.to_dict(),
            "data": self.collector.data_hash,
            "probe": self._probe(),
        }
        with self.signals.shield():
            save_checkpoint(
                self.ledger.checkpoints,
                state.step,
                values,
                tensors,
                lambda folder: self.policy.save(folder / self.config.weights_name),
                self.config.train.keep_checkpoints,
            )

    def _newest_checkpoint(self) -> Checkpoint | None:
        """None for a run that was stopped before its first: it begins again."""
        found = list_checkpoints(self.ledger.checkpoints)
        if not found:
            if not self.ledger.holds_run():
                raise UserError(f"{self.ledger.out} holds no run to resume: leave out --resume")
            self.ledger.rewind(-1)
            return None
        checkpoint = load_checkpoint(found[-1])
        check_same_config(checkpoint.values["config"], self.config.to_dict())
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        values = checkpoint.values
        check_same_data(values["data"], self.collector.data_hash)
        check_same_policy(values["probe"], self._probe(), causal_lm(self.policy.model).dtype)
        try:
            self.state = State(**values["state"])
        except TypeError as error:
            raise UserError(
                f"{checkpoint.folder} was written by another version of grpo-engine ({error})"
            ) from error
        if self.state.batch is not None:
            self.state.batch = batch_from_json(values["state"]["batch"])
        self.collector.sampler.policy_version = values["policy_version"]
        self.optimizer.load(checkpoint.tensors, values["optimizer"])
        self.ledger.rewind(self.state.step)

    def _probe(self) -> list[float]:
        return probe(self.policy.model, self.collector.train.ids[0])

    def _check_budget(self) -> None:
        longest = max(map(len, self.collector.train.ids)) + self.config.sampling.max_tokens
        longest = min(longest, context_length(self.policy.model) or longest)
        if longest > self.config.train.token_budget:
            raise UserError(
                f"train.token_budget {self.config.train.token_budget} is below the longest prompt "
                f"and sampling.max_tokens together: set it to at least {longest}"
            )


def _seed_everything(seed: int, step: int) -> None:
    bits = step_seed(seed, step)
    torch.manual_seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    random.seed(bits)
