"""Reward functions: TRL's form, components, None against 0, and what a wrong one is told."""

import asyncio
import math
import threading

import numpy as np
import pytest
import torch

from grpo_engine.errors import UserError
from grpo_engine.rewards import Scorer, load_rewards, reward_of
from grpo_engine.rewards.score import Scores
from grpo_engine.sample_config import RewardConfig, ScoringConfig
from scoring import ARGUMENTS, COLUMNS, CORE, gives, run, totals

NAN, INF = math.nan, math.inf


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
    [
        (1, 0, 1, 0),
        np.array([1, 0, 1, 0]),
        torch.tensor([1.0, 0, 1, 0]),
        [True, 0, np.float32(1), 0],
    ],
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
    "list with a number as text": [1, "1", 0, 0],
    "list with a list": [1, [1, 2], 0, 0],
    "nested components": [1, {"form": {"nested": 1}}, 0, 0],
}


@pytest.mark.parametrize("kind", WRONG_RETURNS)
def test_wrong_return_is_an_error_that_names_the_function(kind):
    with pytest.raises(UserError, match="the reward r1 returned"):
        run(gives(1, 1, 1, 1), lambda **_: WRONG_RETURNS[kind])


def test_components_of_several_draws_stand_in_the_order_in_which_they_came():
    names = [f"part_{i}" for i in range(20)]
    first, second = names[:12], names[5:]
    parts = [Scores({n: [1.0] for n in own}, [None], [None]) for own in (first, second)]
    joined = Scores.join(parts)
    assert list(joined.components) == names
    assert joined.components["part_0"] == [1.0, None]
    assert joined.components["part_19"] == [None, 1.0]


CALL = {"prompts": ["a"], "completions": ["12"], "completion_ids": [[1, 2]]}


def test_an_async_function_runs_where_a_loop_runs_already_and_keeps_its_client():
    loops = []

    async def counts(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    async def cell():
        with Scorer([reward_of(counts)]) as scorer:
            return [scorer.score(CALL, {}).components for _ in range(2)]

    before = threading.active_count()
    assert asyncio.run(cell()) == [{"counts": [2.0]}] * 2
    assert loops[0] is loops[1] and loops[0].is_closed()
    assert threading.active_count() == before


def test_an_async_function_that_raises_is_told_by_its_own_line():
    async def breaks(completions):
        await asyncio.sleep(0)
        return 1 / 0

    with Scorer([reward_of(breaks)], ScoringConfig(max_failed=1.0)) as scorer:
        (cause,) = scorer.score(CALL, {}).failures
    line = breaks.__code__.co_firstlineno + 2
    assert cause.endswith(f"division by zero (test_rewards.py:{line})")


@pytest.mark.parametrize(
    ("arguments", "columns", "said"),
    [
        (CALL, {}, "the reward exact needs the column 'answer'"),
        (CALL, {"answer": ["1", "2"]}, "answer has 2 values for 1 completions"),
        ({"completions": ["1"]}, {"answer": ["1"]}, "the rewards need completion_ids"),
    ],
)
def test_a_call_that_lacks_something_is_told_so_and_blamed_on_no_function(arguments, columns, said):
    with Scorer(load_rewards([RewardConfig("exact")])) as scorer:
        with pytest.raises(UserError, match=said):
            scorer.score(arguments, columns)
