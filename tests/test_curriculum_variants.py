"""Wordings of a prompt: numbers by hand, nothing but the place is replaced, the seed chooses."""

from collections import Counter

import pytest

from grpo_engine.curriculum import Variants
from grpo_engine.errors import UserError

CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2", "name": "ann"},
]


def test_without_variants_a_prompt_is_as_it_is():
    variants = Variants()
    assert variants.count({"other": ["x"]}) == 1
    assert {variants.choose(task, {}, 0, 1) for task in range(20)} == {0}
    assert variants.apply("2+2=", {}, 0) == "2+2="
    assert variants.apply(CHAT, {}, 0) == CHAT


def test_rewordings_are_numbered_from_1_and_0_is_the_prompt():
    variants = Variants(column="other")
    columns = {"other": ["two and two", "2 plus 2"]}
    assert variants.count(columns) == 3
    texts = [variants.apply("2+2", columns, number) for number in range(3)]
    assert texts == ["2+2", "two and two", "2 plus 2"]


@pytest.mark.parametrize(
    ("columns", "count"), [({}, 1), ({"other": None}, 1), ({"other": []}, 1), ({"other": "a"}, 2)]
)
def test_a_task_may_have_no_rewordings_or_one(columns, count):
    assert Variants(column="other").count(columns) == count


def test_templates_replace_the_prompt_and_each_takes_each_wording():
    variants = Variants(["Q: {prompt}", "{prompt}", "{prompt}!{prompt}"], "other")
    columns = {"other": "b"}
    assert variants.count(columns) == 6
    texts = [variants.apply("a", columns, number) for number in range(6)]
    assert texts == ["Q: a", "a", "a!a", "Q: b", "b", "b!b"]


def test_braces_of_prompts_and_templates_are_text():
    variants = Variants(['{"q": "{prompt}", "n": {0}}'], "other")
    columns = {"other": "say {prompt} and {x}"}
    assert variants.apply("f{a} {prompt", columns, 0) == '{"q": "f{a} {prompt", "n": {0}}'
    # The place is filled once: one in the rewording stays.
    assert variants.apply("p", columns, 1) == '{"q": "say {prompt} and {x}", "n": {0}}'


def test_of_a_chat_only_the_last_user_message_changes():
    variants = Variants(["<{prompt}>"], "other")
    changed = variants.apply(CHAT, {"other": "two and two"}, 1)
    assert changed == [*CHAT[:3], {"role": "user", "content": "<two and two>", "name": "ann"}]
    assert CHAT[3]["content"] == "2+2"
    followed = [*CHAT, {"role": "tool", "content": "3"}]
    assert Variants(["<{prompt}>"]).apply(followed, {}, 0)[3]["content"] == "<2+2>"
    assert Variants(["<{prompt}>"]).apply(followed, {}, 0)[4] == followed[4]


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "system", "content": "Add."}],
        [CHAT[1], {"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_a_chat_without_a_text_of_the_user_is_refused(chat):
    with pytest.raises(UserError, match="no user message, or one that is no text"):
        Variants(["<{prompt}>"]).apply(chat, {}, 0)
    assert Variants(["{prompt}"]).apply(chat, {}, 0) == chat


def test_the_choice_is_a_function_of_seed_task_and_step():
    variants = Variants(["a{prompt}", "b{prompt}"], "other")
    columns = {"other": "x"}
    keys = [(task, seed, step) for task in range(40) for seed in (0, 1) for step in range(10)]
    chosen = {(t, s, k): variants.choose(t, columns, s, k) for t, s, k in keys}
    assert all(variants.choose(t, columns, s, k) == n for (t, s, k), n in reversed(chosen.items()))
    # 4 numbers in 800 draws: 200 each, with a standard deviation of 12.
    counts = Counter(chosen.values())
    assert set(counts) == {0, 1, 2, 3} and all(150 < count < 250 for count in counts.values())
    for axis in range(3):
        others = [key[:axis] + key[axis + 1 :] for key in keys]
        by_other = {other: set() for other in others}
        for key, other in zip(keys, others, strict=True):
            by_other[other].add(chosen[key])
        assert any(len(found) > 1 for found in by_other.values())


def test_a_template_without_the_place_is_refused():
    with pytest.raises(UserError, match=r"variants\.templates: 'Q: \{\}' has no \{prompt\}"):
        Variants(["{prompt}", "Q: {}"])


@pytest.mark.parametrize("value", [7, ["a", 7], [""], "", {"a": "b"}, [None]])
def test_a_column_that_holds_no_texts_is_refused(value):
    with pytest.raises(UserError, match=r"variants\.column: the column 'other' must hold"):
        Variants(column="other").count({"other": value})


@pytest.mark.parametrize("number", [-1, 2])
def test_a_number_that_a_task_does_not_have_is_refused(number):
    with pytest.raises(UserError, match=f"no variant {number} of 'p': it has 2"):
        Variants(column="other").apply("p", {"other": "q"}, number)
