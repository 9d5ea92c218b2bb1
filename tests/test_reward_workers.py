"""Reward functions in killable workers: every value is its own sample's, whatever dies."""

import math
import pathlib
import pickle
import random
import re

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards import jobs as jobs_module
from grpo_engine.rewards.frames import VALUES
from grpo_engine.rewards.process import StepReward
from grpo_engine.rewards.processes import _read_plain
from grpo_engine.rewards.protocol import EnvFailed
from grpo_engine.rewards.workers import Outcome, WorkerPool
from reward_jobs import AMPLE_S, SHORT_S, job, spec


def fifty(deed: str, at: int = 17) -> list[str]:
    return [f"{deed if i == at else 'ok'} {i}" for i in range(50)]


@pytest.mark.parametrize(
    ("deed", "timeout_s", "cause", "lost"),
    [
        # Lost workers: that of the call of all samples, and that of the sample alone.
        ("hang", SHORT_S, "timed out after 0.5 s", 2),
        ("spin", SHORT_S, "timed out after 0.5 s", 2),
        ("kill", AMPLE_S, "lost its process (signal 9)", 2),
        ("exit", AMPLE_S, "lost its process (exit code 3)", 2),
        ("raise", AMPLE_S, "raised ValueError: no 17 (reward_functions.py:34)", 0),
        ("leave", AMPLE_S, "raised SystemExit: over (reward_functions.py:36)", 0),
    ],
)
def test_a_sample_that_fails_fails_alone(deed, timeout_s, cause, lost):
    with WorkerPool([spec("act")]) as pool:
        (outcome,) = pool.call([job(fifty(deed), timeout_s)])
        assert outcome.failures == [cause if i == 17 else None for i in range(50)]
        assert outcome.values == [None if i == 17 else float(i) for i in range(50)]
        assert (outcome.per_sample, pool.restarts) == (True, lost)


def test_nan_is_a_value_and_no_failure():
    with WorkerPool([spec("act")]) as pool:
        (outcome,) = pool.call([job(fifty("nan"))])
    assert math.isnan(outcome.values[17]) and outcome.values[16] == 16.0
    assert (outcome.failures, outcome.per_sample) == ([None] * 50, False)


def test_every_value_is_its_own_samples_over_batches_of_hangs_deaths_and_naps():
    rng = random.Random(5)
    specs = [spec("act"), spec("act", per_sample=True)]
    causes = {
        "hang": "timed out after 0.5 s",
        "kill": "lost its process (signal 9)",
        "exit": "lost its process (exit code 3)",
    }
    number, hangs = 0, 0
    with WorkerPool(specs, workers=3) as pool:
        for step in range(30):
            batches = []
            for index in (0, 1):
                deeds = rng.choices(["ok", "nap", "kill", "exit"], [60, 30, 1, 1], k=24)
                if step % 10 == 9 and index:
                    deeds[rng.randrange(24)] = "hang"
                    hangs += 1
                batches.append([f"{deed} {number + i}" for i, deed in enumerate(deeds)])
                number += 24
            slow = any("hang" in text for text in batches[1])
            calls = [job(b, SHORT_S if slow and i else AMPLE_S, i) for i, b in enumerate(batches)]
            for texts, outcome in zip(batches, pool.call(calls), strict=True):
                deeds, numbers = zip(*map(str.split, texts), strict=True)
                assert outcome.failures == [causes.get(deed) for deed in deeds]
                expected = [
                    None if d in causes else float(n) for d, n in zip(deeds, numbers, strict=True)
                ]
                assert outcome.values == expected
        assert hangs == 3 and pool.restarts >= 3


def test_one_call_serves_all_samples_until_one_of_them_loses_its_process():
    with WorkerPool([spec("batch")]) as pool:
        assert pool.call([job(["ok 0"] * 3)])[0].values == [3, 3, 3]
        # To raise is cheap: it is tried with all samples again.
        assert pool.call([job(["ok 0", "raise 1"])])[0].values == [1, None]
        assert pool.call([job(["ok 0"] * 4)])[0] == Outcome([4.0] * 4, [None] * 4, False)
        assert pool.call([job(["ok 0", "kill 1", "ok 2"])])[0].values == [1, None, 1]
        assert pool.call([job(["ok 0"] * 4)])[0] == Outcome([1.0] * 4, [None] * 4, True)


def test_a_function_of_single_samples_is_never_given_more():
    with WorkerPool([spec("batch", per_sample=True)]) as pool:
        assert pool.call([job(["ok 0"] * 40)])[0] == Outcome([1.0] * 40, [None] * 40, True)


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("kill", "lost its process (signal 9)"),
        ("raise", "raised ValueError: no 1 (reward_functions.py:34)"),
    ],
)
def test_a_function_that_compares_samples_fails_as_a_whole(deed, cause):
    with WorkerPool([spec("batch")]) as pool:
        (outcome,) = pool.call([job(["ok 0", f"{deed} 1", "ok 2"], split=False)])
        assert outcome == Outcome([None] * 3, [cause] * 3)
        assert pool.call([job(["ok 0"] * 3, split=False)])[0].values == [3, 3, 3]


