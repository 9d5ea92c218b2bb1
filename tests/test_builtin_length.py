"""The rewards on length and repetition, against numbers worked out by hand."""

import pytest

from grpo_engine.rewards.builtin import (
    length_normalized,
    length_penalty,
    repetition,
    soft_overlong,
)


def ids(*lengths: int) -> list[list[int]]:
    return [list(range(n)) for n in lengths]


def test_length_penalty_falls_in_a_line_from_target_to_most():
    got = length_penalty(ids(0, 10, 11, 12, 14, 15), target=10, most=14)
    assert got == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_soft_overlong_is_equation_13_of_dapo():
    # L_max 16, L_cache 4: 0 up to 12, then (12 - length) / 4, -1 beyond 16.
    got = soft_overlong(ids(0, 12, 13, 15, 16, 17, 40), max_length=16, buffer=4)
    assert got == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]


def test_soft_overlong_with_a_buffer_of_the_whole_length():
    assert soft_overlong(ids(0, 1, 4, 5), max_length=4, buffer=4) == [0.0, -0.25, -1.0, -1.0]


def test_length_normalized_is_lambda_for_right_and_at_most_zero_for_wrong():
    # Group 7: lengths 2 to 6, so lambda is 0.5, 0.25, 0, -0.5. Group 3: all of one length.
    got = length_normalized(
        ["a", "x", "a", "a", "x", "a"],
        ids(2, 3, 4, 6, 5, 5),
        ["a"] * 6,
        [7, 7, 7, 7, 3, 3],
        compare="exact",
    )
    assert got == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0]


def test_length_normalized_of_a_long_wrong_answer_is_negative():
    got = length_normalized(["a", "x"], ids(2, 6), ["a"] * 2, [0, 0], compare="exact")
    assert got == [0.5, -0.5]


def test_length_normalized_does_not_depend_on_the_order_of_the_samples():
    texts, lengths, groups = ["a", "a", "x", "a"], [4, 9, 8, 2], [1, 0, 0, 1]
    got = length_normalized(texts, ids(*lengths), ["a"] * 4, groups, compare="exact")
    # Group 0: lengths 9 and 8. Group 1: lengths 4 and 2.
    assert got == [-0.5, -0.5, 0.0, 0.5]


def test_length_normalized_leaves_out_what_can_not_be_judged():
    # The first has no readable gold; without its 100 tokens the others are 2 and 4 long.
    got = length_normalized(["42", "42", "41"], ids(100, 2, 4), ["??", "42", "42"], [0, 0, 0])
    assert got == [None, 0.5, -0.5]


def test_repetition_is_the_share_of_n_grams_seen_before():
    # 3-grams of 1 1 1 1 1: three, one different. Of 1 2 1 2 1: 121 212 121.
    got = repetition([[1] * 5, [1, 2, 1, 2, 1], [1, 2, 3, 4], [1, 1], []])
    assert got == [pytest.approx(-2 / 3), pytest.approx(-1 / 3), 0.0, 0.0, 0.0]


def test_repetition_scales_with_most_and_counts_n_grams_of_the_asked_length():
    assert repetition([[1, 2, 1, 2]], ngram=1, most=0.5) == [-0.25]
    assert repetition([[1, 2, 1, 2]], ngram=2, most=3.0) == [pytest.approx(-1.0)]
    assert repetition([[1, 2, 1, 2]], ngram=5) == [0.0]
