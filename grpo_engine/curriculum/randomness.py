"""Chance as a function of what it is for: never of what ran before."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np

GRID = 2**20  # the offset is a multiple of 1 / GRID, so that adding it to a total is exact


def generator(purpose: str, *numbers: int) -> np.random.Generator:
    """The random numbers of a purpose at a seed, a step, ...; all `numbers` at least 0."""
    return np.random.default_rng([crc32(purpose.encode()), *numbers])


def apportion(shares: Sequence[float], total: int, chance: np.random.Generator) -> list[int]:
    """Whole numbers that sum to `total`, each its share of it rounded up or down.

    Systematic rounding: all edges between the shares are shifted by one random offset, so the
    mean of each number over many draws is exactly its share, which the largest remainder's is not.
    `shares`: at least 0, not all 0; they count relative to their sum.
    """
    edges = np.cumsum(np.asarray(shares, dtype=float))
    edges = np.round(edges / edges[-1] * total, 9)  # 0.7 + 0.1 of 10 is 8, not a little less
    offset = chance.integers(GRID) / GRID
    return np.diff(np.floor(edges + offset), prepend=0.0).astype(int).tolist()
