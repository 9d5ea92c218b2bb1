"""Guards on recorded runs of the quickstart (tests/data/guards): collapses, and healthy ones."""

import pytest

from guard_runs import alarms, recorded, said

COLLAPSES = [
    ("temperature", "diversity", "temperature 0.2 is low", "sampling.temperature 1.0"),
    ("beta", "pull", "KL coefficient 10 pulls", "loss.beta 1"),
    ("learning_rate", "kl", "learning rate 0.02", "train.lr 0.002"),
    ("constant", "no_signal", "the reward was 0.5 for every sample so far", "grpo doctor"),
    ("length", "length_pay", "the reward pays for length", "a length penalty"),
    ("reference", "kl_zero", "the reference follows the policy", "a reference that is a frozen"),
]


@pytest.mark.parametrize("run, guard, cause, remedy", COLLAPSES)
def test_a_collapse_is_named_within_20_steps(run, guard, cause, remedy):
    first = alarms(*recorded(run))[0]
    assert first.guard == guard
    assert first.step <= 20
    assert first.shown
    assert first.causes[0][0].startswith(cause)
    assert first.causes[0][1].startswith(remedy)


@pytest.mark.parametrize("run, cause", [(run, cause) for run, _, cause, _ in COLLAPSES])
def test_whatever_else_speaks_names_the_same_cause_first(run, cause):
    for alarm in alarms(*recorded(run)):
        assert alarm.causes[0][0].startswith(cause), str(alarm)


@pytest.mark.parametrize("run", ["healthy0", "healthy1", "healthy2"])
def test_a_healthy_run_of_100_steps_triggers_none(run):
    lines, context = recorded(run)
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert alarms(lines, context) == []


def test_the_line_of_a_low_temperature():
    assert str(alarms(*recorded("temperature"))[0]) == (
        "step 3: guard diversity: unique 0.203 < 0.25. Likely: temperature 0.2 is low -> try "
        "sampling.temperature 1.0. Less likely: KL coefficient, gradient norm, learning rate."
    )


def test_the_lines_of_a_high_learning_rate():
    assert list(map(str, alarms(*recorded("learning_rate")))) == [
        "step 4: guard kl: KL 4 > 1. Likely: learning rate 0.02 (default 1e-06): the reward fell "
        "from 0.38 to 0.0091 in 3 steps -> try train.lr 0.002. Less likely: temperature, a reward "
        "that pays for length, gradient norm.",
        "step 5: also: no_signal 1, reward_std 0. The cause is that of step 4.",
        "step 6: also: reward_fall 1. The cause is that of step 4.",
        "step 7: also: diversity 0.144. The cause is that of step 4.",
    ]


def test_guards_with_one_cause_are_one_line():
    (alarm,) = alarms(*recorded("constant"))
    assert alarm.guards == ("no_signal", "reward_std")
    assert str(alarm).endswith(" malformed answers. Also: reward_std 0.")


def test_a_constant_reward_moves_nothing_so_its_kl_of_zero_is_no_error():
    lines, context = recorded("constant")
    assert all(line["kl"] == 0 and line["beta"] > 0 for line in lines)
    assert "kl_zero" not in {guard for _, guard in said(lines, context)}


def test_length_is_seen_without_the_correlation_too():
    lines, context = recorded("length")
    lines = [{k: v for k, v in line.items() if k != "reward_length"} for line in lines]
    found = [a for a in alarms(lines, context) if a.guard == "length_rise"]
    assert [a.step for a in found] == [17]
    assert found[0].causes[0][0] == "a reward that pays for length"
