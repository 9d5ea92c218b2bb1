"""The built-ins that compare an answer: what counts as the same, and what a gold answer may be."""

import pytest

from grpo_engine.data import Task
from grpo_engine.errors import UserError
from grpo_engine.rewards.builtin import exact, fuzzy
from grpo_engine.rewards.builtin import math as math_reward
from grpo_engine.rewards.builtin.gym import read_entry
from grpo_engine.rewards.load import check_answers, load_rewards
from grpo_engine.sample_config import RewardConfig
from math_pairs import PAIRS


@pytest.mark.parametrize(("reward", "gold", "completion"), PAIRS)
def test_math_gives_what_a_person_would(reward, gold, completion):
    assert math_reward([completion], [gold]) == [reward]


@pytest.mark.parametrize("gold", dict.fromkeys(str(gold) for _, gold, _ in PAIRS))
def test_a_gold_answer_is_right_by_itself_bare_and_boxed(gold):
    if "####" in gold or "boxed" in gold:
        return
    bare = gold.removeprefix("$").removesuffix("$")
    assert math_reward([gold, f"\\boxed{{{bare}}}"], [gold] * 2) == [1.0, 1.0]


def test_builtins_take_chat_completions_and_whole_batches():
    texts = ["42", "the answer is 42", "41", "forty"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert exact(chats, [42] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert math_reward(chats, [42] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_a_gold_number_is_any_decimal_of_its_value_to_exact_and_fuzzy():
    completions = ["34", " 34.0 ", "34.5", "034", "3_4", "34 cm"]
    assert exact(completions, [34.0] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert exact(["0.0000001", "1e-07", "0"], [1e-07] * 3) == [1.0, 1.0, 0.0]
    assert exact(["34.0", "34"], ["34"] * 2) == [0.0, 1.0]  # a text is a text
    assert fuzzy(["34", "34.0"], [34.0] * 2, threshold=1.0) == [1.0, 1.0]


def test_a_list_means_any_of_its_answers():
    golds = [["34", "thirty-four"]] * 3
    assert exact(["34", "thirty-four", "['34', 'thirty-four']"], golds) == [1.0, 1.0, 0.0]
    assert fuzzy(["Thirty-Four"], golds[:1]) == [1.0]


def test_raw_rows_of_gsm8k_count_from_their_mark_on():
    gold = "She has 4 * 18 = <<4*18=72>>72.\n#### 72"
    assert exact(["72", gold], [gold] * 2) == [1.0, 0.0]
    assert math_reward(["72", "18"], [gold] * 2) == [1.0, 0.0]


NOWHERE = [
    ({"ground_truth": "34"}, "must be a text, a number"),
    ([["34"]], "must be a text, a number"),
    ([], "empty list"),
    (float("nan"), "no finite number"),
    ([1, float("inf")], "no finite number"),
    (" ", "it is empty"),
    ("The sum is 42.\n####", "it is empty"),
    (True, "write true and false as texts"),
]
NO_MATHEMATICS = [
    ("??", "no letter and no digit"),
    ("She sold 48 clips in April and then half as many in May.", "too long"),
]


@pytest.mark.parametrize("function", ["exact", "fuzzy", "math", "length_normalized", "ensemble"])
@pytest.mark.parametrize(("gold", "why"), NOWHERE)
def test_what_is_no_answer_is_refused_by_row_at_the_start(function, gold, why):
    members = {"members": ["math", "exact"]} if function == "ensemble" else {}
    rewards = load_rewards([RewardConfig(function, options=members)])
    tasks = [Task(3, "p", {"answer": "1"}), Task(7, "p", {"answer": gold})]
    with pytest.raises(UserError, match=f"row 7 of the data can't give: .*{why}"):
        check_answers(rewards, tasks)


@pytest.mark.parametrize(("gold", "why"), NO_MATHEMATICS)
def test_math_refuses_what_it_can_not_read_and_exact_takes_it(gold, why):
    tasks = [Task(n, "p", {"answer": gold}) for n in range(3)]
    with pytest.raises(UserError, match=rf"row 0 of the data \(and 2 more rows\) .*{why}"):
        check_answers(load_rewards([RewardConfig("math")]), tasks)
    with pytest.raises(UserError, match=why):
        check_answers(load_rewards([RewardConfig("length_normalized")]), tasks)
    check_answers(load_rewards([RewardConfig("exact")]), tasks)
    exactly = RewardConfig("length_normalized", options={"compare": "exact"})
    check_answers(load_rewards([exactly]), tasks)


@pytest.mark.parametrize("gold", [None, {}, [], float("nan"), True])
def test_called_by_itself_a_reward_gives_none_for_it(gold):
    for function in (exact, fuzzy, math_reward):
        assert function(["1"], [gold]) == [None]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([{"input": 1, "output": 2}], "tests are a text of asserts"),
        ("assert f(1 == 2", "it is no Python"),
    ],
)
def test_the_tests_of_python_tests_are_read_at_the_start_too(value, why):
    rewards = load_rewards([RewardConfig("python_tests")])
    good = [Task(3, "p", {"tests": ["assert f(1) == 2"]}), Task(4, "p", {"tests": None})]
    check_answers(rewards, good)
    with pytest.raises(UserError, match=f"'tests', which row 5 of the data can't give: .*{why}"):
        check_answers(rewards, [*good, Task(5, "p", {"tests": value})])


@pytest.mark.parametrize("entry", [None, "{}", "no JSON"])
def test_an_entry_that_no_gym_task_has_is_refused(entry):
    assert read_entry('{"dataset": "d", "config": {}, "entry": {}}') == ["d", {}, {}]
    with pytest.raises(ValueError, match="never wrote it"):
        read_entry(entry)
