"""A whole GRPO step, sampling, rewards and training: `grpo bench --suite step`.

Ours against TRL, each its own loop in a process of its own, on the same model folder, tasks,
reward, learning rate and lengths; all weights train in float32 without a reference model.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from . import models
from .harness import Case, Expected, Provider, Step
from .worker import Worker

TASKS = 64
STEPS = 1_000_000  # more than are ever asked for
# No length in it: the same text is paid the same in both loops.
REWARD = """
from zlib import crc32

def lottery(completions, **columns):
    return [crc32(text.encode()) % 1000 / 1000 for text in completions]
"""


@dataclass(frozen=True)
class Shape:
    """model: of models.MODELS; a step samples `prompts` groups of `group` samples.

    prompt, new: tokens of a prompt and of a completion, all equally long.
    """

    model: str
    prompts: int
    prompt: int
    group: int
    new: int


_4M = Shape("4m", prompts=4, prompt=256, group=8, new=64)
SHAPES = {
    "small": Shape("tiny", prompts=2, prompt=16, group=4, new=6),
    "quick": (_4M, Shape("135m", prompts=2, prompt=64, group=8, new=16)),
    "full": (_4M, Shape("135m", prompts=2, prompt=256, group=8, new=64)),
    "cuda": Shape("135m", prompts=8, prompt=512, group=8, new=128),
}


class Problem:
    """The folder that both loops start from, and one of the small shape that loads their code."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._folder = TemporaryDirectory(prefix="grpo-bench-")
        self.folder, self.warm_up = Path(self._folder.name, "run"), Path(self._folder.name, "first")
        _write(shape, self.folder)
        _write(SHAPES["small"], self.warm_up)

    def expected(self) -> dict[str, Expected]:
        """Completion tokens that a step trains on; loss and gradient norm are finite."""
        shape = self.shape
        tokens = torch.tensor(float(shape.prompts * shape.group * shape.new))
        return {
            "tokens": Expected(tokens.double(), 1e-6 * float(tokens)),
            "finite": Expected(torch.ones((), dtype=torch.float64), 0.0),
        }


def _write(shape: Shape, folder: Path) -> None:
    """What a loop starts from: `model`, data.jsonl and reward.py."""
    models.save_folder(shape.model, folder / "model")
    prompts = models.random_prompts(shape.model, TASKS, shape.prompt)
    rows = [json.dumps({"prompt": models.text_of(ids)}) for ids in prompts]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def cases(shape: Shape, device: torch.device, quick: bool = False) -> list[Case]:
    """One: a step of every loop; new tokens a second over all of it."""
    problem = cache(lambda: Problem(shape, device))
    return [
        Case(
            suite="step",
            name="step",
            shape=asdict(shape),
            device=device,
            inputs=problem,
            expected=lambda: problem().expected(),
            providers=tuple(Provider(name, partial(_loop, name)) for name in ("ours", "trl")),
            work=shape.prompts * shape.group * shape.new,
            rate_unit="tokens/s",
            rate_scale=1.0,
            most_rounds=models.MODELS[shape.model].most_rounds,
            peak_memory=_peak_memory,
        )
    ]


def _loop(name: str, problem: Problem) -> Step:
    runs = (problem.warm_up, SHAPES["small"], 1), (problem.folder, problem.shape, STEPS)
    return Worker(
        {
            "loop": name,
            "runs": [
                {"folder": str(folder), "shape": asdict(shape), "steps": steps}
                for folder, shape, steps in runs
            ],
            "device": problem.device.type,
            "threads": torch.get_num_threads(),
        }
    )


def _peak_memory(case: Case, provider: Provider, step: Any) -> tuple[float | None, str]:
    """Of the worker, over all its steps, above what the loop held before its first."""
    return step.peak_mem_mib, step.note
