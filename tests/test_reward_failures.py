"""Reward functions that raise, compare samples or are slow: who loses what."""

import asyncio
import inspect
import math

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.score import Scorer
from grpo_engine.sample_config import ScoringConfig
from scoring import ARGUMENTS, COLUMNS, LENIENT, gives, run, totals

NAN = math.nan


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
    assert cause == f"the reward r0 raised KeyError: 'ccc' (test_reward_failures.py:{line})"
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
