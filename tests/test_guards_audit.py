"""The audit of the highest-rewarded samples, and what shows reward hacking."""

import pytest

from grpo_engine.guards import audit
from grpo_engine.guards.audit import Evaluation, heldout_share


def row(reward, completion="4", **changes):
    base = {"length": 2, "repetition": 0.0, "components": {"exact": reward}, "step": 5}
    return {"reward": reward, "completion": completion, "task_row": 7, **base, **changes}


def test_the_table_of_the_highest():
    rows = [
        row(0.5, "b"),
        row(None, "never paid"),
        row(1.0, "a|b\nc", length=9, repetition=0.25, components={"exact": 1.0, "format": None}),
        row(0.5, "second of equals"),
        row(0.1, "low"),
        row(0.5, "b", step=9),
        row(0.5, "b", task_row=8),
    ]
    assert audit(rows, count=2) == (
        "| reward | times | length | repetition | components | step | task_row | completion |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        '| 1.000 | 1 | 9 | 0.250 | exact 1.000, format - | 5 | 7 | "a\\|b\\nc" |\n'
        '| 0.500 | 2 | 2 | 0.000 | exact 0.500 | 5 | 7 | "b" |\n'
    )


def test_the_table_shows_twenty_and_cuts_long_answers():
    table = audit([row(1.0, "x" * 1000, task_row=i) for i in range(30)]).splitlines()
    assert len(table) == 22
    assert table[2].endswith(f'| "{"x" * 160}..." |')


# Halves of 5 are the first and the last two: training 0.4 to 0.8, held-out 0.5 to 0.52.
GAMED = [(0.3, 0.5), (0.5, 0.5), (0.6, 0.9), (0.7, 0.52), (0.9, 0.52)]


def share(pairs: list[tuple[float, float]], noise: float = 0.0, every: int = 20) -> float | None:
    """Of evaluations with (training, held-out) rewards, training being the mean of 20 steps."""
    made = [Evaluation(i * every, pair[0], 20, pair[1]) for i, pair in enumerate(pairs)]
    return heldout_share(made, noise)


def test_held_out_gain_as_a_share_of_the_training_gain():
    assert share(GAMED) == pytest.approx(0.05)
    # Both rise: 0.3 of 0.4.
    assert share([(0.4, 0.5), (0.5, 0.6), (0.8, 0.8)]) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "evaluations",
    [
        [],
        GAMED[:2],
        [(0.8, 0.5), (0.8, 0.5), (0.95, 0.5)],  # up by 0.15 of 0.95: less than a fifth
        [(0.8, 0.5), (0.6, 0.4), (0.2, 0.1)],  # both fall
    ],
)
def test_no_rise_to_explain(evaluations):
    assert share(evaluations) is None


def test_a_rise_is_above_two_standard_errors_and_not_of_a_few_steps():
    # A mean of 20 steps is sure to noise / sqrt(20), a difference of two to sqrt(0.1) times noise;
    # the gain of 0.4 is twice that at 0.632.
    assert share(GAMED, noise=0.63) == pytest.approx(0.05)
    assert share(GAMED, noise=0.64) is None
    assert share(GAMED, every=5) == pytest.approx(0.05)
    assert share(GAMED, every=4) is None


def test_a_held_out_fall_is_the_clearest_case():
    assert share([(0.2, 0.6), (0.5, 0.5), (0.7, 0.4)]) == pytest.approx(-0.4)
