"""Each guard at its threshold, on made-up runs whose figures are worked out beside them."""

from dataclasses import fields

import pytest

from grpo_engine.guards import Context, Guards, GuardsConfig
from grpo_engine.guards.causes import CAUSES
from grpo_engine.guards.rules import GUARDS
from guard_runs import alarms, said, steady

SETTINGS = {"patience", "quiet", "window", "agreed"}

# guard, figure, its threshold, and the first value on the side where it alarms
PLAIN = [
    ("no_signal", "no_signal", 0.9, 0.91),
    ("diversity", "unique", 0.25, 0.24),
    ("entropy_low", "entropy", 0.05, 0.049),
    ("kl", "kl", 1.0, 1.01),
    ("clip", "clip_region", 0.3, 0.31),
    ("length_pay", "reward_length", 0.8, 0.81),
    ("length_pay", "reward_length", -0.8, -0.81),
    ("repetition", "repetition", 0.4, 0.41),
    ("truncated", "truncated", 0.5, 0.51),
    ("invalid", "invalid", 0.2, 0.21),
    ("no_attempt", "empty", 0.2, 0.21),
    ("no_attempt", "loops", 0.2, 0.21),
    ("logp_gap", "logp_gap", 0.1, 0.11),
    ("reward_std", "reward_std", 0.0005, 0.00049),  # 0.001 of a largest reward of 0.5
    ("effective_group", "effective_group_size", 4, 3.9),  # of 8
    ("price", "tokens_per_signal_group", 640, 641),  # 20 groups of 8 samples of 4 tokens
]


@pytest.mark.parametrize("guard, figure, at, beyond", PLAIN)
def test_a_figure_beyond_its_threshold_for_three_steps(guard, figure, at, beyond):
    assert said(steady(8, **{figure: at})) == []
    assert said(steady(2, **{figure: beyond})) == []
    assert said(steady(8, **{figure: beyond})) == [(3, guard)]


@pytest.mark.parametrize(
    "guard, figure, at, beyond",
    [
        ("entropy_rise", "entropy", 1.0, 1.01),  # 2 x 0.5
        ("length_rise", "completion_length", 8.0, 8.1),  # 2 x 4
        ("length_fall", "completion_length", 2.0, 1.9),
        ("grad_norm", "grad_norm", 20.0, 20.1),  # 10 x the median of 2
    ],
)
def test_a_figure_beside_what_it_was(guard, figure, at, beyond):
    assert said(steady(5) + steady(3, 6, **{figure: at})) == []
    assert said(steady(5) + steady(3, 6, **{figure: beyond})) == [(8, guard)]


def test_a_jump_of_a_gradient_that_is_not_clipped_is_none():
    lines = steady(8, grad_norm=0.02) + steady(3, 9, grad_norm=0.9)
    assert said(lines) == [(11, "grad_norm")]
    unclipped = Guards(GuardsConfig(), Context(max_grad_norm=1.0))
    assert [alarm for line in lines for alarm in unclipped.observe(line)] == []


def test_every_threshold_has_a_guard_and_every_cause_is_used():
    assert {g.name for g in GUARDS} == {f.name for f in fields(GuardsConfig)} - SETTINGS
    assert {key for g in GUARDS for key in g.tried.split()} == set(CAUSES)


@pytest.mark.parametrize("name", [g.name for g in GUARDS])
def test_null_switches_a_guard_off(name):
    fault = {figure: beyond for guard, figure, _, beyond in PLAIN if guard == name}
    assert name not in {guard for _, guard in said(steady(30, **fault), **{name: None})}


def test_a_streak_that_breaks_begins_anew():
    lines = steady(2, kl=2.0) + steady(1, 3) + steady(2, 4, kl=2.0)
    assert said(lines) == []
    assert said([*lines, *steady(1, 6, kl=2.0)]) == [(6, "kl")]
    assert said(lines, patience=2) == [(2, "kl")]


def test_a_guard_that_spoke_keeps_quiet_and_then_speaks_again():
    assert said(steady(25, kl=2.0), quiet=10) == [(3, "kl"), (14, "kl"), (25, "kl")]


