"""The built-ins that compare an answer: what counts as the same."""

import pytest

from grpo_engine.rewards.builtin import exact
from grpo_engine.rewards.builtin import math as math_reward

MATH_CASES = [
    ("42", "42", 1.0),
    ("the answer is 42", "42", 1.0),
    ("So we get \\boxed{42}", "42", 1.0),
    ("6 * 7 = 42.", 42, 1.0),
    ("\\boxed{\\frac{1}{2}}", "1/2", 1.0),
    ("0.5", "1/2", 1.0),
    ("It is $\\frac{2}{4}$.", "0.5", 1.0),
    ("1,234", "1234", 1.0),
    ("72", "Natalia sold 48 + 24 = 72 clips.\n#### 72", 1.0),
    ("24", "Natalia sold 48 + 24 = 72 clips.\n#### 72", 0.0),
    ("the answer is 41. Wait, the answer is 42", "42", 1.0),
    ("the answer is 42. Wait, the answer is 41", "42", 0.0),
    ("43", "42", 0.0),
    ("-42", "42", 0.0),
    ("1/3", "1/2", 0.0),
    ("no idea", "42", 0.0),
    ("", "42", 0.0),
    ("42", "no number", None),
    ("42", "", None),
    ("42", "The sum is 42 ####", None),
]


@pytest.mark.parametrize(("completion", "gold", "reward"), MATH_CASES)
def test_math_compares_values_not_spellings(completion, gold, reward):
    assert math_reward([completion], [gold]) == [reward]


def test_builtins_take_chat_completions_and_whole_batches():
    texts = ["42", "the answer is 42", "41", "forty"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert exact(chats, [42] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert math_reward(chats, [42] * 4) == [1.0, 1.0, 0.0, 0.0]
