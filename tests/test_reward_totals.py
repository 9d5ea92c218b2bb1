"""From components to totals: bounds, length, weights, gates; worked out by hand."""

import math

import numpy as np
import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.process import StepReward
from grpo_engine.rewards.total import prepare_components
from grpo_engine.sample_config import ComponentConfig

NAN = math.nan


def prepared(components, lengths=None, steps=None, **configs):
    samples = len(next(iter(components.values())))
    plain = {name: ComponentConfig() for name in components}
    return prepare_components(components, steps or {}, plain | configs, lengths or [1] * samples)


def total_of(components, floor=0.0, **rest) -> list[float]:
    return prepared(components, **rest).total(floor).tolist()


def test_weights_and_a_component_that_does_not_apply():
    found = total_of(
        {"a": [1.0, 0.5, None, None], "b": [2.0, None, 4.0, None]},
        a=ComponentConfig(weight=2.0),
        b=ComponentConfig(weight=-0.5),
    )
    # 2 - 1; 1; -2; nothing
    assert found[:3] == [1.0, 1.0, -2.0] and math.isnan(found[3])


def test_bounds_make_0_to_1_and_cut():
    # (x + 1) / 4
    found = total_of({"a": [-1.0, 0.0, 3.0, 7.0, -5.0]}, a=ComponentConfig(bounds=[-1.0, 3.0]))
    assert found == [0.0, 0.25, 1.0, 1.0, 0.0]


def test_length_normalised_reward():
    # Up to 4 tokens as it is, then by length / 4.
    found = total_of(
        {"a": [1.0, 1.0, 1.0, -2.0]}, lengths=[2, 4, 8, 16], a=ComponentConfig(per_tokens=4)
    )
    assert found == [1.0, 1.0, 0.5, -0.5]


def test_bounds_come_before_length():
    config = ComponentConfig(bounds=[0.0, 10.0], per_tokens=2)
    assert total_of({"a": [20.0, 5.0]}, lengths=[4, 4], a=config) == [0.5, 0.25]


def test_failed_gate_fixes_the_total_whatever_else_was_earned():
    components = {"form": [1.0, 0.4, 0.5, None], "value": [5.0, 100.0, None, 3.0]}
    gate = ComponentConfig(weight=0.0, gate=0.5)
    found = prepared(components, form=gate)
    # The third is just enough and has no other number: its gate alone, which weighs nothing. The
    # gate of the fourth does not apply.
    assert found.total(-1.0).tolist() == [5.0, -1.0, 0.0, 3.0]
    assert found.gate_failed == [None, "form", None, None]


def test_gate_is_judged_before_bounds():
    config = ComponentConfig(gate=2.0, bounds=[0.0, 1.0])
    assert total_of({"a": [1.5, 2.0]}, -9.0, a=config) == [-9.0, 1.0]


def test_first_gate_that_failed_is_named():
    components = {"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0]}
    gate = ComponentConfig(gate=0.5)
    assert prepared(components, a=gate, b=gate).gate_failed == ["b", "a", "a"]


def test_component_that_makes_a_sample_invalid_is_named():
    components = {"form": [0.0, 1.0, None]}
    found = prepared(components, form=ComponentConfig(valid_from=1.0))
    assert found.refused == ["form", None, None]


def test_total_counts_the_mean_of_steps_and_the_outcome_does_not():
    steps = {"s": [[StepReward(0, 1, 3.0), StepReward(1, 2, 1.0)], None]}
    components = {"s": [2.0, None], "a": [0.25, 0.5]}
    found = prepared(components, steps=steps, s=ComponentConfig(weight=0.5))
    assert found.total(0.0).tolist() == [1.25, 0.5]  # 0.5 x 2 + 0.25
    # Its steps reach the loss token by token: once is enough.
    assert found.outcome(found.values, 0.0).tolist() == [0.25, 0.5]


def test_sample_order_does_not_matter():
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=12).tolist() for name in "abc"}
    values["b"][3] = None
    lengths = rng.integers(1, 30, 12).tolist()
    configs = {
        "a": ComponentConfig(gate=-0.5),
        "b": ComponentConfig(weight=0.3, per_tokens=8),
        "c": ComponentConfig(bounds=[-1.0, 1.0], weight=-2.0),
    }
    order = rng.permutation(12)
    moved = {name: [column[i] for i in order] for name, column in values.items()}
    whole = np.array(total_of(values, lengths=lengths, **configs))
    found = total_of(moved, lengths=[lengths[i] for i in order], **configs)
    assert found == whole[order].tolist()


@pytest.mark.parametrize(
    "bounds", [[1.0, 1.0], [2.0, 1.0], [0.0], [0.0, 1.0, 2.0], [0.0, math.inf], [NAN, 1.0]]
)
def test_bounds_that_are_none_are_refused(bounds):
    with pytest.raises(UserError, match=r"rewards: bounds must be \[low, high\]"):
        ComponentConfig(bounds=bounds)