def test_groups_that_agree_on_what_is_right_need_no_diversity():
    solved = {"all_correct": 30, "all_wrong": 1}
    lines = steady(6, unique=0.15, entropy=0.01, no_signal=0.8, no_signal_causes=solved)
    assert said(lines) == []  # 0.8 * 1/31 = 0.026 agree on what is wrong
    assert said(lines, agreed=None) == [(3, "diversity"), (3, "entropy_low")]


def test_pull_is_the_force_of_the_kl_beside_that_of_the_advantage():
    # 2 * sqrt(2 * 0.02 * 4) = 0.8 against 0.8 / (1 - 0.2) = 1 in the groups with signal: 0.8
    lines = steady(6, beta=2.0, kl=0.02)
    (alarm,) = alarms(lines, patience=1)
    assert alarm.guard == "pull"
    assert alarm.value == pytest.approx(0.8)
    assert str(alarm).startswith(
        "step 6: guard pull: reward flat, KL's pull 0.8 > 0.5. Likely: KL coefficient 2 pulls 0.8 "
        "times as hard as the advantages -> try loss.beta 0.2. Less likely: learning rate."
    )


def test_pull_is_silent_while_the_reward_rises():
    rising = [{**line, "reward": 0.01 * line["step"]} for line in steady(20, beta=2.0, kl=0.02)]
    assert said(rising) == []


def test_the_kl_over_its_early_value_asks_for_a_higher_beta():
    config = {"kl_early_raise": 10, "kl": None}
    # Steps 1 to 4 don't count into the early value, which is 0.01.
    before = steady(4, kl=0.9) + steady(16, 5, kl=0.01)
    assert said(before + steady(4, 21, kl=0.1), **config) == []
    (alarm,) = alarms(before + steady(4, 21, kl=0.101), **config)
    assert (alarm.step, alarm.guard, alarm.action) == (23, "kl_early_raise", "raise_beta")
    assert alarm.value == pytest.approx(10.1)
    assert str(alarm).endswith(" Beta is raised.")


def test_the_early_kl_has_a_floor():
    config = {"kl_early_raise": 10}
    before = steady(20, kl=1e-6)
    assert said(before + steady(4, 21, kl=0.99e-3), **config) == []
    assert said(before + steady(4, 21, kl=1.01e-3), **config) == [(23, "kl_early_raise")]


@pytest.mark.parametrize("second, stops", [(0.61, False), (0.6, True), (0.5, True)])
def test_the_kl_over_its_early_value_stops_a_run_that_gains_nothing_held_out(second, stops):
    lines = steady(20, kl=0.01) + steady(4, 21, kl=0.051)
    lines[9]["eval_reward"], lines[20]["eval_reward"] = 0.6, second
    found = alarms(lines, kl_early_stop=5)
    assert [(a.step, a.guard, a.action) for a in found] == (
        [(23, "kl_early_stop", "stop")] if stops else []
    )
    assert all(str(a).endswith(" The run stops.") for a in found)


def test_the_kl_guard_of_the_early_value_is_off_unless_asked_for():
    assert said(steady(20, kl=1e-4) + steady(10, 21, kl=0.09)) == []


def test_a_kl_that_rises_while_the_reward_does_not():
    # The window of 20 lies past step 20 at step 40; its halves' medians differ by 0.11.
    late = steady(20) + steady(10, 21, kl=0.05) + steady(10, 31, kl=0.16)
    assert said(late, patience=1) == [(40, "kl_no_gain")]
    assert said([*late[:30], *steady(10, 31, kl=0.14)], patience=1) == []
    gaining = [*late[:30], *({**line, "reward": 0.6} for line in late[30:])]
    assert said(gaining, patience=1) == []


