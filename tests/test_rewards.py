"""Reward functions: TRL's form, components, None against 0, and what a wrong one is told."""

import asyncio
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_engine.data import Task
from grpo_engine.errors import UserError
from grpo_engine.rewards.load import check_answers, load_rewards, reward_of
from grpo_engine.rewards.score import Scorer, Scores
from grpo_engine.sample_config import RewardConfig, ScoringConfig

NAN, INF = math.nan, math.inf
ARGUMENTS = {
    "prompts": ["p0", "p1", "p2", "p3"],
    "completions": ["a", "bb", "ccc", "dddd"],
    "completion_ids": [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]],
    "finish_reasons": ["stop", "stop", "length", "stop"],
    "raw_completions": ["a<eos>", "bb<eos>", "ccc", "dddd<eos>"],
    "prompt_tail": ["t0", "t1", "t2", "t3"],
    "step": 12,
}
COLUMNS = {"answer": [1, 2, 3, 4], "level": ["x", "y", "z", None]}
LENIENT = ScoringConfig(max_failed=1.0)
CORE = {name: ARGUMENTS[name] for name in ("prompts", "completions", "completion_ids")}


def run(*functions, weights=(1.0, 1.0, 1.0), arguments=ARGUMENTS, columns=COLUMNS) -> Scores:
    rewards = [reward_of(f, name=f"r{i}", weight=weights[i]) for i, f in enumerate(functions)]
    return Scorer(rewards, LENIENT).score(arguments, columns)


def totals(scores: Scores) -> list[float | None]:
    return scores.rewards([1] * len(scores.failures), floor=0.0)


def of_file(target: str, arguments=ARGUMENTS, columns=COLUMNS, **config) -> Scores:
    """In a worker, as a run has it."""
    with Scorer(load_rewards([RewardConfig(target, **config)]), LENIENT) as scorer:
        return scorer.score(arguments, columns)


def gives(*values):
    """A reward function that returns `values` whatever it gets."""
    return lambda **_: list(values)


def test_trl_form_gets_the_core_arguments_and_every_column():
    def seen(prompts, completions, completion_ids, **columns):
        seen.got = {"prompts": prompts, "completions": completions, **columns}
        seen.ids = completion_ids
        return [float(len(c)) for c in completions]

    assert totals(run(seen)) == [1.0, 2.0, 3.0, 4.0]
    assert seen.got == {**{n: CORE[n] for n in ("prompts", "completions")}, **COLUMNS}
    assert seen.ids == CORE["completion_ids"]


def test_extras_are_passed_only_when_named():
    def plain(**everything):
        plain.got = everything
        return [0.0] * 4

    def naming(finish_reasons, raw_completions, prompt_tail, step, **rest):
        naming.got = (finish_reasons, raw_completions, prompt_tail, step, rest)
        return [0.0] * 4

    run(plain, naming)
    assert plain.got == CORE | COLUMNS
    extras = [ARGUMENTS[n] for n in ("finish_reasons", "raw_completions", "prompt_tail", "step")]
    assert naming.got == (*extras, CORE | COLUMNS)


def test_function_without_kwargs_gets_only_what_it_names():
    def named(completions, level, step, unused="default"):
        named.got = (completions, level, step, unused)
        return [0.0] * 4

    run(named)
    assert named.got == (ARGUMENTS["completions"], COLUMNS["level"], 12, "default")


def test_argument_that_is_no_column_is_an_error_that_names_it():
    with pytest.raises(UserError, match="the reward r0 needs the argument 'gold'"):
        run(lambda completions, gold: [0.0] * 4)


def test_total_is_the_weighted_sum_and_components_are_kept_unweighted():
    parts = gives(
        {"form": 1, "value": 0.5}, {"form": 0, "value": 2}, {"form": 1.0}, {"value": None}
    )
    scores = run(parts, gives(1, 2, 3, 4), weights=(2.0, -0.5))
    # 2 * (form + value) - 0.5 * r1, where a part that isn't there adds nothing.
    assert totals(scores) == [2.5, 3.0, 0.5, -2.0]
    assert scores.components == {
        "r0.form": [1.0, 0.0, 1.0, None],
        "r0.value": [0.5, 2.0, None, None],
        "r1": [1.0, 2.0, 3.0, 4.0],
    }


def test_none_is_not_zero():
    # Fault 6.
    scores = run(gives(1, None, 1, 0))
    assert totals(scores) == [1.0, None, 1.0, 0.0]
    assert scores.components == {"r0": [1.0, None, 1.0, 0.0]}


def test_sample_has_a_reward_if_any_function_gives_one():
    scores = run(gives(1, None, None, 0), gives(0.5, 0.25, None, None))
    assert totals(scores) == [1.5, 0.25, None, 0.0]
    assert scores.components["r1"] == [0.5, 0.25, None, None]


