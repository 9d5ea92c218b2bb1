"""Where a run stands, on disk: checkpoints written, found again and gone on from."""

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from .checkpoint import (
    Checkpoint,
    is_saved,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from .collect import Collector
from .config import RunConfig
from .errors import UserError
from .forward import causal_lm
from .groups.batch import Batch
from .groups.stored import batch_from_json, batch_to_json
from .ledger import Ledger
from .optim import Optimizer
from .parsing import load_run
from .parts import Parts
from .read_back import check_saved
from .resume import check_same_config, check_same_data, check_same_policy, check_same_prompt, probe
from .signals import StopSignals
from .watch import Watch


@dataclass
class State:
    """Where the run stands after its last whole step."""

    step: int = 0
    iteration: int = 0
    """optimiser steps made on `batch`"""
    batch: Batch | None = None
    """a generation that is not used up"""
    skipped: int = 0
    skipped_in_row: int = 0
    evaluated: int | None = None
    """the step of the last evaluation"""
    eval_before: float | None = None
    """held-out reward as it is compared, see `Watch.evaluated`"""
    eval_last: float | None = None
    eval_unscored: int = 0
    """answers without a reward in the last evaluation"""
    unwritten: dict[str, Any] | None = None
    """metrics of the last step, until they are in metrics.jsonl"""


@dataclass
class Saver:
    """Everything of a run that a checkpoint holds."""

    config: RunConfig
    ledger: Ledger
    parts: Parts
    collector: Collector
    watch: Watch
    optimizer: Optimizer
    read_back: bool = False
    """whether weights that this process saved were seen to load"""

    def save(self, state: State, signals: StopSignals, *, probed: bool = True) -> None:
        """Writes the checkpoint of this step if it is not there yet; DiskError if it can't be.

        probed: False where a forward may fail, after an error of the device.
        """
        if is_saved(self.ledger.checkpoints, state.step):
            return
        tensors, optimizer = self.optimizer.state()
        values = {
            "state": {**vars(state), "batch": state.batch and batch_to_json(state.batch)},
            "collector": self.collector.state(),
            "watch": self.watch.state(),
            "policy_version": self.parts.sampler.policy_version,
            "optimizer": optimizer,
            "config": self.config.to_dict(),
            "data": self.parts.data_hash,
            "reward_version": self.parts.scorer.version,
            "prompt": self._prompt(),
            "probe": self._probe() if probed else None,
        }
        with signals.shield():
            save_checkpoint(
                self.ledger.checkpoints,
                state.step,
                values,
                tensors,
                self._save_weights,
                self.config.train.keep_checkpoints,
                spare=self.watch.early_stop.best_step,
            )

    def restore(self, checkpoint: Checkpoint) -> State:
        """The state of `checkpoint`; UserError where data or policy are not those of the run."""
        values = checkpoint.values
        check_same_data(values["data"], self.parts.data_hash)
        check_same_prompt(values["prompt"], self._prompt())
        if values["probe"] is not None:
            dtype = causal_lm(self.parts.policy.model).dtype
            check_same_policy(values["probe"], self._probe(), dtype)
        try:
            state = State(**values["state"])
            self.collector.load(values["collector"])
            self.watch.load(values["watch"])
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{checkpoint.folder} was written by another version of grpo-engine ({error})"
            ) from error
        if state.batch is not None:
            state.batch = batch_from_json(values["state"]["batch"])
        self.parts.sampler.policy_version = values["policy_version"]
        self.optimizer.load(checkpoint.tensors, values["optimizer"])
        self.ledger.rewind(state.step, evaluated=state.evaluated == state.step)
        return state

    def _save_weights(self, checkpoint: Path) -> None:
        folder, policy = checkpoint / self.config.weights_name, self.parts.policy
        policy.save(folder)
        if not self.read_back:
            check_saved(policy.model, self.config.model, folder)
            self.read_back = True

    def _probe(self) -> list[float]:
        return probe(self.parts.policy.model, self.parts.train.ids(0))

    def _prompt(self) -> str:
        return self.parts.policy.tokenizer.decode(self.parts.train.ids(0))


def with_now(config: RunConfig, *, resume: bool) -> RunConfig:
    """The config with the moment at which its run began, unless it names another itself."""
    header = config.out / "config.yaml"
    now = config.data.now
    if now is None and resume and header.is_file():
        now = load_run(header).data.now
    now = now or datetime.now().isoformat(timespec="seconds")
    return replace(config, data=replace(config.data, now=now))


def newest_checkpoint(ledger: Ledger, config: dict[str, Any]) -> Checkpoint | None:
    """What --resume goes on from; None for a run that was stopped before its first: it begins
    again. UserError if its config was another."""
    found = list_checkpoints(ledger.checkpoints)
    if not found:
        ledger.rewind(-1)
        return None
    checkpoint = load_checkpoint(found[-1])
    check_same_config(checkpoint.values["config"], config)
    return checkpoint


def resumed(checkpoint: Checkpoint | None, steps: int) -> str:
    """What a run that goes on says of where it stands."""
    if checkpoint is None:
        return "there is no checkpoint to resume from: the run starts over"
    step = checkpoint.values["state"]["step"]
    return f"resuming at step {step} of {steps} (checkpoint {checkpoint.folder.name})"
