"""Held-out tasks, answered greedily and scored as in training."""

from dataclasses import replace
from math import isnan
from typing import Any

from .answers import Answers, answer_tasks, summarize
from .config import RunConfig
from .curriculum.presets import Setting
from .parts import Parts
from .sampler import Progress

HELD_OUT = {"reward": "held-out", "regression": "regression"}


def evaluate(
    parts: Parts, config: RunConfig, step: int, progress: Progress | None = None
) -> dict[str, Answers]:
    """Greedy answers to the first `data.eval_limit` tasks of each held-out set that there is."""
    greedy = replace(config.sampling.params(Setting(1.0), seed=0), temperature=0.0)
    asked = {"limit": config.data.eval_limit, "step": step, "progress": progress}
    return {
        name: answer_tasks(source, parts.scorer, parts.sampler, greedy, **asked)
        for name, source in (("reward", parts.heldout), ("regression", parts.regression))
        if source is not None
    }


def evaluation_metrics(name: str, answers: Answers, config: RunConfig) -> dict[str, Any]:
    """The figures of the set `name` as metrics.jsonl has them: means, and what they are over."""
    found = summarize(answers, config.groups.correct_at, config.groups.cut_counts)
    return {
        f"eval_{name}": found.reward,
        f"eval_{name}_right": found.pass_rate,
        f"eval_{name}_answers": found.answers,
        f"eval_{name}_unscored": found.unscored,
        f"eval_{name}_truncated": found.truncated,
    }


def evaluation_line(name: str, metrics: dict[str, Any]) -> str:
    """The same for a person: `held-out reward 0.871, right 0.860, of 200 answers 9 were cut`."""
    value, right, answers, unscored, cut = (
        metrics[f"eval_{name}{figure}"]
        for figure in ("", "_right", "_answers", "_unscored", "_truncated")
    )
    text = f"{HELD_OUT[name]} reward {value:.3f}" + ("" if isnan(right) else f", right {right:.3f}")
    left = [f"{unscored} have no reward"] * bool(unscored) + [f"{cut} were cut"] * bool(cut)
    return text + (f", of {answers} answers {', '.join(left)}" if left else "")
