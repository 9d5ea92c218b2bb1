"""The training loops of the step suite, set up alike; each stops before every step at its Pace.

request: folder, shape, steps and device.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from .worker import Pace

LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0


def ours(request: dict[str, Any], pace: Pace) -> None:
    """`grpo train` as it is, with its run folder, rollouts and metrics."""
    from ..config import (
        DataConfig,
        GroupsConfig,
        ModelConfig,
        RewardConfig,
        RunConfig,
        SamplingConfig,
        TrainConfig,
    )
    from ..kernels.options import GRPOOptions
    from ..trainer import Trainer

    class PacedTrainer(Trainer):
        def step(self) -> dict[str, Any]:
            pace.before_step()
            metrics = super().step()
            pace.after_step(metrics["tokens"], metrics["loss"], metrics["grad_norm"])
            return metrics

    folder, shape = Path(request["folder"]), request["shape"]
    samples = shape["prompts"] * shape["group"]
    config = RunConfig(
        model=ModelConfig(str(folder / "model"), dtype="float32", device=request["device"]),
        lora=None,
        data=DataConfig(str(folder / "data.jsonl")),
        rewards=[RewardConfig(f"{folder / 'reward.py'}:lottery")],
        sampling=SamplingConfig(shape["group"], max_tokens=shape["new"], ignore_eos=True),
        groups=GroupsConfig(truncated="keep"),
        loss=GRPOOptions.preset("trl", beta=0.0),
        train=TrainConfig(
            steps=request["steps"],
            prompts_per_step=shape["prompts"],
            lr=LEARNING_RATE,
            warmup=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            # One micro-batch, as the other loop has it.
            token_budget=samples * (shape["prompt"] + shape["new"]),
            eval_every=request["steps"],
            checkpoint_every=request["steps"],
            out=str(folder / "run"),
        ),
    )
    PacedTrainer(config).run()


def trl(request: dict[str, Any], pace: Pace) -> None:
    """TRL's GRPOTrainer; every completion is as long by min_new_tokens."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder, shape = Path(request["folder"]), request["shape"]
    samples = shape["prompts"] * shape["group"]

    class Paced(TrainerCallback):
        def on_step_begin(self, args, state, control, **_: Any) -> None:
            pace.before_step()

        def on_log(self, args, state, control, logs: dict[str, Any], **_: Any) -> None:
            if "grad_norm" in logs:  # else it is the summary of the whole run
                tokens = logs["completions/mean_length"] * samples
                pace.after_step(tokens, logs["loss"], logs["grad_norm"])

    sys.path.insert(0, str(folder))
    from reward import lottery

    rows = (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()
    warnings.simplefilter("ignore")  # deprecations among TRL and what it imports
    GRPOTrainer(
        str(folder / "model"),
        reward_funcs=lottery,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=request["device"] == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            max_steps=request["steps"],
            per_device_train_batch_size=samples,
            num_generations=shape["group"],
            max_completion_length=shape["new"],
            generation_kwargs={"min_new_tokens": shape["new"]},
            beta=0.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            max_grad_norm=MAX_GRAD_NORM,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([json.loads(row) for row in rows]),
        callbacks=[Paced()],
    ).train()


LOOPS = {"ours": ours, "trl": trl}
