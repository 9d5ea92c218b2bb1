"""What the practice around the loss costs and gains, on the quickstart's model.

    python examples/quickstart/prepare.py runs/practice/model
    python -m grpo_engine.benchmarks.practice idle|faults|resample|collapse runs/practice/model

idle: reward workers, record and guards as a share of a step. faults: 30 steps whose reward hangs
on one sample in 50, kills its own process on another, returns NaN on a third, against the same
steps without. resample: optimiser steps to a held-out accuracy where 70 % of the prompts teach
nothing, with and without drawing others in their place. collapse: six runs that are ruined on
purpose and a healthy one, and what the guards say of them first.
"""

import argparse
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..config import DataConfig, ModelConfig, RunConfig, TrainConfig
from ..data import load_tasks
from ..errors import UserError
from ..guards.config import StopConfig
from ..kernels.options import GRPOOptions
from ..sample_config import GroupsConfig, RewardConfig, SamplingConfig
from ..trainer import Trainer

TIMEOUT_S = 0.5
ACCURACY = 0.7  # held-out, from 0.565
FAULTS = """
import os, time, zlib

def constant(completions, **_):
    return [0.5] * len(completions)

def length(completions, completion_ids, **_):
    return [len(ids) / 16 for ids in completion_ids]

def right(completions, completion_ids, prompts, answer, step):
    return [float(c == a) for c, a in zip(completions, answer)]

def faulty(completions, completion_ids, prompts, answer, step):
    for i, ids in enumerate(completion_ids):
        place = zlib.crc32(repr((prompts[i], ids, step)).encode()) % 50
        if place == 0:
            while True:
                time.sleep(1)
        if place == 1:
            os.kill(os.getpid(), 9)
    values = right(completions, completion_ids, prompts, answer, step)
    for i, ids in enumerate(completion_ids):
        if zlib.crc32(repr((prompts[i], ids, step)).encode()) % 50 == 2:
            values[i] = float("nan")
    return values
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="practice", description=__doc__.splitlines()[0])
    cases = {"idle": idle, "faults": faults, "resample": resample, "collapse": collapse}
    parser.add_argument("case", choices=cases)
    parser.add_argument("model", type=Path, help="the quickstart's model folder")
    parser.add_argument("--out", type=Path, default=Path("runs/practice"), help="overwritten")
    parser.add_argument("--steps", type=int, help="default: 50, 30, 100 and 100 (the healthy run)")
    given = parser.parse_args()
    print(json.dumps(cases[given.case](given.model, given.out, given.steps), indent=2))


def idle(model: Path, out: Path, steps: int | None) -> dict[str, Any]:
    """Shares of the summed stage timers; the first steps, which warm up, are left out."""
    reward = _file(out, "right", FAULTS)
    lines = _run(_config(model, out / "idle", steps or 50, rewards=[RewardConfig(reward)]))[5:]
    stages = {stage for line in lines for stage in line["time_ms"]}
    ms = {s: median(line["time_ms"].get(s, 0.0) for line in lines) for s in sorted(stages)}
    practice = sum(ms.get(stage, 0.0) for stage in ("reward", "record", "guard"))
    return {"median_ms": ms, "share": practice / sum(ms.values())}


def faults(model: Path, out: Path, steps: int | None) -> dict[str, Any]:
    """Seconds of both runs, and what is left of the difference without the time-outs."""
    found = {}
    for name in ("right", "faulty"):
        reward = RewardConfig(_file(out, name, FAULTS), timeout_s=TIMEOUT_S)
        lines = _run(_config(model, out / name, steps or 30, rewards=[reward]))
        # While a sample hangs, the other worker goes on: whole time-outs are what a step waited.
        waits = [line["time_ms"]["reward"] / 1000 // TIMEOUT_S * TIMEOUT_S for line in lines]
        found[name] = {
            "steps": len(lines),
            "seconds": sum(sum(line["time_ms"].values()) for line in lines) / 1000,
            "seconds_of_time_outs": sum(waits),
            "causes": _causes(out / name),
        }
    plain, faulty = found["right"], found["faulty"]
    beyond = faulty["seconds"] - faulty["seconds_of_time_outs"] - plain["seconds"]
    return found | {"loss_of_speed_beyond": beyond / plain["seconds"]}


def resample(model: Path, out: Path, steps: int | None) -> dict[str, Any]:
    """Held-out accuracy by optimiser step, and the tokens sampled until then."""
    data = out / "mostly-hopeless.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        # Seven of ten have an answer that nobody gives.
        {"prompt": task.prompt, "answer": task.columns["answer"] if i % 10 < 3 else "none"}
        for i, task in enumerate(load_tasks("builtin:arithmetic", "prompt"))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for policy in ("skip", "resample"):
        config = _config(
            model,
            out / policy,
            steps or 100,
            data=DataConfig(str(data), eval_path="builtin:arithmetic-eval"),
            groups=GroupsConfig(no_signal=policy, most_extra=6.0),
            eval_every=10,
        )
        tokens, curve = 0, []
        for line in _run(config):
            tokens += line.get("tokens_sampled", 0)
            if "eval_reward" in line:
                curve.append([line["step"], round(line["eval_reward"], 3), tokens])
        first = next((point for point in curve if point[1] >= ACCURACY), None)
        found[policy] = {f"first at {ACCURACY}": first, "step, held-out, tokens sampled": curve}
    return found


def collapse(model: Path, out: Path, steps: int | None) -> dict[str, list[str]]:
    """The alarms of each run, in their order."""
    runs: dict[str, dict[str, Any]] = {
        "temperature 0.2": {"sampling": SamplingConfig(8, 0.2, max_tokens=5)},
        "beta 10": {"loss": GRPOOptions(beta=10.0)},
        "learning rate x 100": {"lr": 2e-2},
        "constant reward": {"rewards": [RewardConfig(_file(out, "constant", FAULTS))]},
        "reward for length": {
            "rewards": [RewardConfig(_file(out, "length", FAULTS))],
            "sampling": SamplingConfig(8, max_tokens=16),
        },
        "reference follows": {},
    }
    said = {}
    for name, changes in runs.items():
        trainer = Trainer(_fresh(_config(model, out / "collapse", 20, **changes)))
        if name == "reference follows":
            trainer.policy.reference = lambda trainer=trainer: nullcontext(trainer.policy.model)
        said[name] = _alarms(trainer)
    healthy = _config(model, out / "healthy", steps or 100, eval_every=50)
    healthy = replace(healthy, data=replace(healthy.data, eval_path="builtin:arithmetic-eval"))
    said["healthy"] = _alarms(Trainer(_fresh(healthy)))
    return said


def _alarms(trainer: Trainer) -> list[str]:
    said: list[str] = []
    say = trainer.display.say
    trainer.display.say = lambda text: say(text) if "guard " not in text else said.append(text)
    try:
        trainer.run()
    except UserError as error:  # what a guard calls an error
        said.append(f"error: {error}")
    return said


def _config(
    model: Path,
    out: Path,
    steps: int,
    *,
    data: DataConfig | None = None,
    eval_every: int = 10_000,
    prompts: int = 32,
    lr: float = 2e-4,
    **changes: Any,
) -> RunConfig:
    config = RunConfig(
        ModelConfig(str(model), dtype="float32"),
        data or DataConfig("builtin:arithmetic"),
        [RewardConfig("exact")],
        lora=None,
        sampling=SamplingConfig(group_size=8, max_tokens=5),
        loss=GRPOOptions(beta=0.04),
        early_stop=StopConfig(evaluations=None),
        train=TrainConfig(
            steps=steps,
            prompts_per_step=prompts,
            lr=lr,
            eval_every=eval_every,
            checkpoint_every=10_000,
            out=str(out),
        ),
    )
    return replace(config, **changes)


def _fresh(config: RunConfig) -> RunConfig:
    shutil.rmtree(config.train.out, ignore_errors=True)
    return config


def _run(config: RunConfig) -> list[dict[str, Any]]:
    Trainer(_fresh(config)).run()
    lines = Path(config.train.out, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _file(out: Path, name: str, content: str) -> str:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "practice_reward.py"
    path.write_text(content)
    return f"{path}:{name}"


def _causes(run: Path) -> dict[str, int]:
    """Samples whose reward failed, by how."""
    import pyarrow.parquet as parquet

    counts: dict[str, int] = {}
    for path in (run / "rollouts").glob("*.parquet"):
        for cause in parquet.read_table(path, columns=["cause"])["cause"].to_pylist():
            for kind in ("timed out", "lost its process", "returned nan"):
                if cause is not None and kind in cause:
                    counts[kind] = counts.get(kind, 0) + 1
    return counts


if __name__ == "__main__":
    main()
