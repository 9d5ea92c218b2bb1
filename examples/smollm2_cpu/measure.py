"""Accuracy over all 100 problems, 4 samples each at temperature 1, before and along a run.

Usage: python examples/smollm2_cpu/measure.py runs/smollm2 > examples/smollm2_cpu/curve.csv
"""

import sys
from pathlib import Path

from grpo_engine.checkpoint import list_checkpoints
from grpo_engine.data import load_tasks
from grpo_engine.export import open_run
from grpo_engine.rewards.builtin import math
from grpo_engine.rollout import SamplingParams
from grpo_engine.sampler import GroupSampler

SAMPLES = 4


def accuracy(policy, config) -> float:
    """Share of right answers among 4 samples of each problem."""
    tasks = load_tasks(config.data.path, config.data.prompt_column)
    params = SamplingParams(max_tokens=config.sampling.max_tokens, seed=1)
    sampler = GroupSampler(policy.model, policy.tokenizer)
    groups = sampler.generate([task.prompt for task in tasks], SAMPLES, params)
    texts = [
        policy.tokenizer.decode(r.completion_ids, skip_special_tokens=True)
        for group in groups
        for r in group
    ]
    answers = [task.columns[config.data.answer_column] for task in tasks for _ in range(SAMPLES)]
    right = math(texts, answers)
    return sum(right) / len(right)


def main() -> None:
    """Prints step,accuracy: step 0 is the model without its adapter."""
    run = Path(sys.argv[1])
    print("step,accuracy")
    for folder in list_checkpoints(run / "checkpoints"):
        step = int(folder.name.removeprefix("step-"))
        config, policy = open_run(run, step)
        if step == min(int(f.name[5:]) for f in list_checkpoints(run / "checkpoints")):
            with policy.model.disable_adapter():
                print(f"0,{accuracy(policy, config):.4f}", flush=True)
        print(f"{step},{accuracy(policy, config):.4f}", flush=True)


if __name__ == "__main__":
    main()