def test_jobs_run_side_by_side_and_come_back_in_order():
    specs = [spec("act"), spec("batch"), spec("waits")]
    with WorkerPool(specs, workers=2) as pool:
        hanging = job(["ok 1", "hang 2"], SHORT_S)
        outcomes = pool.call([hanging, job(["ok 5"], index=1), job(["6", "7"], index=2), job([])])
    assert [o.values for o in outcomes] == [[1.0, None], [1.0], [6.0, 7.0], []]
    assert outcomes[0].failures[1] == "timed out after 0.5 s"


@pytest.mark.parametrize("per_sample", [False, True])
def test_async_functions_are_awaited_on_one_loop(per_sample):
    specs = [spec("waits", per_sample=per_sample), spec("loops", per_sample=per_sample)]
    with WorkerPool(specs, workers=1) as pool:
        for _ in range(2):
            waited, loops = pool.call([job(["1", "2", "3"]), job(["a", "b"], index=1)])
            assert (waited.values, loops.values) == ([1.0, 2.0, 3.0], [1.0, 1.0])


def test_functions_get_what_they_name_renamed_and_with_their_options():
    specs = [
        spec("extras"),
        spec("bonus", rename={"answers": "gold"}, options={"bonus": 0.5}),
        spec("given", options={"level": 3}),
    ]
    arguments = {"gold": [1, 2], "groups": [0, 1], "step": 10, "bonus": [7, 7], "level": [8, 8]}
    with WorkerPool(specs) as pool:
        calls = [job(["a", "b"], index=i, **arguments) for i in range(3)]
        extras, bonus, given = (outcome.values for outcome in pool.call(calls))
    assert extras == [10.0, 11.0]
    assert bonus == [1.5, 2.5]  # the option, and not the column of its name
    seen = {"bonus": [7, 7], "completions": ["a", "b"], "gold": [1, 2], "level": 3}
    assert given == [EnvFailed(repr(sorted(seen.items())))] * 2  # step and groups were not named


def test_arguments_and_values_of_every_size_and_kind_arrive():
    big = ["x" * 400_000 for _ in range(24)]  # more than a connection holds at once
    specs = [spec("given", per_sample=True), spec("steps"), spec("odd_steps")]
    with WorkerPool(specs) as pool:
        given, steps, odd = pool.call([job(big), job(["a", "b"], index=1), job(["a"], index=2)])
    assert odd.values == [[StepReward(0, 2, 0.5)]]
    assert given.values == [EnvFailed(repr([("completions", [text])])) for text in big]
    assert steps.values == [[StepReward(0, 2, 0.5), StepReward(2, 3, 1.0)]] * 2


def test_of_what_a_worker_sends_only_plain_values_are_built():
    answer = _read_plain(pickle.dumps((7, VALUES, [pathlib.PurePosixPath("x")])))
    assert isinstance(answer, pickle.UnpicklingError)
    assert re.search(r"an object of the class pathlib\S*\.PurePosixPath", str(answer))
    assert _read_plain(pickle.dumps((7, VALUES, [EnvFailed("x")]))) == (
        7,
        VALUES,
        [EnvFailed("x")],
    )


class NotThere:
    """Can be sent and not be read."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("too_few", {}, "the reward f returned 1 values for 2 completions"),
        ("text", {}, "the reward f returned str; it must return a list"),
        ("nothing", {}, "the reward f returned NoneType; it must return a list"),
        ("functions_back", {}, "the reward f returned '<function text.*expected a"),
        ("half_steps", {}, r"the reward f returned a step from 0\.5 to 2: give the numbers"),
        ("words", {}, r"the reward f returned '1\.0' for a completion; expected a number"),
        ("bonus", {}, "the reward f needs the argument 'answers', which is neither a column"),
        ("bonus", {"answers": [1.0]}, "'answers' of the reward f has 1 values for 2 completions"),
        ("given", {"c": [1, lambda: 0]}, "the argument 'c' of the reward f can't be sent"),
        (
            "given",
            {"c": [1, NotThere()]},
            "arguments of the reward f can't be read in a worker",
        ),
    ],
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_what_a_user_must_mend_is_one_line_that_names_the_function(
    function, arguments, message, per_sample
):
    if per_sample and function == "too_few":
        message = "the reward f returned 0 values for 1 completions"
    with WorkerPool([spec(function, per_sample=per_sample), spec("act")]) as pool:
        with pytest.raises(UserError, match=message) as caught:
            pool.call([job(["a", "b"], **arguments)])
        assert "\n" not in str(caught.value)
        assert pool.call([job(["ok 3"], index=1)])[0].values == [3.0]


def test_a_column_that_is_to_be_renamed_and_is_not_there_is_an_error():
    with WorkerPool([spec("bonus", rename={"answers": "gold"})]) as pool:
        with pytest.raises(UserError, match="the reward f needs the column 'gold'"):
            pool.call([job(["a"], answers=[1])])


def test_too_large_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(jobs_module, "LARGEST", 3 << 20)
    with WorkerPool([spec("given")]) as pool:
        with pytest.raises(UserError, match=r"the reward f take 4 MiB, and at most 3 can be sent"):
            pool.call([job(["x" * (4 << 20)])])


def test_a_pool_needs_a_worker():
    with pytest.raises(UserError, match="at least 1 is needed; given 0"):
        WorkerPool([spec("act")], workers=0)
