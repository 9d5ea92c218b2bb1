"""The weight of the KL, step by step."""

import json

import pytest

from grpo_engine.errors import UserError
from grpo_engine.guards import KlConfig, KlController


def test_fixed_stays():
    control = KlController(KlConfig(), 0.04)
    for step in (1, 2, 500):
        control.observe(9.0)
        assert control.beta(step) == 0.04


def test_decay_is_a_line():
    control = KlController(KlConfig(mode="decay", final=0.01, over=4), 0.05)
    assert [control.beta(s) for s in (1, 2, 3, 4, 5, 6, 99)] == pytest.approx(
        [0.05, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01]
    )


def test_decay_may_end_at_zero():
    control = KlController(KlConfig(mode="decay", final=0.0, over=1), 0.05)
    assert (control.beta(1), control.beta(2)) == (0.05, 0.0)


@pytest.mark.parametrize(
    "kl, factor",
    [
        (0.1, 1.0),
        (0.11, 1.01),  # 10 % over the target, times the rate of 0.1
        (0.095, 0.995),
        (0.12, 1.02),
        (5.0, 1.02),  # the error is clipped to 0.2
        (0.0, 0.98),
        (float("nan"), 1.0),
        (float("inf"), 1.0),
    ],
)
def test_adaptive_goes_against_the_error(kl, factor):
    control = KlController(KlConfig(mode="adaptive", target=0.1, rate=0.1), 0.04)
    control.observe(kl)
    assert control.beta(2) == pytest.approx(0.04 * factor)


def test_adaptive_stays_within_its_bounds_and_comes_back_at_once():
    config = KlConfig(mode="adaptive", target=0.1, least=0.5, most=2.0)
    control = KlController(config, 0.04)
    for _ in range(200):
        control.observe(50.0)
        assert control.beta(1) <= 0.08
    assert control.beta(1) == 0.08
    control.observe(0.0)
    assert control.beta(1) == pytest.approx(0.08 * 0.98)
    for _ in range(200):
        control.observe(0.0)
    assert control.beta(1) == 0.02


@pytest.mark.parametrize("mode", [{}, {"mode": "decay", "final": 0.04, "over": 3}])
def test_a_guard_raises_beta_up_to_the_bound(mode):
    control = KlController(KlConfig(most=5.0, **mode), 0.04)
    found = []
    for _ in range(4):
        control.raise_beta()
        found.append(control.beta(1))
    assert found == pytest.approx([0.08, 0.16, 0.2, 0.2])


def test_a_controller_goes_on_where_it_stopped():
    config = KlConfig(mode="adaptive")
    whole, before, after = (KlController(config, 0.04) for _ in range(3))
    for kl in (0.3, 0.05, 0.2):
        whole.observe(kl)
        before.observe(kl)
    after.load(json.loads(json.dumps(before.state())))
    whole.observe(0.13)
    after.observe(0.13)
    assert after.beta(5) == whole.beta(5) != 0.04


@pytest.mark.parametrize(
    "config, words",
    [
        ({"mode": "linear"}, "kl.mode must be fixed, decay or adaptive; given 'linear'"),
        ({"mode": "decay", "over": 3}, "kl.mode decay needs kl.final"),
        ({"mode": "decay", "final": 0.1}, "kl.mode decay needs kl.over"),
        ({"final": 0.1}, "kl.final goes with kl.mode decay, which is fixed: leave it out"),
        ({"mode": "adaptive", "over": 3}, "kl.over goes with kl.mode decay, which is adaptive"),
        ({"mode": "decay", "final": -0.1, "over": 3}, "kl.final must be at least 0"),
        ({"mode": "decay", "final": 0.1, "over": 0}, "kl.over must be at least 1"),
        ({"target": 0.0}, "kl.target must be finite and above 0"),
        ({"rate": 2.0}, "kl.rate must be above 0 and at most 1"),
        ({"least": 1.5}, "kl.least must be above 0 and at most 1"),
        ({"most": 0.5}, "kl.most must be finite and at least 1"),
        ({"raise_by": 1.0}, "kl.raise_by must be finite and above 1"),
    ],
)
def test_a_config_without_a_meaning_is_refused(config, words):
    with pytest.raises(UserError, match=words):
        KlConfig(**config)


@pytest.mark.parametrize("mode", [{"mode": "adaptive"}, {"mode": "decay", "final": 0, "over": 2}])
def test_a_weight_of_zero_has_nothing_to_move(mode):
    with pytest.raises(UserError, match=r"and loss\.beta is 0"):
        KlController(KlConfig(**mode), 0.0)
    assert KlController(KlConfig(), 0.0).beta(3) == 0.0
