"""What tells versions apart: hashes of weights and settings, seeds of steps."""

import random

import numpy as np
import pytest
import torch

from grpo_engine.lineage import short_hash, weights_hash
from grpo_engine.seeds import seed_everything, step_seed

SIZE = 3000


def hashed(tensor: torch.Tensor, name: str = "w") -> str:
    return weights_hash({name: tensor})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_of_the_weights_counts(dtype):
    weights = torch.arange(SIZE).remainder(200).to(dtype)
    found = {hashed(weights)}
    places = [0, 1, 1023, 1024, 2047, 2048, 2999]
    for place in places:
        for value in (201, 202):
            changed = weights.clone()
            changed[place] = value
            found.add(hashed(changed))
    assert len(found) == 1 + 2 * len(places)
    assert hashed(weights.clone()) == hashed(weights)


def test_zero_and_minus_zero_are_two_values():
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([-0.0]))


def test_names_and_order_count_and_the_layout_in_memory_does_not():
    one, two = torch.ones(3), torch.zeros(3)
    assert hashed(one, "a") != hashed(one, "b")
    assert weights_hash({"a": one, "b": two}) != weights_hash({"a": two, "b": one})
    matrix = torch.randn(40, 50)
    assert hashed(matrix.t()) == hashed(matrix.t().contiguous()) != hashed(matrix)


def test_no_weights_and_empty_ones_have_hashes():
    hashes = {weights_hash({}), hashed(torch.empty(0)), hashed(torch.tensor(1.5))}
    assert len(hashes) == 3 and all(len(h) == 16 for h in hashes)


def test_short_hash_is_of_all_values():
    assert short_hash(1, "a") == short_hash(1, "a")
    assert len({short_hash(1), short_hash("1"), short_hash(1, 1), short_hash([1, 1])}) == 4


def test_seeds_differ_by_seed_step_and_part_and_fit_into_63_bits():
    asked = [(0, 1), (1, 0), (1, 1), (0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (2**32 - 1, 10**9)]
    seeds = [step_seed(*words) for words in asked]
    assert len(set(seeds)) == len(asked)
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) >= 2**60
    assert step_seed(3, 4) == step_seed(3, 4)


def test_all_global_generators_are_seeded():
    def draws() -> tuple:
        return torch.rand(1).item(), np.random.rand(), random.random()

    seed_everything(1, 2)
    first = draws()
    seed_everything(1, 2)
    assert draws() == first
    seed_everything(1, 3)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
