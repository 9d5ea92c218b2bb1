"""The reward math: forms of one answer, unreadable gold, partial credit, time-outs, threads."""

import threading

import math_verify
import pytest
from math_verify.errors import TimeoutException

from grpo_engine.rewards.builtin import math


def score(text, gold="42", **options):
    return math([text], [gold], **options)[0]


@pytest.mark.parametrize("text", ["the answer is 42", "42", r"\boxed{42}", "so $x=42$", "#### 42"])
def test_forms_of_one_answer_are_the_same(text):
    assert score(text) == 1.0
    assert score([{"role": "assistant", "content": text}]) == 1.0


@pytest.mark.parametrize("text", ["", "41", r"\boxed{}", "no idea", r"\boxed{1} \boxed{42}"])
def test_other_answers_are_wrong(text):
    assert score(text) == 0.0


def test_the_gold_of_gsm8k_counts_from_its_mark_on():
    gold = "The first answer is 7.\n#### 1/2"
    assert math(["0.5", "7"], [gold] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("gold", ["??", "", None])
def test_a_gold_answer_that_is_no_mathematics_gives_none(gold):
    assert score("42", gold) is None


def test_a_near_number_earns_its_share():
    # 5 % of 200 is 10: 210 and 190 lie at the edge.
    texts = ["200", "210", "190", "211", "189", r"$x = 210$", "x", "-200"]
    golds = ["200"] * len(texts)
    assert math(texts, golds) == [1.0, 0, 0, 0, 0, 0, 0, 0]
    assert math(texts, golds, near=0.3) == [1.0, 0.3, 0.3, 0, 0, 0.3, 0, 0]
    assert math(texts, golds, near=0.3, near_tolerance=0.06) == [1.0, *[0.3] * 5, 0, 0]


def test_near_is_by_the_size_of_a_negative_gold_and_nothing_is_near_zero():
    assert math(["-105", "105"], ["-100"] * 2, near=0.3) == [0.3, 0.0]
    assert math(["0.001", "0"], ["0"] * 2, near=0.3) == [0.0, 1.0]


def test_near_needs_a_number_on_both_sides():
    assert math(["$x+1$", "$2.1$"], ["$x$", "$x$"], near=0.3) == [0.0, 0.0]


def test_the_asked_form_earns_its_credit_beside_near_only_where_wrong():
    texts = [r"\boxed{200}", r"\boxed{210}", r"\boxed{7}", r"\boxed{}", "210", "7"]
    got = math(texts, ["200"] * 6, near=0.3, format_credit=0.1)
    assert got == [1.0, pytest.approx(0.4), 0.1, 0.0, 0.3, 0.0]


def test_it_works_in_a_thread_where_no_alarm_can_be_set():
    got = []
    thread = threading.Thread(
        target=lambda: got.extend(math(["the answer is 42", "40"], ["42", "42"], near=0.3))
    )
    thread.start()
    thread.join()
    assert got == [1.0, 0.3]


@pytest.mark.parametrize("name", ["parse", "verify"])
def test_a_time_out_gives_none_and_spares_the_others(monkeypatch, name):
    real = getattr(math_verify, name)

    def slow(*arguments, **options):
        assert options["raise_on_error"] and 5 in options.values()
        if any("k" in str(argument) for argument in arguments):
            raise TimeoutException
        return real(*arguments, **options)

    monkeypatch.setattr(math_verify, name, slow)
    assert math(["$2x$", "$3k$", "$4x$"], ["x + x"] * 3) == [1.0, None, 0.0]


def test_a_comparison_that_fails_is_wrong(monkeypatch):
    def broken(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(math_verify, "verify", broken)
    assert math(["$2x$", "$x+x$"], ["x + x"] * 2) == [0.0, 1.0]  # the second is the same text
