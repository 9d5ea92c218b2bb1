"""Functions that don't let go, and judges that are down: what a time-out may cost."""

import asyncio
import dataclasses
import threading

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards import workers
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.loop import MOST_ABANDONED
from grpo_engine.rewards.score import Scorer
from grpo_engine.rewards.workers import WorkerPool
from grpo_engine.sample_config import ScoringConfig
from reward_jobs import SHORT_S, job, spec

LENIENT = ScoringConfig(max_failed=1.0)
TIMED_OUT = f"timed out after {SHORT_S} s"


def arguments(count: int) -> dict:
    texts = [str(i) for i in range(count)]
    return {"prompts": texts, "completions": texts, "completion_ids": [[1]] * count, "step": 1}


def scored(function, count=1, scoring=LENIENT):
    reward = reward_of(function, name="f", timeout_s=0.05)
    with Scorer([reward], scoring) as scorer:
        return scorer.score(arguments(count), {})


def test_an_async_function_that_blocks_fails_and_is_not_waited_for():
    free = threading.Event()

    async def blocks(completions, **_):
        free.wait()
        return [1.0] * len(completions)

    try:
        scores = scored(blocks)  # leaving the scorer does not wait either
        assert scores.failures == ["the reward f raised TimeoutError: timed out after 0.05 s"]
        assert not free.is_set()
    finally:
        free.set()


def test_an_async_function_that_swallows_its_cancellation_fails():
    async def stubborn(completions, **_):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    assert scored(stubborn).failures[0].endswith("timed out after 0.05 s")


def test_too_many_calls_that_never_let_go_are_an_error_and_no_pile_of_threads():
    free = threading.Event()

    async def blocks(completions, **_):
        free.wait()
        return [1.0] * len(completions)

    before = threading.active_count()
    try:
        with pytest.raises(UserError, match=f"{MOST_ABANDONED} calls of async reward functions"):
            scored(blocks, count=3 * MOST_ABANDONED)
        assert threading.active_count() <= before + MOST_ABANDONED
    finally:
        free.set()


def test_a_judge_that_is_down_is_given_up_and_tried_with_one_sample_in_the_next_call():
    tried = workers.DOWN_AFTER
    with WorkerPool([spec("act")], workers=1) as pool:
        down = [f"hang {i}" for i in range(64)]
        (outcome,) = pool.call([job(down, SHORT_S)])
        given_up = f"given up after {tried} of 64 failed"
        assert outcome.failures == [TIMED_OUT] * tried + [given_up] * (64 - tried)
        assert pool.restarts == 1 + tried  # the call of all, and these
        (outcome,) = pool.call([job(down, SHORT_S)])
        assert outcome.failures == [TIMED_OUT] + ["given up after 1 of 64 failed"] * 63
        (outcome,) = pool.call([job([f"ok {i}" for i in range(64)], SHORT_S)])
        assert outcome.values == [float(i) for i in range(64)]
        (outcome,) = pool.call([job(["ok 1", *["hang 0"] * 3, "ok 2"], SHORT_S)])
        assert outcome.failures == [None, *[TIMED_OUT] * 3, None]


def test_a_function_that_answers_between_is_not_given_up():
    texts = [text for i in range(workers.DOWN_AFTER + 2) for text in (f"ok {i}", f"hang {i}")]
    with WorkerPool([spec("act")]) as pool:
        (outcome,) = pool.call([job(texts, SHORT_S)])
    assert outcome.failures == [None, TIMED_OUT] * (workers.DOWN_AFTER + 2)


def test_past_the_share_that_ends_the_run_nothing_more_is_tried_in_workers():
    asked = dataclasses.replace(job([f"raise {i}" for i in range(10)]), most_failures=3)
    with WorkerPool([spec("act")], workers=1) as pool:
        (outcome,) = pool.call([asked])
    tried = outcome.failures.index("given up after 4 of 10 failed")
    assert 4 <= tried < 8  # samples are handed out a few at a time
    assert set(outcome.failures[tried:]) == {"given up after 4 of 10 failed"}


def test_past_the_share_that_ends_the_run_nothing_more_is_tried_here():
    calls = []

    def raises(completions, **_):
        calls.append(len(completions))
        raise ValueError("no")

    with pytest.raises(UserError, match=r"10 of 10 samples of this step have no reward: .* no"):
        scored(raises, 10, ScoringConfig(max_failed=0.3))
    assert calls == [10, 1, 1, 1, 1]
