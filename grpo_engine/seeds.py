"""All randomness of a run: a function of its seed and the step, never of what ran before."""

import random

import numpy as np
import torch


def step_seed(seed: int, step: int, *more: int) -> int:
    """63 random bits of a step, of a part of it with `more`: torch's and Parquet's size."""
    entropy = np.random.SeedSequence([seed, step, *more])
    return int(entropy.generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int, step: int) -> None:
    """Seeds the global generators, for libraries that use them."""
    bits = step_seed(seed, step)
    torch.manual_seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    random.seed(bits)
