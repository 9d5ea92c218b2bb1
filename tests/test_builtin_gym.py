"""Tasks and rewards of reasoning-gym, by a stand-in with its scorers' traps."""

import json
import sys
import types
from dataclasses import dataclass

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.builtin import gym, reasoning_gym, reasoning_gym_tasks


@dataclass
class Config:
    """Of all stand-ins; the real ones check themselves and raise as dataclasses do."""

    seed: int | None = None
    size: int = 500
    top: int = 9

    def validate(self):
        assert self.top > 0, "top must be positive"


class ChainSum:
    """The default scorer: full marks for the gold text, a share for a text that holds it."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, i):
        a, b = self.config.seed + i, self.config.top
        return {
            "question": f"{a} + {b} =",
            "answer": str(a + b),
            "metadata": {"pair": (a, b), "by": {a: "a"}, "list": [[a]]},
        }

    def score_answer(self, answer, entry):
        gold = entry["answer"]
        if answer == gold:
            return 1.0
        return len(gold) / len(answer) if gold in answer else 0.0


class Grid(ChainSum):
    """Compares with a tuple of its metadata, reads its configuration, pays 0.01 for nothing."""

    def score_answer(self, answer, entry):
        pair = entry["metadata"]["pair"] + (self.config.top,)
        return 1.0 if tuple(map(int, answer.split())) == pair else 0.01


class Key(ChainSum):
    """Looks up a number that JSON would make a text."""

    def score_answer(self, answer, entry):
        return float(answer == entry["metadata"]["by"][entry["metadata"]["pair"][0]])


class Tolerant(ChainSum):
    """bool(any text) is True."""

    def score_answer(self, answer, entry):
        return float(bool(answer) == bool(entry["answer"]))


class Broken(ChainSum):
    def score_answer(self, answer, entry):
        raise RuntimeError


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """A module reasoning_gym with these data sets."""
    sets = {"sum": ChainSum, "grid": Grid, "key": Key, "any": Tolerant, "broken": Broken}

    def create_dataset(name, **options):
        config = Config(**options)
        config.validate()
        return sets[name](config)

    module = types.ModuleType("reasoning_gym")
    module.factory = types.SimpleNamespace(DATASETS=sets)
    module.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    gym._dataset.cache_clear()
    yield
    gym._dataset.cache_clear()


def scores(name, texts, row=0, partial=False, **config):
    entry = reasoning_gym_tasks(name, row + 1, 7, **config)[row]["gym_entry"]
    return reasoning_gym(texts, [entry] * len(texts), partial=partial)


def test_tasks_are_rows_of_the_data_set():
    rows = reasoning_gym_tasks("sum", 2, 7, top=3)
    assert [(r["prompt"], r["answer"]) for r in rows] == [("7 + 3 =", "10"), ("8 + 3 =", "11")]
    assert rows == reasoning_gym_tasks("sum", 2, 7, top=3)
    packed = json.loads(rows[0]["gym_entry"])
    assert (packed["dataset"], packed["config"]) == ("sum", {"top": 3})


def test_the_answer_is_taken_out_before_it_is_scored():
    # Gold 16. Without that, the substring rule would pay 2 / 16 for "The answer is 16".
    texts = [
        "16",
        "The answer is 16.",
        "the answer: **16**",
        "16 no\nanswer is 15",
        "The answer is 3. No, the answer is: $16$.\nDone.",
        "Answer:\n16\nDone.",
        "<answer>15</answer> then <answer> 16 </answer> the answer is 1",
        "<answer>16</answer><answer>15</answer>",
        r"so \boxed{15}. No: \boxed{16}, the answer is 3",
        r"\boxed{\frac{1}{2}}",
        "First 7, then 9.\n16",
        "First 16, then 9.\n7",
        "16 16 16",
        "",
        [{"role": "assistant", "content": "<answer>16</answer>"}],
    ]
    assert scores("sum", texts) == [1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1]


def test_nested_braces_and_an_open_box():
    assert gym._answers(r"\boxed{\frac{1}{2}} and \boxed{3") == [r"\frac{1}{2}"]
    assert set(gym._answers(r"\boxed{3")) == {r"\boxed{3"}


def test_partial_marks_only_when_asked_for():
    # "16" in a text of 8 is 2 / 8; countdown's 0.01 for nothing is not paid for an empty answer.
    assert scores("sum", ["xx 16 xx"]) == [0.0]
    assert scores("sum", ["xx 16 xx", "", "16"], partial=True) == [0.25, 0.0, 1.0]
    assert scores("grid", ["1 2 3", "<answer></answer>"], partial=True) == [0.01, 0.0]


def test_a_grid_of_several_lines_counts_as_a_whole():
    assert scores("grid", ["7\n3\n3", "so\n7 3 3", "answer:\n7\n3\n3", "7\n3"], top=3) == [
        1,
        1,
        1,
        0,
    ]


def test_tuples_number_keys_and_the_configuration_reach_the_scorer():
    assert scores("grid", ["8 4 4"], row=1, top=4) == [1.0]
    assert scores("key", ["a", "b"]) == [1.0, 0.0]


def test_a_scorer_that_fails_on_an_answer_says_wrong_and_on_the_gold_none():
    assert scores("grid", ["no number"]) == [0.0]
    assert scores("broken", ["16"]) == [None]


def test_a_scorer_that_pays_for_any_text_is_refused():
    with pytest.raises(UserError, match="scorer of reasoning-gym's any gives full marks to any"):
        reasoning_gym_tasks("any", 1, 0)


def test_what_reasoning_gym_can_not_make_is_refused():
    with pytest.raises(UserError, match=r"no data set 'sums'; there are any, broken, grid, key, s"):
        reasoning_gym_tasks("sums", 1, 0)
    with pytest.raises(UserError, match=r"can't make sum with .*unexpected keyword argument 'to'"):
        reasoning_gym_tasks("sum", 1, 0, to=3)
    with pytest.raises(UserError, match=r"can't make sum with .*top must be positive"):
        reasoning_gym_tasks("sum", 1, 0, top=0)
    with pytest.raises(UserError, match="reasoning_gym: size must be an integer of at least 1"):
        reasoning_gym_tasks("sum", 0, 0)


@pytest.mark.parametrize("packed", ["{", None, '{"entry": {}}', "3"])
def test_a_row_of_other_data_is_refused(packed):
    with pytest.raises(UserError, match=r"the column gym_entry holds .* never wrote"):
        reasoning_gym(["16"], [packed])


def test_without_the_package_it_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning-gym needs .*'grpo-engine\[gym\]'"):
        reasoning_gym([], [])