def test_a_fall_of_the_reward():
    # The best is 0.5, half of it 0.25. At step 13 the mean of three is down by 0.13, which noise
    # (0.4 / sqrt(18) a step, of ten steps) may have made; at step 14 by 0.27.
    assert said(steady(12) + steady(12, 13, reward=0.26)) == []
    found = alarms(steady(12) + steady(12, 13, reward=0.1), Context(lr=2e-3, default_lr=1e-5))
    assert [a.guard for a in found] == ["reward_fall"]
    assert found[0].causes[0] == (
        "learning rate 0.002 (default 1e-05): the reward fell from 0.5 to 0.1 in 2 steps",
        "train.lr 0.0002",
    )


def test_a_fall_within_the_noise_is_none():
    noisy = [0.9, 0.1, 0.8, 0.2, 0.9, 0.1, 0.3, 0.1]
    lines = [{**line, "reward": r} for line, r in zip(steady(8), noisy, strict=True)]
    assert said(lines, patience=1) == []


def test_a_reward_about_zero_is_measured_by_its_spread():
    # From 0.05 to -0.1 is three times the best, and three eighths of the spread of 0.4.
    assert said(steady(12, reward=0.05) + steady(12, 13, reward=-0.1)) == []
    assert said(steady(12, reward=0.05) + steady(12, 13, reward=-0.2))[0][1] == "reward_fall"


def test_a_gradient_that_jumps_after_a_crash_is_no_cause_of_its_own():
    lines = steady(8) + steady(4, 9, reward=0.0) + steady(3, 13, reward=0.0, unique=0.1)
    lines[-1]["grad_norm"] = 50.0
    last = alarms(lines)[-1]
    assert (last.step, last.guard) == (15, "diversity")
    assert last.causes[0][0].startswith("learning rate 0.0002 (default 1e-06): the reward")
    calm = [{**line, "reward": 0.5} for line in lines]
    assert alarms(calm)[-1].causes[0][0] == "gradient norm 50 is 25 times its median"


def test_a_band_that_falls_is_named():
    before, after = {"easy": 0.9, "hard": 0.1}, {"easy": 0.4, "hard": 0.1}
    lines = steady(12, reward_by_band=before) + steady(12, 13, reward_by_band=after)
    found = alarms(lines)
    assert [a.guard for a in found] == ["band_fall"]
    assert found[0].figure == "fall of the reward of easy"
    assert found[0].value == pytest.approx(0.5 / 0.9)
    # The hard band losing all it had is a ninth of what the easy one has.
    gone = steady(12, 13, reward_by_band={"easy": 0.9, "hard": 0.0})
    assert said(lines[:12] + gone) == []


def test_answers_that_are_no_attempt_are_named():
    (alarm,) = alarms(steady(3, empty=0.25, loops=0.3, repetition=0.35))
    assert str(alarm).startswith(
        "step 3: guard no_attempt: share of completions that are loops of a few tokens 0.3 > 0.2. "
        "Likely: 35% of the 4-grams are repetitions -> try sampling.repetition_penalty 1.1"
    )
    (alarm,) = alarms(steady(3, empty=0.25, loops=0.2))
    assert alarm.figure == "share of completions that are empty"


def test_the_part_with_the_largest_kl_is_named():
    parts = {"kl_by_length": {"1-1": 0.1, "2-3": 3.1}, "kl_by_band": {"hard": 2.0}}
    (alarm,) = alarms(steady(3, **parts))
    assert (alarm.guard, alarm.figure, alarm.value) == ("kl_part", "KL of length 2-3", 3.1)


@pytest.mark.parametrize(
    "causes, first",
    [
        ({"all_wrong": 9, "all_correct": 1}, "90% of the groups without signal are all wrong"),
        ({"all_malformed": 10}, "100% of the groups without signal are all malformed"),
        ({"all_correct": 10}, "100% of the groups without signal are all correct"),
        ({"environment": 10}, "100% of the groups without signal had a failing environment"),
        ({"low_variance": 10}, "100% of the groups without signal have rewards that are nearly"),
    ],
)
def test_why_groups_have_no_signal(causes, first):
    (alarm,) = alarms(steady(3, no_signal=0.95, no_signal_causes=causes))
    assert alarm.causes[0][0].startswith(first)


