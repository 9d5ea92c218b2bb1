"""Rewards by name: from files and built in, what can't be used, and their versions."""

import re
from pathlib import Path

import pytest

from grpo_engine.data import Task
from grpo_engine.errors import UserError
from grpo_engine.rewards.load import check_answers, load_rewards
from grpo_engine.rewards.score import Scorer
from grpo_engine.sample_config import RewardConfig, ScoringConfig
from scoring import ARGUMENTS, of_file, totals


def test_function_of_a_file_keeps_its_name_and_weight(tmp_path):
    (tmp_path / "my.py").write_text("def shape(completions, **_):\n    return [0.5, 1, 1.5, 2]\n")
    scores = of_file(f"{tmp_path}/my.py:shape", weight=0.5)
    assert totals(scores) == [0.25, 0.5, 0.75, 1.0]
    assert scores.components == {"shape": [0.5, 1.0, 1.5, 2.0]}


def test_file_may_define_a_dataclass_under_postponed_annotations(tmp_path):
    # dataclasses looks its module up in sys.modules.
    (tmp_path / "my.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Rule:\n"
        "    value: float = 0.5\n"
        "def f(completions, **_):\n"
        "    return [Rule().value] * len(completions)\n"
    )
    assert totals(of_file(f"{tmp_path}/my.py:f")) == [0.5] * 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("my.py", None, "no such reward file: {folder}/my.py"),
        ("my.py", "def g(**_): return []", "{folder}/my.py has no function f"),
        ("my.py", "f = 3", "{folder}/my.py has no function f"),
        ("my.py", "import absent_module", "my.py raised ModuleNotFoundError: .*absent_module"),
        ("my.py", "def f(:", "my.py raised SyntaxError"),
        ("my.txt", "def f(**_): return []", "{folder}/my.txt is no Python file"),
    ],
)
def test_file_that_cannot_be_used_says_why(tmp_path: Path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message.format(folder=re.escape(str(tmp_path)))):
        of_file(f"{tmp_path / name}:f")


def test_two_rewards_of_one_name_are_an_error(tmp_path):
    (tmp_path / "my.py").write_text("def exact(**_): return []")
    configs = [RewardConfig("exact"), RewardConfig(f"{tmp_path}/my.py:exact")]
    with pytest.raises(UserError, match="two rewards are called exact"):
        load_rewards(configs)


def test_unknown_builtin_names_those_there_are():
    with pytest.raises(UserError, match=r"no built-in reward 'maths'; there are exact, .*ensemble"):
        load_rewards([RewardConfig("maths")])


@pytest.mark.parametrize("function", ["exact", "math"])
def test_row_without_an_answer_is_an_error_that_names_row_and_column(function):
    tasks = [Task(0, "p", {"gold": "1"}), Task(5, "p", {"gold": None})]
    with pytest.raises(UserError, match=f"reward {function} .*'gold', which row 5 .*lacks"):
        check_answers(load_rewards([RewardConfig(function)], "gold"), tasks)
    with pytest.raises(UserError, match="'answer', which row 0 "):
        check_answers(load_rewards([RewardConfig(function)]), tasks)


def test_exact_compares_the_answer_column_as_text():
    arguments = ARGUMENTS | {"completions": ["42", " 42\n", "042", "The answer is 42"]}
    with Scorer(load_rewards([RewardConfig("exact")], "gold")) as scorer:
        scores = scorer.score(arguments, {"gold": [42] * 4})
    assert totals(scores) == [1, 1, 0, 0]


def test_unreadable_gold_leaves_only_its_own_samples_out():
    arguments = ARGUMENTS | {"completions": ["42", "42", "41", "42"]}
    columns = {"answer": ["42", "??", "42", "??"]}
    assert totals(of_file("math", arguments, columns)) == [1, None, 0, None]


def version(content: str, tmp_path: Path, scoring: ScoringConfig | None = None, **config) -> str:
    path = tmp_path / "my.py"
    path.write_text(content)
    rewards = load_rewards([RewardConfig(f"{path}:f", isolate=False, **config)])
    return Scorer(rewards, scoring).version


def test_version_is_that_of_the_content_and_of_what_is_made_of_the_numbers(tmp_path):
    plain, other = "def f(**_): return [1.0]\n", "def f(**_): return [2.0]\n"
    first = version(plain, tmp_path)
    same = [
        version(plain, tmp_path),
        version(plain, tmp_path, timeout_s=3.0),
        version(plain, tmp_path, ScoringConfig(workers=5, max_failed=0.1)),
    ]
    changed = [
        version(other, tmp_path),
        version(plain + "# a note\n", tmp_path),
        version(plain, tmp_path, weight=0.5),
        version(plain, tmp_path, gate=0.5),
        version(plain, tmp_path, ScoringConfig(rank=True)),
        version(plain, tmp_path, ScoringConfig(floor=-1.0)),
    ]
    assert same == [first] * 3
    assert len({first, *changed}) == 7
