"""Small runs of the trainer for the tests."""

import json
from pathlib import Path

from safetensors.torch import load_file

from grpo_engine.config import (
    DataConfig,
    GroupsConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from grpo_engine.errors import Interrupted
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.trainer import Trainer

# Pays for digits, so that a model with random weights finds some and can find more.
DIGITS = """
def digits(completions, **columns):
    return [sum(map(str.isdigit, c)) / max(1, len(c)) for c in completions]
"""
GROUPS = {
    "sampling": SamplingConfig,
    "groups": GroupsConfig,
    "loss": GRPOOptions,
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
    made = {name: GROUPS[name](**{**defaults[name], **groups.get(name, {})}) for name in defaults}
    rewards = groups.get("rewards", [RewardConfig(f"{reward}:digits")])
    return RunConfig(lora=lora, rewards=rewards, **made)


class StoppingTrainer(Trainer):
    """Is interrupted before the step after `stop_after`."""

    stop_after = 0

    def step(self) -> dict:
        if self.state.step == self.stop_after:
            raise Interrupted(15)
        return super().step()


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
