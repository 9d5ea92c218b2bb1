"""grpo rescore: a run's rollouts under another reward. The run folder is not changed."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, require
from ..paths import path_of
from .common import add_trust, check_out, check_trust, quiet

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..rescore import Rescored
    from ..rescore_figures import Figures
    from ..sample_config import RewardConfig

DECIDING = "rewards", "scoring", "groups", "loss"  # groups of the config that rewards hang on
SHOWN = 10
EXCERPT = 100  # characters
NOTHING = "none"


def run(args: list[str]) -> int:
    """Prints what changes; with --out also writes old and new of every sample."""
    given, keys = _parser().parse_known_args(args)
    check_out(given.out, given.run)
    if given.out is not None and given.out.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--out: a .parquet or .jsonl file is written; given {given.out}")
    first, last = _span(given.steps)
    quiet()
    from ..groups.rules import Rules
    from ..model import load_tokenizer
    from ..rescore import Recorded, rescore
    from ..rescore_figures import by_step, figures
    from ..rewards.load import load_rewards
    from ..rewards.score import Scorer

    config = _config(given, keys)
    recorded = Recorded.of(given.run, first, last)
    rules = Rules(config.scoring, config.groups, config.loss)
    rewards = load_rewards(config.rewards, config.data.answer_column)
    samples: list[Rescored] = []
    with Scorer(rewards, config.scoring) as scorer:
        tokenizer = load_tokenizer(config.model, given.run / config.weights_name)
        for step in rescore(recorded, recorded.columns, scorer, rules, tokenizer):
            samples += step
    for reward in config.rewards:
        print(f"reward        {_described(reward)}")
    for line in _step_lines(by_step(samples)):
        print(line)
    for line in (*_lines(figures(samples)), *_changes(samples)):
        print(line)
    if given.out is not None:
        _write(samples, given.out)
        print(f"samples: {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo rescore",
        allow_abbrev=False,  # what is no option here is a key of the config
        description="Old rollouts under another reward: order flips, groups that gain or lose "
        "signal, gate failures.",
        epilog="Weights, gates and scoring are those of the run. Its keys can be set as in grpo "
        f"train: those of {', '.join(DECIDING)}. Without --reward its own functions are called, as "
        "their files are now.",
    )
    parser.add_argument("run", type=path_of, help="a run folder; it is not changed")
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="[NAME=]FUNCTION",
        help="file.py:function or a built-in, in place of the run's reward NAME, with its keys; "
        "without NAME in place of the one of that name, or of the only one",
    )
    parser.add_argument(
        "--config", type=path_of, help=f"a YAML file with any of the groups {', '.join(DECIDING)}"
    )
    parser.add_argument("--steps", metavar="A:B", help="from A to B, both included (default: all)")
    add_trust(parser, rewards=True)
    parser.add_argument("--out", type=path_of, help="a .parquet or .jsonl file; overwritten")
    return parser


def _span(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        span = int(first) if first else None, int(last) if last else None
    except ValueError:
        span = None, None
    if not colon or span == (None, None):
        raise UserError(f"--steps takes A:B, A: or :B; given {text}")
    return span


def _config(given: argparse.Namespace, keys: Sequence[str]) -> "RunConfig":
    """The run's config with what was given in its place."""
    from ..export import run_config
    from ..parsing import parse_run
    from ..rescore import replace_reward

    config = run_config(given.run, trust_remote_code=given.trust_remote_code)
    stored = {reward.function for reward in config.rewards}
    extra = [] if given.config is None else ["--config", str(given.config)]
    if extra or keys:
        changed, _ = parse_run([str(given.run / "config.yaml"), *extra, *keys])
        model = replace(changed.model, trust_remote_code=given.trust_remote_code)
        changed = replace(changed, model=model)
        for group in (f.name for f in fields(config) if f.name not in DECIDING):
            if getattr(changed, group) != getattr(config, group):
                raise UserError(
                    f"{group} changes nothing in rescoring: give keys of {', '.join(DECIDING)}"
                )
        config = changed
    rewards = config.rewards
    for text in given.reward:
        rewards = replace_reward(rewards, text)
    typed = {text.rpartition("=")[2] for text in given.reward}
    check_trust(given, [r for r in rewards if r.function in stored - typed])
    return replace(config, rewards=rewards)


def _described(reward: "RewardConfig") -> str:
    shown = {f.name: getattr(reward, f.name) for f in fields(reward) if f.name != "function"}
    usual = {f.name: f.default for f in fields(reward)}
    told = {name: v for name, v in shown.items() if v not in (None, {}) and v != usual[name]}
    parts = [f"{name} {value}" for name, value in told.items()]
    return "  ".join([reward.function, *parts])


def _step_lines(steps: "Iterator[tuple[int, Figures]]") -> Iterator[str]:
    yield "  step  old reward  new reward     flips of pairs  signal  gained  lost  failed gates"
    for step, f in steps:
        yield (
            f"{step:6}  {f.old_mean:10.4f}  {f.new_mean:10.4f}  {f.flips:8} {f.pairs:8}  "
            f"{f.signal_after:6}  {f.signal_gained:6}  {f.signal_lost:4}  "
            f"{sum(f.gate_failures.values()):12}"
        )


def _lines(f: "Figures") -> Iterator[str]:
    gates = "  ".join(f"{name} {count}" for name, count in f.gate_failures.items())
    related = "none: one of them is constant" if f.correlation is None else f"{f.correlation:.4f}"
    yield f"mean reward   {f.old_mean:.4f} -> {f.new_mean:.4f}, correlation {related}"
    yield (
        f"order flips   {f.flips} of {f.pairs} pairs that both rewards order; ties broken "
        f"{f.ties_broken}, made {f.ties_made}"
    )
    yield (
        f"signal        {f.signal_before} -> {f.signal_after} of {f.groups} groups: "
        f"{f.signal_gained} gained, {f.signal_lost} lost"
    )
    yield f"valid         {f.became_valid} became valid, {f.became_invalid} invalid"
    yield f"gate failures {gates or NOTHING} (of {f.samples} samples)"
    yield f"failed calls  {f.failures}"


def _changes(samples: "Sequence[Rescored]") -> Iterator[str]:
    from ..rescore_figures import largest_changes

    found = largest_changes(samples, SHOWN)
    yield f"largest changes: {'' if found else NOTHING}".rstrip()
    for s in found:
        text = s.text if len(s.text) <= EXCERPT else f"{s.text[:EXCERPT]}..."
        yield (
            f"  {s.old_reward:.4f} -> {s.new_reward:.4f}  step {s.step} group {s.group} sample "
            f"{s.sample} row {s.task_row}  {text!r}"
        )


def _write(samples: "Sequence[Rescored]", out: Path) -> None:
    rows = [_plain(asdict(sample)) for sample in samples]
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    pa = require("pyarrow", "train", "writing Parquet")
    parquet = require("pyarrow.parquet", "train", "writing Parquet")
    components = [list(row.pop("components").items()) for row in rows]
    table = pa.Table.from_pylist(rows)
    kind = pa.map_(pa.string(), pa.float64())
    parquet.write_table(table.append_column("components", pa.array(components, kind)), out)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in row.items()
    }
