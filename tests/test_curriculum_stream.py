"""Prompts of the plain stream; and in both modes: nothing before commit, exact resume."""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from grpo_engine.curriculum import CurriculumConfig, PassRates, PromptDraw
from grpo_engine.data import TaskStream
from prompt_draws import EASY, HARD, MEDIUM, banded, rates_of, run, streamed, tasks_of


def test_without_shares_it_is_the_plain_stream():
    drawn = run(streamed(7), range(1, 12), 5)
    assert list(chain(*drawn)) == TaskStream(7, 3).take(0, 55)


def test_plain_stream_names_the_band_of_each_task():
    draw = streamed(3, rates_of(easy=[0], hard=[2])).draw(1, 3)
    assert {p.task: p.band for p in draw.prompts} == {0: EASY, 1: MEDIUM, 2: HARD}
    assert (draw.passed, draw.positions) == ([], 3)


def test_more_prompts_from_the_stream_are_its_next_ones_and_an_epoch_stays_one():
    draw = streamed(10)
    for step in (1, 2):
        first = draw.draw(step, 3)
        second = draw.draw(step, 2, [first])
        draw.commit(step, [first, second])
        start = 5 * (step - 1)
        assert tasks_of(first) + tasks_of(second) == TaskStream(10, 3).take(start, 5)
    assert draw.state() == {"position": 10, "turns": []}


def test_more_prompts_never_repeat_those_of_the_step():
    draw = streamed(4)
    draw.commit(1, [draw.draw(1, 3)])  # an epoch ends within the next step
    first = draw.draw(2, 2)
    assert tasks_of(first) == TaskStream(4, 3).take(3, 2)
    second = draw.draw(2, 5, [first])
    # This stream has task 3 at the end of the one epoch and at the start of the next.
    assert tasks_of(first) == [3, 3] and sorted(tasks_of(second)) == [0, 1, 2]
    assert draw.draw(2, 1, [first, second]).prompts == []


def test_an_epoch_of_the_stream_is_thinned_only_if_asked():
    solved = rates_of(solved=range(10, 20))
    plain = Counter(chain(*run(streamed(20, solved), range(1, 41), 5)))
    assert set(plain.values()) == {10}
    thinned = streamed(20, solved, solved_share=0.0)
    drawn = run(thinned, range(1, 41), 5)
    assert Counter(chain(*drawn)) == {task: 20 for task in range(10)}
    # The order is the stream's: what is left of it once the solved tasks are taken out.
    stream = TaskStream(20, 3).take(0, thinned.state()["position"])
    assert list(chain(*drawn)) == [task for task in stream if task < 10]


def test_a_stream_of_solved_tasks_still_fills_the_step():
    draw = streamed(6, rates_of(solved=range(6)), solved_share=0.0)
    made = draw.draw(1, 4)
    # From the start of the stream, in its order.
    assert tasks_of(made) == TaskStream(6, 3).take(0, 4)
    assert made.passed == TaskStream(6, 3).take(4, 2)
    assert sorted(Counter(tasks_of(draw.draw(1, 8))).values()) == [1, 1, 1, 1, 2, 2]


def test_a_thinned_stream_finds_every_task_wherever_it_begins():
    draw = streamed(4, solved_share=0.5)  # none is solved
    draw.position = 3  # task 3 is there and at 4
    made = draw.draw(1, 4)
    assert sorted(tasks_of(made)) == [0, 1, 2, 3] and made.positions > 4


def test_drawing_changes_nothing_before_it_is_committed():
    for draw in (banded(20, [0.2, 0.5, 0.3], rates_of(easy=[1], solved=[2])), streamed(20)):
        draw.commit(1, [draw.draw(1, 6)])
        before = draw.state()
        first = draw.draw(2, 6)
        more = draw.draw(2, 6, [first])
        assert draw.draw(2, 6) == first and draw.draw(2, 6, [first]) == more
        assert draw.state() == before


MODES = {
    "shares": {"shares": {0: [0, 0.8, 0.2], 30: [0.3, 0.3, 0.4]}},
    "stream": {},
    "thinned": {"solved_share": 0.5},
}


def live(draw: PromptDraw, steps: range) -> list[list[int]]:
    """Steps whose groups are rewarded, with a second round in every third."""
    drawn = []
    for step in steps:
        rounds = [draw.draw(step, 6)]
        if step % 3 == 0:
            rounds.append(draw.draw(step, 3, rounds))
        tasks = list(chain(*map(tasks_of, rounds)))
        chance = np.random.default_rng(step)
        for task in tasks:
            # The first third is always solved, the last never.
            rewards = (chance.random(4) < [1.0, 0.5, 0.0][task // 10]).astype(float)
            draw.rates.update(task, rewards.tolist(), 1.0)
        draw.commit(step, rounds)
        drawn.append(tasks)
    return drawn


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop", [2, 27])  # some tasks were never drawn; all were
def test_resumed_in_the_middle_it_goes_on_as_if_unbroken(mode, stop):
    def fresh() -> PromptDraw:
        return streamed(30, PassRates(), **MODES[mode])

    unbroken = fresh()
    whole = live(unbroken, range(1, 61))
    stopped, resumed = fresh(), fresh()
    begun = live(stopped, range(1, stop + 1))
    resumed.commit(1, [resumed.draw(1, 30)])  # what was there before is forgotten
    stored = json.loads(json.dumps([stopped.state(), stopped.rates.state()]))
    resumed.load(stored[0])
    resumed.rates.load(stored[1])
    assert begun + live(resumed, range(stop + 1, 61)) == whole
    assert resumed.state() == unbroken.state()


def test_what_cannot_be_drawn_from_is_refused():
    for tasks, config in [(0, CurriculumConfig(shares={0: [0, 1, 0]})), (5, CurriculumConfig())]:
        with pytest.raises(ValueError, match="at least one task, and without shares a stream"):
            PromptDraw(tasks, 0, config, PassRates())
