"""Wrong samples on purpose: how many, where, and that they are wrong."""

from collections import Counter

import pytest

from grpo_engine.curriculum import anchor_text, choose_groups
from grpo_engine.errors import UserError


def test_off_means_none():
    assert choose_groups(8, 64, 0.0, 0, 1) == []
    assert choose_groups(0, 0, 0.0, 0, 1) == []


def test_the_share_holds_in_the_mean_and_no_group_gets_two():
    chosen = [choose_groups(8, 64, 0.05, 0, step) for step in range(1000)]
    # 3.2 of 64: three or four. Standard error of the mean: 0.4 / sqrt(1000) = 0.013.
    assert {len(groups) for groups in chosen} == {3, 4}
    assert sum(map(len, chosen)) / 1000 == pytest.approx(3.2, abs=0.05)
    for groups in chosen:
        assert groups == sorted(set(groups)) and set(groups) <= set(range(8))
    # Spread over the groups: each has 400 of the 3200, standard deviation below 16.
    places = Counter(g for groups in chosen for g in groups)
    assert all(330 < places[group] < 470 for group in range(8))


@pytest.mark.parametrize(
    ("groups", "samples", "share", "most"),
    [
        (8, 64, 0.1, 6),  # 6.4, and seven would be more than a tenth
        (2, 64, 0.1, 2),  # at most one a group
        (10, 10, 0.1, 1),
        (5, 50, 0.1, 5),
        (20, 200, 0.05, 10),
    ],
)
def test_anchors_are_bounded(groups, samples, share, most):
    for step in range(50):
        assert len(choose_groups(groups, samples, share, 0, step)) == most


def test_a_step_without_room_for_one_is_refused():
    with pytest.raises(UserError, match=r"^anchors\.share is 0\.1, but a step of 9 samples has no"):
        choose_groups(3, 9, 0.1, 0, 1)


@pytest.mark.parametrize("share", [0.11, -0.05, 1.0, float("nan")])
def test_a_share_out_of_bounds_is_refused(share):
    with pytest.raises(UserError, match=r"^anchors\.share must be from 0 to 0\.1"):
        choose_groups(8, 64, share, 0, 1)


def test_groups_are_a_function_of_seed_and_step():
    chosen = {(s, k): choose_groups(32, 256, 0.05, s, k) for s in (0, 1) for k in range(10)}
    assert all(choose_groups(32, 256, 0.05, *key) == value for key, value in chosen.items())
    assert len({tuple(groups) for groups in chosen.values()}) == 20


def text(columns, column=None, others=(), seed=0, step=1, task=0) -> str:
    return anchor_text(columns, column, "answer", others, seed=seed, step=step, task=task)


def test_text_of_a_column_with_wrong_answers():
    assert text({"wrong": "5", "answer": "4"}, "wrong") == "5"
    row = {"wrong": ["3", "5", "22"], "answer": "4"}
    chosen = [text(row, "wrong", step=step) for step in range(60)]
    assert set(chosen) == {"3", "5", "22"}
    assert chosen == [text(row, "wrong", step=step) for step in range(60)]
    assert {text(row, "wrong", task=task) for task in range(40)} == {"3", "5", "22"}
    assert {text(row, "wrong", seed=seed) for seed in range(40)} == {"3", "5", "22"}


@pytest.mark.parametrize("columns", [{}, {"wrong": None}, {"wrong": []}])
def test_a_row_without_a_wrong_answer_is_named(columns):
    with pytest.raises(UserError, match=r"^anchors\.column: a row has no wrong answer.*'wrong'"):
        text(columns, "wrong", others=["5"])


def test_a_column_that_holds_no_texts_is_named():
    with pytest.raises(UserError, match=r"^anchors\.column: the column 'wrong' must hold"):
        text({"wrong": 5}, "wrong")


def test_without_a_column_it_is_an_answer_that_differs():
    others = ["4", " 4 ", 4, None, "5", 6]
    chosen = {text({"answer": "4"}, others=others, step=step) for step in range(60)}
    assert chosen == {"5", "6"}
    # One that differs is found wherever the search begins.
    for step in range(20):
        assert text({"answer": 4}, others=["4"] * 7 + ["9"] + ["4"] * 3, step=step) == "9"


@pytest.mark.parametrize("others", [[], ["4", " 4"], [None]])
def test_where_all_answers_are_the_same_there_is_no_anchor(others):
    with pytest.raises(UserError, match="no other task has an answer that differs from '4'"):
        text({"answer": "4"}, others=others)
