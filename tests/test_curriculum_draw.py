"""Shares of the bands by hand, no task twice, who waits longest first, solved ones less often."""

from collections import Counter
from itertools import chain

import pytest

from grpo_engine.curriculum import CurriculumConfig, Drawn, PassRates, PromptDraw
from prompt_draws import EASY, HARD, MEDIUM, banded, rates_of, run, tasks_of


def test_shares_that_come_out_even_are_met_at_every_step():
    rates = rates_of(easy=range(10), hard=range(90, 100))
    draw = banded(100, [0.25, 0.5, 0.25], rates)
    for step in range(1, 30):
        made = draw.draw(step, 8)
        assert Counter(p.band for p in made.prompts) == {EASY: 2, MEDIUM: 4, HARD: 2}
        for prompt in made.prompts:
            true_band = EASY if prompt.task < 10 else HARD if prompt.task >= 90 else MEDIUM
            assert prompt.band == true_band
        assert len(set(tasks_of(made))) == 8
        draw.commit(step, [made])


def test_shares_of_few_prompts_are_met_in_the_mean():
    draw = banded(300, [0.3, 0.5, 0.2], rates_of(easy=range(100), hard=range(200, 300)))
    bands = Counter()
    for step in range(1, 501):
        made = draw.draw(step, 2)
        bands.update(p.band for p in made.prompts)
        draw.commit(step, [made])
    assert sum(bands.values()) == 1000
    # Standard error below 11 of 1000; the largest remainder would give 500 medium, 500 easy.
    assert bands[EASY] == pytest.approx(300, abs=45) and bands[HARD] == pytest.approx(200, abs=45)


def test_shares_follow_their_schedule():
    config = CurriculumConfig(shares={0: [0, 1, 0], 10: [0, 0, 1]})
    draw = PromptDraw(30, 0, config, rates_of(easy=range(10), hard=range(20, 30)))
    for step, medium in [(0, 8), (5, 4), (10, 0), (99, 0)]:
        bands = Counter(p.band for p in draw.draw(step, 8).prompts)
        assert (bands[MEDIUM], bands[HARD]) == (medium, 8 - medium)


def test_who_waits_longest_comes_first():
    # 2 of 6 medium tasks a step: each rotation of three steps has every one once.
    draw = banded(10, [0.25, 0.5, 0.25], rates_of(easy=[0, 1], hard=[8, 9]))
    drawn = run(draw, range(1, 13), 4)
    for start in range(0, 12, 3):
        rotation = Counter(chain(*drawn[start : start + 3]))
        assert all(rotation[task] == 1 for task in range(2, 8))
    for start in range(0, 12, 2):
        rotation = Counter(chain(*drawn[start : start + 2]))
        assert all(rotation[task] == 1 for task in (0, 1, 8, 9))


def test_tasks_that_wait_equally_long_come_in_shuffled_order():
    first = [tuple(tasks_of(banded(40, [0, 1, 0], PassRates(), s).draw(1, 40))) for s in range(3)]
    assert len(set(first)) == 3 and tuple(range(40)) not in first
    # In ten steps of 4 every task once; which ones come together is no matter of their numbers.
    rotation = run(banded(40, [0, 1, 0], PassRates()), range(1, 11), 4)
    assert sorted(chain(*rotation)) == list(range(40))
    assert max(max(step) - min(step) for step in rotation) > 20


def test_a_band_with_too_few_tasks_lends_its_places_to_the_nearest():
    short_of_easy = banded(8, [1, 0, 0], rates_of(easy=[0], hard=[7]))
    assert Counter(p.band for p in short_of_easy.draw(1, 4).prompts) == {EASY: 1, MEDIUM: 3}
    short_of_hard = banded(8, [0, 0, 1], rates_of(easy=[0], hard=[7]))
    assert Counter(p.band for p in short_of_hard.draw(1, 4).prompts) == {HARD: 1, MEDIUM: 3}
    no_medium = banded(6, [0, 1, 0], rates_of(easy=[0, 1, 2], hard=[3, 4, 5]))
    assert Counter(p.band for p in no_medium.draw(1, 4).prompts) == {HARD: 3, EASY: 1}
    # Hard tasks that lack are not made up by easy ones as long as there are medium ones.
    all_three = banded(6, [0, 0, 1], rates_of(easy=[0, 1], hard=[5]))
    assert Counter(p.band for p in all_three.draw(1, 5).prompts) == {HARD: 1, MEDIUM: 3, EASY: 1}


def test_before_anything_was_seen_all_places_are_medium():
    draw = banded(50, [0.2, 0.3, 0.5], PassRates()).draw(1, 10)
    assert {p.band for p in draw.prompts} == {MEDIUM} and len(set(tasks_of(draw))) == 10


