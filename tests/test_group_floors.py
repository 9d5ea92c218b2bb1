"""How low a failed gate is, and what of groups of low variance is kept: by hand."""

import numpy as np
import pytest

from grpo_engine.groups.make import make_batch
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.sample_config import ComponentConfig
from samples import rules, samples_of

EPS = 1e-4
PLAIN = GRPOOptions(advantage_clip=None)


def advantages(rewards, groups=None, options=PLAIN, **kwargs) -> list[float]:
    made = make_batch(samples_of(rewards, **kwargs), rules(None, groups, options))
    return made.advantages.tolist()


def test_a_plain_floor_is_what_it_says_even_above_an_answer():
    gated = {"c": ComponentConfig(gate=-50.0)}
    found = advantages([[0] * 3], components={"c": [-1.0, 1.0, -99.0]}, configs=gated)
    # Totals -1, 1, 0.
    std = (2 / 3) ** 0.5 + EPS
    assert found == pytest.approx([-1 / std, 1 / std, 0.0])


@pytest.mark.parametrize("declared", [None, -7.0])
def test_only_answers_say_how_low_a_failed_gate_is(declared):
    # Sample 3 failed its call: neither its component of -99 nor its missing one is an answer.
    components = {"a": [1.0, 3.0, 0.0, None], "b": [0.0, 0.0, 0.0, -99.0]}
    configs = {"a": ComponentConfig(scale="batch", gate=0.5), "b": ComponentConfig()}
    groups = {"invalid_reward": declared}
    made = samples_of(
        [[0] * 4], components=components, configs=configs, failures=[None] * 3 + ["it failed"]
    )
    if declared is not None:  # it stays with its declared reward, and has no total
        components["b"][3] = None
    found = make_batch(made, rules(groups=groups, options=PLAIN)).advantages.tolist()
    low = (1 - 4 / 3) / ((14 / 9) ** 0.5 + EPS)  # the z-score of the worst answer, of 1, 3 and 0
    high = (3 - 4 / 3) / ((14 / 9) ** 0.5 + EPS)
    totals = np.array([low, high, low] + ([] if declared is None else [declared]))
    expected = (totals - totals.mean()) / (totals.std() + EPS)
    assert found[: len(totals)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_noise_among_wrong_answers_is_not_kept():
    options = GRPOOptions(advantage_clip=None, min_std=0.2)
    # Deviation 0.05, of answers that are all wrong: no low variance of a group that can do it.
    assert advantages([[0, -0.1]], groups={"no_signal": "keep"}, options=options) == [0.0, 0.0]
    assert advantages([[0.6, 0.5]], groups={"no_signal": "keep"}, options=options) != [0.0, 0.0]
