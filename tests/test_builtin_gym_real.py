"""The reward of reasoning-gym with the package itself, where it is installed."""

import re

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.builtin import reasoning_gym, reasoning_gym_tasks

pytest.importorskip("reasoning_gym", reason="reasoning-gym is an optional extra")


def test_sums_are_right_or_wrong_and_nothing_between():
    for row in reasoning_gym_tasks("chain_sum", 3, 42, min_terms=2, max_terms=2):
        terms = re.findall(r"[+-]?\d+", row["prompt"].replace(" ", ""))
        total = sum(map(int, terms))
        texts = [f"The answer is {total}.", f"{total} {total}", f"{total + 1}", ""]
        assert row["answer"] == str(total)
        assert reasoning_gym(texts, [row["gym_entry"]] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["countdown", "rearc", "n_queens", "prime_factorization"])
def test_gold_answers_pass_and_nonsense_does_not(name):
    # countdown pays 0.01 for nothing, rearc compares tuples, prime_factorization raises on text.
    row = reasoning_gym_tasks(name, 1, 42)[0]
    gold = f"<answer>{row['answer']}</answer>"
    assert reasoning_gym([gold, "no idea"], [row["gym_entry"]] * 2) == [1.0, 0.0]


def test_a_scorer_that_pays_for_any_text_is_refused():
    with pytest.raises(UserError, match="full marks to any text"):
        reasoning_gym_tasks("game_of_life_halting", 1, 42)