def test_a_task_comes_twice_only_if_there_are_fewer_than_prompts():
    rates = rates_of(easy=[0], hard=[2])
    assert sorted(tasks_of(banded(3, [0.2, 0.3, 0.5], rates).draw(1, 3))) == [0, 1, 2]
    seven = Counter(tasks_of(banded(3, [0.2, 0.3, 0.5], rates).draw(1, 7)))
    assert sorted(seven.values()) == [2, 2, 3] and set(seven) == {0, 1, 2}
    one = banded(1, [0, 1, 0], PassRates()).draw(1, 3)
    assert one.prompts == [Drawn(0, MEDIUM)] * 3


def test_more_prompts_of_bands_never_repeat_and_may_run_out():
    draw = banded(10, [0.25, 0.5, 0.25], rates_of(easy=[0, 1], hard=[8, 9]))
    first = draw.draw(1, 4)
    second = draw.draw(1, 4, [first])
    third = draw.draw(1, 4, [first, second])
    assert len(third.prompts) == 2
    assert sorted(chain(*map(tasks_of, (first, second, third)))) == list(range(10))
    assert draw.draw(1, 1, [first, second, third]).prompts == []
    draw.commit(1, [first, second, third])
    assert draw.state()["turns"] == [[task, 1] for task in range(10)]


def test_solved_tasks_are_passed_over_and_had_their_turn():
    rates = rates_of(easy=[0, 1], solved=[2, 3, 4, 5])
    draw = banded(8, [1, 0, 0], rates, solved_share=0.0)
    made = draw.draw(1, 2)
    assert sorted(tasks_of(made)) == [0, 1]
    assert set(made.passed) <= {2, 3, 4, 5}
    draw.commit(1, [made])
    assert draw.state()["turns"] == [[task, 1] for task in sorted([0, 1, *made.passed])]


def test_other_bands_come_before_those_passed_over_and_these_before_nothing():
    rates = rates_of(hard=[3], solved=[0, 1])
    draw = banded(4, [1, 0, 0], rates, solved_share=0.0)
    assert sorted(tasks_of(draw.draw(1, 2))) == [2, 3]
    made = draw.draw(1, 3)  # one place is left for a solved task
    assert len(made.passed) == 1 and sorted(tasks_of(made) + made.passed) == [0, 1, 2, 3]
    assert sorted(tasks_of(draw.draw(1, 4))) == [0, 1, 2, 3]


def test_two_groups_in_a_row_are_not_yet_solved():
    rates = PassRates()
    for _ in range(2):
        rates.update(0, [1.0, 1.0], 1.0)
    draw = banded(1, [1, 0, 0], rates, solved_share=0.0)
    assert draw.draw(1, 1).passed == [] and draw.draw(1, 1).prompts == [Drawn(0, EASY)]
    strict = banded(2, [1, 0, 0], rates, solved_share=0.0, solved_after=2)
    assert tasks_of(strict.draw(1, 1)) == [1]


def test_solved_tasks_come_at_a_quarter_of_their_turns():
    # As many easy tasks that are not always solved: each has every turn, these a quarter.
    rates = rates_of(easy=range(50), solved=range(50, 100))
    drawn = Counter(chain(*run(banded(100, [1, 0, 0], rates), range(1, 501), 10)))
    open_, solved = sum(drawn[t] for t in range(50)), sum(drawn[t] for t in range(50, 100))
    assert open_ + solved == 5000
    assert solved / open_ == pytest.approx(0.25, abs=0.03)
    # None is forgotten. Of tasks that had their turn in the same step any may be the first next
    # time, so one may get ahead of another, but by little.
    assert min(drawn.values()) > 0
    assert all(abs(drawn[t] - open_ / 50) <= 4 for t in range(50))


def test_a_task_passed_over_gets_no_second_chance_in_its_step():
    rates = rates_of(easy=range(30, 60), solved=range(30))
    for step in range(20):
        draw = banded(60, [1, 0, 0], rates, solved_share=0.5)
        first = draw.draw(step, 10)
        second = draw.draw(step, 10, [first])
        assert second.passed[: len(first.passed)] == first.passed
        assert not {*first.passed, *tasks_of(first)} & {*tasks_of(second)}


def test_rounds_of_a_step_round_their_shares_apart():
    draw = banded(40, [0.5, 0, 0.5], rates_of(easy=range(20), hard=range(20, 40)))
    same = 0
    for step in range(60):
        first = draw.draw(step, 1)
        same += first.prompts[0].band == draw.draw(step, 1, [first]).prompts[0].band
    assert 15 < same < 45  # half of them; always, if both rounds had one offset


def test_a_later_round_takes_those_passed_over_last():
    draw = banded(5, [1, 0, 0], rates_of(easy=[0], solved=[1, 2, 3, 4]), solved_share=0.0)
    first = draw.draw(1, 1)
    assert tasks_of(first) == [0]
    second = draw.draw(1, 4, [first])
    assert sorted(tasks_of(second)) == [1, 2, 3, 4] and second.passed == []


def test_steps_and_seeds_draw_differently():
    drawn = [
        frozenset(tasks_of(banded(1000, [0, 1, 0], PassRates(), seed=seed).draw(step, 8)))
        for seed, step in [(0, 1), (0, 2), (1, 1), (1, 2)]
    ]
    assert len(set(drawn)) == 4
