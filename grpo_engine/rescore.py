"""Old rollouts under a new reward, by the code that judged them in training.

Works on the rows of a rollout part (`rollout_table`), from a run folder or from anywhere else:
`rescore(steps, columns, scorer, rules, tokenizer)`. Nothing is written.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from .errors import UserError, first_line, require
from .groups.batch import Batch, Origin
from .groups.fingerprints import Fingerprint
from .groups.make import DRAWN_AGAIN, Samples, judge_samples, make_batch
from .groups.preprocess import PercentileWindow
from .groups.rules import Rules
from .lineage import short_hash
from .prompts import prompt_tail
from .rewards.score import Scorer, Scores
from .rollout import Rollout, SamplingParams
from .sample_config import RewardConfig

Row = dict[str, Any]
READ = (
    "step group round task_row task variant band signal discarded sent sample completion text "
    "reward state cause valid anchor finish_reason policy_version temperature top_p top_k min_p "
    "repetition_penalty max_tokens seed adapter sampling environment tools reward_version "
    "prompt_ids completion_ids"
).split()
OF_ORIGIN = "task_row task_row variant band round".split()
NO_LOGP = torch.empty(0)


@dataclass(frozen=True)
class Rescored:
    """One sample before and after."""

    step: int
    group: int
    sample: int
    task_row: int
    text: str
    anchor: bool
    old_reward: float
    """NaN: none"""
    new_reward: float
    old_state: str
    new_state: str
    old_cause: str | None
    new_cause: str | None
    old_valid: bool
    new_valid: bool
    old_signal: bool
    """of its group"""
    new_signal: bool
    gate_failed: str | None
    """the gate that it fails now"""
    failed: bool
    """whether a call of the new reward failed for it"""
    components: dict[str, float | None]
    """of the new reward, as returned"""


@dataclass(frozen=True)
class Recorded:
    """Parts of a run's rollouts; iterating gives the rows of each step, without log-probs."""

    parts: list[Path]
    columns: list[str]
    """of the data: what reward functions get by these names"""

    @classmethod
    def of(cls, run: Path, first: int | None = None, last: int | None = None) -> "Recorded":
        """The steps from `first` to `last`, both included; UserError if there are none."""
        numbered = {
            int(path.stem.removeprefix("step-")): path
            for path in (run / "rollouts").glob("step-*.parquet")
            if path.stem.removeprefix("step-").isdigit()
        }
        low, high = -1 if first is None else first, float("inf") if last is None else last
        parts = [numbered[step] for step in sorted(numbered) if low <= step <= high]
        if not parts:
            there = f"steps {min(numbered)} to {max(numbered)}" if numbered else "none"
            raise UserError(f"{run}/rollouts holds none of the steps asked for; there are {there}")
        # Of all steps: a column that only other rows have is a list of None in these.
        tasks = {row["task"] for part in numbered.values() for row in _read(part, ["task"])}
        return cls(parts, sorted({name for task in tasks for name in json.loads(task)}))

    def __iter__(self) -> Iterator[list[Row]]:
        return (_read(part, READ) for part in self.parts)


def rescore(
    steps: Iterable[Sequence[Row]],
    columns: Sequence[str],
    scorer: Scorer,
    rules: Rules,
    tokenizer: Any,
) -> Iterator[list[Rescored]]:
    """Scores the rows of each step anew and judges them by `rules`, the steps in order.

    columns: of the data. Functions are called as in training: with all samples of a round of a step
    at a time. Raises UserError as the scorer does.
    """
    window = PercentileWindow(rules.scoring.clip_window)
    for rows in steps:
        rounds = [list(part) for _, part in groupby(rows, key=itemgetter("round"))]
        samples = Samples.join([_samples(part, scorer, tokenizer, columns) for part in rounds])
        gates = judge_samples(samples, rules).components.gate_failed
        yield _compare(rows, samples.scores, gates, make_batch(samples, rules, window))


