"""Guards over a resumed run, with figures missing, and with a KL of exactly 0."""

import json

import numpy as np
import pytest

from grpo_engine.errors import UserError
from grpo_engine.guards import Context, Guards, GuardsConfig
from grpo_engine.guards.rules import GUARDS
from guard_runs import alarms, recorded, said, steady


@pytest.mark.parametrize("run", ["learning_rate", "length", "reference"])
def test_a_resumed_run_says_what_an_unbroken_one_says(run):
    lines, context = recorded(run)
    whole = [str(a) for a in alarms(lines, context, quiet=5)]
    for cut in range(1, len(lines)):
        before, after = (Guards(GuardsConfig(quiet=5), context) for _ in range(2))
        found = [str(a) for line in lines[:cut] for a in before.observe(line)]
        after.load(json.loads(json.dumps(before.state())))
        found += [str(a) for line in lines[cut:] for a in after.observe(line)]
        assert found == whole


def test_a_state_is_a_copy():
    guards = Guards(GuardsConfig(), Context())
    guards.observe(steady(1)[0])
    state = guards.state()
    kept = json.dumps(state)
    guards.observe(steady(1, 2, kl=5.0)[0])
    assert json.dumps(state) == kept


def test_a_guard_whose_figure_is_missing_is_silent():
    assert said([{"step": step} for step in range(1, 50)]) == []
    nothing = dict.fromkeys(steady(1)[0], None) | {"kl": float("nan")}
    assert said([{**nothing, "step": step} for step in range(1, 50)]) == []


def test_steps_are_counted_where_they_are_not_given():
    lines = [{k: v for k, v in line.items() if k != "step"} for line in steady(5, kl=2.0)]
    assert said(lines) == [(3, "kl")]


@pytest.mark.parametrize("number", [np.float32, np.float64, lambda x: np.asarray(x)])
def test_numbers_of_other_libraries_are_numbers(number):
    lines = steady(3, kl=number(2.0))
    assert said(lines) == [(3, "kl")]


def test_means_over_no_token_are_no_figures():
    idle = {"tokens": 0, "entropy": 0.0, "kl": 0.0, "advantage_abs": 0.0}
    assert said(steady(30, **idle)) == []
    assert said(steady(30, **idle | {"tokens": 5})) == [(3, "entropy_low"), (4, "kl_zero")]


def zero_kl(steps: int, first: int = 1, **changes: object) -> list[dict]:
    return steady(steps, first, kl=0.0, **changes)


def test_a_kl_of_zero_after_updates_is_said_and_ends_nothing():
    (alarm,) = alarms(zero_kl(4))
    # Step 1 is before the first update; steps 2 to 4 are after it.
    assert (alarm.step, alarm.guard, alarm.action) == (4, "kl_zero", None)
    assert (alarm.value, alarm.threshold) == (3, 3)
    assert alarm.causes[0][0].startswith("the reference follows the policy, or every update is")


# The first steps of default runs in bfloat16, 10,000 steps long: warm-ups of 300 to 1e-6 and 1e-5.
ROUNDED_AWAY = {
    "all weights": (1e-6, [0, 0, 0, 0, 0, 0]),
    "lora": (1e-5, [0, 0, 1.19e-6, 0, 0, 0]),
}


@pytest.mark.parametrize("peak, kls", ROUNDED_AWAY.values(), ids=ROUNDED_AWAY)
def test_updates_that_a_warm_up_rounds_away_say_nothing(peak, kls):
    lines = [
        {**line, "kl": kl, "lr": peak * line["step"] / 300}
        for line, kl in zip(steady(6), kls, strict=True)
    ]
    assert said(lines, Context(lr=peak)) == []


def test_half_the_peak_is_an_update_that_counts():
    for lr, found in ((0.99e-4, []), (1e-4, [(4, "kl_zero")])):
        assert said(zero_kl(4, lr=lr), Context(lr=2e-4)) == found


def test_no_guard_that_is_on_by_default_ends_a_run():
    on = [guard for guard in GUARDS if getattr(GuardsConfig(), guard.name) is not None]
    assert {guard.action for guard in on} == {None}


@pytest.mark.parametrize(
    "lines",
    [
        zero_kl(3),
        zero_kl(2) + steady(1, 3) + zero_kl(2, 4) + steady(1, 6),
        zero_kl(20, grad_norm=0.0),
        zero_kl(20, lr=0.0),
        zero_kl(20, skipped=1),
        zero_kl(20, beta=0.0),
    ],
    ids=["too few", "not in a row", "no gradient", "rate 0", "skipped", "no reference"],
)
def test_a_kl_of_zero_that_is_right(lines):
    assert said(lines) == []


def test_without_a_known_beta_a_kl_of_zero_says_nothing():
    lines = [{k: v for k, v in line.items() if k != "beta"} for line in zero_kl(5)]
    assert said(lines) == []
    assert said(lines, Context(beta=0.04)) == [(4, "kl_zero")]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"patience": 0}, "guards.patience must be at least 1; given 0"),
        ({"window": 5}, "guards.window must be at least 6; given 5"),
        ({"kl_zero": 0}, "guards.kl_zero must be at least 1; given 0"),
        ({"kl": -1.0}, "guards.kl must be finite and not negative, or null"),
        ({"kl": float("nan")}, "guards.kl must be finite and not negative, or null"),
        ({"no_signal": 1.5}, "guards.no_signal is a share and can't be above 1; given 1.5"),
    ],
)
def test_thresholds_without_a_meaning_are_refused(config, words):
    with pytest.raises(UserError, match=words):
        GuardsConfig(**config)
