"""Small runs of the trainer for the tests."""

import json
from pathlib import Path

import pyarrow.parquet as parquet
from safetensors.torch import load_file

from grpo_engine.config import DataConfig, LoraConfig, ModelConfig, RunConfig, TrainConfig
from grpo_engine.curriculum.config import (
    AnchorsConfig,
    CurriculumConfig,
    ReplayConfig,
    VariantsConfig,
)
from grpo_engine.errors import Interrupted
from grpo_engine.guards.config import GuardsConfig, KlConfig, StopConfig
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.sample_config import GroupsConfig, RewardConfig, SamplingConfig, ScoringConfig
from grpo_engine.trainer import Trainer

# Pays for digits, so that a model with random weights finds some and can find more.
DIGITS = """
def digits(completions, **columns):
    return [sum(map(str.isdigit, c)) / max(1, len(c)) for c in completions]
"""
GROUPS = {
    "sampling": SamplingConfig,
    "scoring": ScoringConfig,
    "groups": GroupsConfig,
    "curriculum": CurriculumConfig,
    "variants": VariantsConfig,
    "anchors": AnchorsConfig,
    "replay": ReplayConfig,
    "loss": GRPOOptions,
    "kl": KlConfig,
    "guards": GuardsConfig,
    "early_stop": StopConfig,
    "train": TrainConfig,
    "data": DataConfig,
    "model": ModelConfig,
}


def tiny_config(folder: Path, tmp_path: Path, *, lora: LoraConfig | None = None, **groups: dict):
    """A run of 4 prompts and groups of 4; `groups` changes keys, as train={"steps": 3}."""
    reward = tmp_path / "digits.py"
    if not reward.exists():
        reward.write_text(DIGITS)
    data = tmp_path / "data.jsonl"
    if not data.exists():
        rows = [{"prompt": "say " + "abc"[i % 3] * (1 + i), "answer": "7"} for i in range(10)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"path": str(data)},
        "sampling": {"group_size": 4, "max_tokens": 6},
        "groups": {"truncated": "keep"},
        "loss": {},
        "train": {"steps": 6, "prompts_per_step": 4, "lr": 1e-3, "out": str(tmp_path / "run")},
    }
    made = {
        name: cls(**{**defaults.get(name, {}), **groups.get(name, {})})
        for name, cls in GROUPS.items()
    }
    rewards = groups.get("rewards", [RewardConfig(f"{reward}:digits")])
    return RunConfig(lora=lora, rewards=rewards, **made)


class StoppingTrainer(Trainer):
    """Is interrupted before the step after `stop_after`."""

    stop_after = 0

    def step(self) -> dict:
        if self.state.step == self.stop_after:
            raise Interrupted(15)
        return super().step()


def rollouts_of(config: RunConfig, step: int) -> list[dict]:
    """The recorded samples of a step."""
    path = Path(config.train.out) / "rollouts" / f"step-{step:06d}.parquet"
    return parquet.read_table(path).to_pylist()


def files_of(folder: Path) -> dict[str, tuple]:
    """Every file and folder with its time and content: what must not have changed."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def final_weights(config: RunConfig) -> dict:
    """The tensors of the run's final folder."""
    out = Path(config.train.out)
    if config.lora is None:
        return load_file(out / "model" / "model.safetensors")
    return load_file(out / "adapter" / "adapter_model.safetensors")


def metrics_of(config: RunConfig) -> list[dict]:
    """The lines of metrics.jsonl, strictly JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (Path(config.train.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