@pytest.mark.parametrize("bad", [NAN, INF, -INF, np.float32("nan"), {"ok": 1.0, "bad": NAN}])
def test_reward_that_is_not_finite_makes_its_own_sample_invalid(bad):
    # Also where another function has a number for it: the sum would be a lie.
    scores = run(gives(1, bad, 0, 0.5), gives(1, 1, 1, 1))
    assert totals(scores) == [2.0, None, 1.0, 1.5]


def test_number_beyond_float_makes_its_own_sample_invalid():
    # What a function that evaluates a model's "9**9**3" can return.
    assert totals(run(gives(1, 10**400, 0, 0.5))) == [1.0, None, 0.0, 0.5]


def test_step_without_any_reward_is_an_error_that_names_the_functions():
    with pytest.raises(UserError, match="no sample of this step has a reward: r0, r1 "):
        run(gives(None, None, {}, None), gives(*[None] * 4))


@pytest.mark.parametrize(
    "values",
    [(1, 0, 1, 0), np.array([1, 0, 1, 0]), torch.tensor([1.0, 0, 1, 0]), [True, 0, "1", 0]],
)
def test_any_sequence_of_numbers_will_do(values):
    assert totals(run(lambda **_: values)) == [1.0, 0.0, 1.0, 0.0]


WRONG_RETURNS = {
    "nothing": None,
    "number": 1.0,
    "text": "1101",
    "dict": {"form": 1},
    "too few": [1.0] * 3,
    "too many": [1.0] * 5,
    "empty": [],
    "generator": (1.0 for _ in range(4)),
    "set": {0.0, 1.0, 2.0, 3.0},  # as long as it should be, but in no order
    "scalar tensor": torch.tensor(1.0),
    "list with a word": [1, "good", 0, 0],
    "list with a list": [1, [1, 2], 0, 0],
    "nested components": [1, {"form": {"nested": 1}}, 0, 0],
}


@pytest.mark.parametrize("kind", WRONG_RETURNS)
def test_wrong_return_is_an_error_that_names_the_function(kind):
    with pytest.raises(UserError, match="the reward r1 returned"):
        run(gives(1, 1, 1, 1), lambda **_: WRONG_RETURNS[kind])


def test_function_that_raises_for_all_is_named_with_its_error():
    def fails(**_):
        return {}["gold"]

    with pytest.raises(UserError, match=r"4 of 4 .*the reward r0 raised KeyError: 'gold'"):
        Scorer([reward_of(fails, name="r0")]).score(ARGUMENTS, COLUMNS)


def test_function_that_raises_on_one_sample_has_the_numbers_of_the_others():
    def picky(completions, **_):
        return [{"a": 1.0, "bb": 2.0, "dddd": 4.0}[c] for c in completions]

    scores = run(picky, gives(1, 1, 1, 1))
    assert totals(scores) == [2.0, 3.0, None, 5.0]
    (cause,) = [failure for failure in scores.failures if failure is not None]
    line = inspect.getsourcelines(picky)[1] + 1
    assert cause == f"the reward r0 raised KeyError: 'ccc' (test_rewards.py:{line})"
    assert scores.failures.index(cause) == 2


@pytest.mark.parametrize(("most", "stops"), [(0.24, True), (0.25, False)])
def test_share_of_failed_calls_above_which_a_run_stops(most, stops):
    rewards = [reward_of(gives(1, NAN, 0, 1), name="f")]
    scorer = Scorer(rewards, ScoringConfig(max_failed=most))
    if stops:
        with pytest.raises(UserError, match=r"1 of 4 .* the reward f returned nan"):
            scorer.score(ARGUMENTS, COLUMNS)
    else:
        assert totals(scorer.score(ARGUMENTS, COLUMNS)) == [1.0, None, 0.0, 1.0]
    assert scorer.failed == 1


def test_function_that_compares_samples_is_not_called_one_by_one():
    def ranks(completions, **_):
        if len(completions) == 4:
            raise ValueError("later")
        return [0.0] * len(completions)

    rewards = [reward_of(ranks, name="f", compares=True)]
    scores = Scorer(rewards, LENIENT).score(ARGUMENTS, COLUMNS)
    assert len(set(scores.failures)) == 1
    assert scores.failures[0].startswith("the reward f raised ValueError: later")


def test_async_function_is_awaited_and_has_its_time_out():
    async def quick(completions, **_):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    async def hangs(completions, **_):
        await asyncio.sleep(3600 if "ccc" in completions else 0)
        return [1.0] * len(completions)

    assert totals(run(quick)) == [1.0, 2.0, 3.0, 4.0]
    rewards = [reward_of(hangs, name="f", timeout_s=0.05)]
    scores = Scorer(rewards, LENIENT).score(ARGUMENTS, COLUMNS)
    assert totals(scores) == [1.0, 1.0, None, 1.0]
    assert "TimeoutError" in scores.failures[2]


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