def replace_reward(rewards: Sequence[RewardConfig], text: str) -> list[RewardConfig]:
    """`rewards` with [NAME=]FUNCTION in the place of one of them, whose keys it takes over.

    Options stay only with a function of the same name: others would not know them.
    """
    name, equals, function = text.rpartition("=")
    own = function.rpartition(":")[2]
    names = [reward.name or reward.function.rpartition(":")[2] for reward in rewards]
    name = name if equals else own if own in names else names[0] if len(names) == 1 else None
    if name not in names:
        raise UserError(
            f"--reward {text}: the run has the rewards {', '.join(names)}; say which one is "
            f"replaced, as in --reward {names[0]}={function}, or give all in --config"
        )
    place = names.index(name)
    old = rewards[place]
    options = old.options if own == old.function.rpartition(":")[2] else {}
    new = replace(old, function=function, name=name, options=options)
    return [*rewards[:place], new, *rewards[place + 1 :]]


def _read(part: Path, columns: list[str]) -> list[Row]:
    parquet = require("pyarrow.parquet", "train", "reading rollouts")
    try:
        return parquet.read_table(part, columns=columns).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"can't read {part}: {first_line(error)}") from error


def _samples(
    rows: Sequence[Row], scorer: Scorer, tokenizer: Any, columns: Sequence[str]
) -> Samples:
    """Samples of one round with their new scores."""
    groups = [list(part) for _, part in groupby(rows, key=itemgetter("group"))]
    first = [group[0] for group in groups]
    number = [g for g, group in enumerate(groups) for _ in group]
    tails = [prompt_tail(tokenizer, row["prompt_ids"]) for row in first]
    sent = [json.loads(row["sent"]) for row in first]
    tasks = [json.loads(row["task"]) for row in first]
    arguments = {
        "prompts": [sent[g] for g in number],
        "completions": [
            row["text"]
            if isinstance(sent[g], str)
            else [{"role": "assistant", "content": row["text"]}]
            for g, row in zip(number, rows, strict=True)
        ],
        "completion_ids": [row["completion_ids"] for row in rows],
        "finish_reasons": [row["finish_reason"] for row in rows],
        "raw_completions": [row["completion"] for row in rows],
        "prompt_tail": [tails[g] for g in number],
        "groups": number,
        "step": rows[0]["step"],
    }
    scores = scorer.score(
        arguments, {name: [tasks[g].get(name) for g in number] for name in columns}
    )
    return Samples(
        [Origin(*(row[n] for n in OF_ORIGIN)) for row in first],
        [[_rollout(row) for row in group] for group in groups],
        [row["text"] for row in rows],
        scores,
        [_fingerprint(row, scorer.version) for row in rows],
        [row["anchor"] for row in rows],
        [(row["cause"] or "").endswith(DRAWN_AGAIN) for row in rows],
    )


def _rollout(row: Row) -> Rollout:
    names = "temperature top_p top_k min_p repetition_penalty max_tokens seed".split()
    return Rollout(
        prompt_ids=row["prompt_ids"],
        completion_ids=row["completion_ids"],
        logp_sampler=NO_LOGP,
        logp_processed=NO_LOGP,
        finish_reason=row["finish_reason"],
        group=row["group"],
        sample=row["sample"],
        params=SamplingParams(**{name: row[name] for name in names}),
        policy_version=row["policy_version"],
    )


def _fingerprint(row: Row, reward_version: str) -> Fingerprint:
    return Fingerprint(
        short_hash(tuple(row["prompt_ids"])),
        str(row["task_row"]),
        row["policy_version"],
        row["adapter"],
        reward_version,
        row["sampling"],
        row["max_tokens"],
        row["environment"],
        row["tools"],
    )


def _compare(
    rows: Sequence[Row], scores: Scores, gates: Sequence[str | None], batch: Batch
) -> list[Rescored]:
    group, signal = batch.group_of_sample().tolist(), batch.signal.tolist()
    rewards, valid = batch.rewards.tolist(), batch.valid.tolist()
    return [
        Rescored(
            **{name: row[name] for name in "step group sample task_row text anchor".split()},
            old_reward=nan if row["reward"] is None else row["reward"],
            new_reward=rewards[i],
            old_state=row["state"],
            new_state=batch.states[i],
            old_cause=row["cause"],
            new_cause=batch.causes[i],
            old_valid=row["valid"],
            new_valid=valid[i],
            old_signal=row["signal"],
            new_signal=signal[group[i]],
            gate_failed=gates[i],
            failed=scores.failures[i] is not None,
            components={name: column[i] for name, column in scores.components.items()},
        )
        for i, row in enumerate(rows)
    ]
