"""What looks after a run: guards, the weight of the KL, the early stop.

All of it changes in `observe` and `evaluated` alone, so a checkpoint between steps holds it whole.
"""

import dataclasses
from collections.abc import Sequence
from math import nan
from statistics import fmean
from typing import Any

from .config import LR_ALL_WEIGHTS, LR_LORA, RunConfig
from .guards import Alarm, Context, EarlyStop, Guards, KlController
from .guards.guard import CROSSED
from .kernels.options import GRPOOptions


class Watch:
    """The guards of a run of `grpo train` and what they may do."""

    def __init__(self, config: RunConfig) -> None:
        self.options = config.loss
        self.kl = KlController(config.kl, config.loss.beta)
        context = Context(
            temperature=config.sampling.settings()[0].temperature,
            beta=config.loss.beta,
            lr=config.lr,
            default_lr=LR_ALL_WEIGHTS if config.lora is None else LR_LORA,
            max_tokens=config.sampling.max_tokens,
            group_size=config.sampling.group_size,
            max_grad_norm=config.train.max_grad_norm,
        )
        self.guards = Guards(config.guards, context)
        self.early_stop = EarlyStop(config.early_stop)
        self.stop: str | None = None
        """why the run ends before its last step"""
        self._stopped_by: tuple[str, str, float] | None = None  # guard, side, figure
        self._floor = config.scoring.floor
        self._lowest: dict[str, float] = {}  # reward of any held-out answer so far, by set
        self._news: dict[str, float] = {}  # of an evaluation, for the guards' next look

    def loss_options(self, step: int) -> GRPOOptions:
        """The loss of a step, with the weight of the KL as it is then."""
        return dataclasses.replace(self.options, beta=self.kl.beta(step))

    def observe(self, metrics: dict[str, Any]) -> list[Alarm]:
        """Takes the metrics of a step; moves the weight of the KL for the next one."""
        if self.options.beta > 0 and metrics["tokens"]:
            self.kl.observe(metrics["kl"])
        alarms = self.guards.observe(metrics | self._news)
        self._news = {}
        for alarm in alarms:
            if alarm.action == "raise_beta":
                self.kl.raise_beta()
            if alarm.action == "stop":
                self._stopped_by = alarm.guard, alarm.side, alarm.value
        self._stop_if_a_guard_did()
        return alarms

    def evaluated(self, step: int, rewards: dict[str, Sequence[float | None]]) -> dict[str, float]:
        """Takes the rewards of the answers to held-out tasks: of `reward`, and of `regression`.

        Returns the mean of each as it is compared with others: an answer without a reward counts as
        the lowest that any had so far, or as scoring.floor if that is lower. So a judge that fails
        on more answers never looks like a gain. Raises UserError, and has taken nothing, if no
        held-out answer has a reward.
        """
        lowest = {
            name: min([self._lowest.get(name, self._floor), *_given(values)])
            for name, values in rewards.items()
        }
        compared = {
            name: fmean(lowest[name] if x is None else x for x in values) if _given(values) else nan
            for name, values in rewards.items()
        }
        self.early_stop.observe(step, compared["reward"])
        self._stop_if_without_gain()
        self._lowest = lowest
        self._news = {f"eval_{name}": value for name, value in compared.items()}
        return compared

    def finish(self, step: int) -> list[Alarm]:
        """What the guards say to an evaluation that no step followed."""
        alarms = self.guards.observe({"step": step} | self._news) if self._news else []
        self._news = {}
        return alarms

    def state(self) -> dict[str, Any]:
        """Plain values from which `load` goes on."""
        parts = {name: getattr(self, name).state() for name in ("kl", "guards", "early_stop")}
        news = {"news": self._news, "lowest": self._lowest, "stopped_by": self._stopped_by}
        return parts | news

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        for name in ("kl", "guards", "early_stop"):
            getattr(self, name).load(state[name])
        self._news, self._lowest = state["news"], state["lowest"]
        self._stopped_by = state["stopped_by"]
        # By the config of now: a resumed run may be given more.
        self._stop_if_without_gain()
        self._stop_if_a_guard_did()

    def _stop_if_without_gain(self) -> None:
        stop = self.early_stop
        if stop.exhausted:
            kept = ", kept in checkpoints/" if stop.best_step else ": the model as it was"
            self.stop = (
                f"{stop.without_gain} evaluations without a gain; best: step {stop.best_step} "
                f"({stop.best:.3f}){kept}"
            )

    def _stop_if_a_guard_did(self) -> None:
        if self._stopped_by is None:
            return
        guard, side, figure = self._stopped_by
        threshold = getattr(self.guards.config, guard)
        if threshold is None or not CROSSED[side](figure, threshold):
            self._stopped_by = None
            return
        self.stop = (
            f"guard {guard}: {figure:.3g} {side} {threshold:g}; to go on nevertheless, --resume "
            f"with guards.{guard} null"
        )


def _given(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]
