"""Sampling groups, drawing tokens, and the training forward: `grpo bench --suite sampler`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch

from . import prompt_once_cases, sampling_cases, token_cases
from .harness import Case


@dataclass(frozen=True)
class Shape:
    """What a kind of cases is run on; what it has no use for stays 0 or empty.

    kind: of KINDS. model: of models.MODELS, with its dtype. prompts: of `prompt` tokens each, with
    `group` samples of `new` tokens (ragged: of that median), `slots` of them decoded at a time (0:
    as many as the sampler likes). rows, vocab: of the logits that tokens are drawn from.
    """

    kind: str
    model: str = ""
    dtype: str = "float32"
    prompts: int = 0
    prompt: int = 0
    group: int = 0
    new: int = 0
    slots: int = 0
    rows: int = 0
    vocab: int = 0

    def used(self) -> dict[str, int | str]:
        """The fields that are not at their default, and the dtype."""
        default = {field.name: field.default for field in fields(self)}
        found = asdict(self)
        return {n: v for n, v in found.items() if n == "dtype" or v != default[n]}


KINDS: dict[str, Callable[[Shape, torch.device], list[Case]]] = {
    "generate": sampling_cases.generate,
    "kv": sampling_cases.kv,
    "ragged": sampling_cases.ragged,
    "token": token_cases.cases,
    "prompt-once": prompt_once_cases.cases,
}

_TOKEN = Shape("token", rows=16, vocab=151_936)  # the vocabulary of Qwen2.5
_KV = Shape("kv", "4m", prompts=4, prompt=256, group=8, new=64)
_RAGGED = Shape("ragged", "4m", prompts=8, prompt=64, group=8, new=32, slots=8)
_SMALL_GENERATE = Shape("generate", "4m", prompts=4, prompt=256, group=8, new=64)


def _generate_135m(dtype: str, prompts: int, prompt: int, new: int) -> Shape:
    return Shape("generate", "135m", dtype, prompts, prompt, 8, new)


SHAPES = {
    "small": (
        Shape("generate", "tiny", prompts=2, prompt=24, group=3, new=6),
        Shape("kv", "tiny", prompts=2, prompt=24, group=8, new=6),
        Shape("ragged", "tiny", prompts=3, prompt=8, group=4, new=8, slots=4),
        Shape("token", rows=4, vocab=500),
        Shape("prompt-once", "tiny", prompts=1, prompt=24, group=4, new=6),
    ),
    "quick": (
        _SMALL_GENERATE,
        _generate_135m("bfloat16", prompts=2, prompt=128, new=16),
        _generate_135m("float32", prompts=2, prompt=128, new=16),
        _KV,
        _RAGGED,
        _TOKEN,
        Shape("prompt-once", "4m", prompts=1, prompt=1024, group=8, new=256),
        Shape("prompt-once", "135m-4", prompts=1, prompt=256, group=8, new=64),
    ),
    "full": (
        _SMALL_GENERATE,
        _generate_135m("bfloat16", prompts=8, prompt=512, new=128),
        _generate_135m("float32", prompts=8, prompt=512, new=128),
        _KV,
        _RAGGED,
        _TOKEN,
        Shape("prompt-once", "4m", prompts=1, prompt=1024, group=8, new=256),
        Shape("prompt-once", "135m-4", prompts=1, prompt=1024, group=8, new=256),
    ),
    # A part of the minutes of benchmarks/device.py.
    "device": (
        _SMALL_GENERATE,
        _TOKEN,
        Shape("prompt-once", "135m-4", prompts=1, prompt=1024, group=8, new=256),
    ),
    "cuda": (
        _generate_135m("bfloat16", prompts=8, prompt=512, new=128),
        _KV,
        _RAGGED,
        _TOKEN,
        Shape("prompt-once", "135m", prompts=1, prompt=1024, group=8, new=256),
    ),
}


def cases(shape: Shape, device: torch.device, quick: bool = False) -> list[Case]:
    """The cases of the shape's kind. Its providers are the same whether `quick` or not."""
    return KINDS[shape.kind](shape, device)