def test_without_evidence_the_line_says_where_to_look_first():
    (alarm,) = alarms(steady(3, unique=0.1))
    assert str(alarm) == (
        "step 3: guard diversity: unique 0.1 < 0.25. Look first at: temperature -> try "
        "sampling.temperature 1.2. Less likely: KL coefficient, gradient norm, learning rate."
    )


def test_a_regression_set_that_falls():
    lines = steady(4)
    lines[0]["eval_regression"], lines[2]["eval_regression"] = 0.8, 0.69
    assert said(lines) == [(3, "regression_fall")]
    lines[2]["eval_regression"] = 0.71
    assert said(lines) == []


def test_what_follows_a_crash_keeps_its_cause_until_it_is_over():
    lines = steady(8) + steady(4, 9, reward=0.0)
    # Alone it would be blamed on length, and the price on prompts that are too hard.
    wrong = {"all_wrong": 3}
    later = {"entropy": 1.5, "tokens_per_signal_group": 700, "no_signal_causes": wrong}
    pays = {"reward_length": 0.9, "invalid": 0.3}
    found = alarms(lines + steady(3, 13, reward=0.0, **later, **pays))
    assert [str(a).partition(". Likely")[0] for a in found] == [
        "step 12: guard reward_fall: fall of the reward 1 > 0.5",
        "step 15: also: entropy_rise 3, price 21.9. The cause is that of step 12.",
        "step 15: guard length_pay: correlation of reward and length 0.9 > 0.8",
        "step 15: guard invalid: share of samples without a reward 0.3 > 0.2",
    ]
    assert [a.since for a in found] == [None, 12, None, None]
    over = steady(12, 13, reward=0.5) + steady(3, 25, **later, **pays)
    assert [a.causes[0][0][:30] for a in alarms(lines + over)][1:] == [
        "the reward pays for length (co",  # entropy_rise, and length_pay
        "30% of the samples got no rewa",
        "100% of the groups without sig",  # price
    ]


def test_a_guard_that_acts_keeps_its_line():
    early = {"kl_early_raise": 10.0, "kl": 1.0}
    lines = steady(8) + steady(12, 9, kl=0.01) + steady(6, 21, kl=1.5, reward=0.0)
    found = alarms(lines, **early)
    acting = [a for a in found if a.guard == "kl_early_raise"]
    assert [(a.action, a.also) for a in acting] == [("raise_beta", ())]
    assert all(str(a).endswith(" Beta is raised.") for a in acting)


def test_a_correlation_that_changes_its_sign_is_none():
    lines = [{**line, "reward_length": (-1) ** line["step"]} for line in steady(20)]
    assert said(lines) == []


def test_shortness_that_pays_is_put_down_to_cut_answers_where_most_are_cut():
    for cut, cause in (
        (0.4, "the reward pays for shortness (correlation -0.90 inside groups)"),
        (0.6, "60% of the completions are cut by max_tokens"),
    ):
        found = alarms(steady(3, reward_length=-0.9, truncated=cut))
        assert [a.causes[0][0] for a in found if a.guard == "length_pay"] == [cause]


def test_training_reward_up_while_held_out_stays():
    # Means of the 20-step window at the evaluations: 0.4, 0.4, 0.8; held-out gains 0.03 of 0.4.
    lines = steady(40, reward=0.4) + steady(20, 41, reward=0.8)
    for at, reward in ((20, 0.5), (40, 0.5), (60, 0.53)):
        lines[at - 1]["eval_reward"] = reward
    (alarm,) = alarms(lines)
    assert (alarm.step, alarm.guard) == (60, "hacking")
    assert alarm.value == pytest.approx(0.03 / 0.4)
    lines[-1]["eval_reward"] = 0.55
    assert said(lines) == []


def test_a_gain_of_a_few_noisy_steps_is_not_called_hacking():
    # Evaluated before the first step, after two and after four: 0, 0.25 and 0.5 of a reward.
    lines = [{**line, "reward": r} for line, r in zip(steady(5), (0, 0, 0.5, 0.5, 1), strict=True)]
    for at in (0, 2, 4):
        lines[at]["eval_reward"] = 0.5
    assert said(lines, hacking=0.1) == []
