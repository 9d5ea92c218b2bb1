"""`SlotScheduler` against its rules in plain Python, and its tables in use."""

import gc
import heapq
import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from grpo_engine import _C
from grpo_engine.kernels.reference_decode import DecodeTables, group_decode
from slot_model import Pair


def random_work(rng, least_size=0):
    page = rng.choice([1, 2, 4, 16])
    lengths = sorted({1, max(1, page - 1), page, page + 1, 3 * page, rng.randint(1, 40)})
    sizes = [rng.randint(least_size, 6) for _ in range(rng.randint(0, 7))]
    prompt_len = rng.choices(lengths, k=len(sizes))
    limits = rng.choices(lengths, k=sum(sizes))
    return page, prompt_len, limits, [0, *accumulate(sizes)]


def pages_at_least(page, prompt_len, limits, cu_groups):
    spans = zip(prompt_len, pairwise(cu_groups), strict=True)
    needs = [-(-p // page) + -(-max(limits[a:b]) // page) for p, (a, b) in spans if b > a]
    return max(needs, default=1)


@pytest.mark.parametrize("pool", ["least", "tight", "plenty"])
@pytest.mark.parametrize("seed", range(100))
def test_random_steps_follow_the_rules(seed, pool):
    rng = random.Random(seed)
    page, *lengths = random_work(rng)
    extra = {"least": 0, "tight": rng.randint(1, 8), "plenty": 400}[pool]
    n_pages = pages_at_least(page, *lengths) + extra
    pair = Pair(rng.choice([1, 1, 2, 3, 5, 8, 50]), page, n_pages, *lengths)
    model, started = pair.model, []
    while not pair.real.done:
        act = rng.choice(["admit", "advance", "advance", "finish"])
        if act == "admit" or not model.seats:
            started += [sample for _, sample in pair.admit()[1]]
            assert model.seats  # nothing is stuck
        elif act == "advance":
            able = [s for s in model.seats if model.lengths[s] < model.limits[model.seats[s]]]
            pair.advance(rng.sample(able, rng.randint(0, len(able))))
        else:
            pair.finish(rng.choice(list(model.seats)))
    assert started == list(range(len(lengths[1])))
    assert pair.real.pool.used == 0 and pair.admit() == ([], [])


@pytest.mark.parametrize("slots", [1, 2, 4, 100])
@pytest.mark.parametrize("seed", range(15))
def test_a_run_takes_as_long_as_the_list_schedule_and_stays_within_its_pages(seed, slots):
    rng = random.Random(1000 + seed)
    page, prompt_len, limits, cu_groups = random_work(rng, least_size=1)
    lengths = [rng.randint(1, limit) for limit in limits]
    scheduler = _C.SlotScheduler(slots, page, 2000, prompt_len, limits, cu_groups)
    left, seats, ticks, live = {}, {}, 0, 0
    while not scheduler.done:
        _, placed = scheduler.admit()
        scheduler.advance(sorted(seats))  # the placed draw their first token from the prompt
        seats.update(placed)
        left.update({slot: lengths[sample] for slot, sample in placed})
        live = max(live, np.count_nonzero(scheduler.views["prefix_len"]))
        ticks += 1
        for slot in list(seats):
            left[slot] -= 1
            if left[slot] == 0:
                scheduler.finish(slot)
                del seats[slot]
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    assert ticks == max(free_at)
    most = [-(-max(x, default=0) // page) for x in (prompt_len, limits)]
    assert scheduler.pool.peak <= live * most[0] + slots * most[1]


def test_one_slot_needs_the_pages_of_one_prompt_and_one_sample():
    scheduler = _C.SlotScheduler(1, 4, 5, [5, 8], [9, 12, 1, 12], [0, 2, 4])
    rows = []
    while not scheduler.done:
        scheduler.admit()
        rows.append(scheduler.views["suffix_table"][0].tolist())
        scheduler.finish(0)
    assert rows[0] == rows[1] == rows[3] == [2, 3, 4]  # the same pages, in the same order
    assert scheduler.pool.peak == 5


def test_a_sample_that_does_not_fit_is_not_overtaken():
    pair = Pair(3, 4, 4, [4], [8, 8, 1], [0, 3])  # 1 + 2, 2, 1 pages
    assert pair.admit() == ([(0, 0)], [(0, 0)])
    assert pair.admit() == ([], [])
    pair.finish(0)
    assert pair.admit() == ([], [(0, 1), (1, 2)])


def test_a_group_keeps_its_row_and_pages_until_its_last_sample_ends():
    pair = Pair(2, 4, 20, [4, 1, 5], [1, 1, 4, 4, 1], [0, 2, 3, 5])
    assert pair.admit() == ([(0, 0)], [(0, 0), (1, 1)])
    pair.finish(1)
    assert pair.admit() == ([(1, 1)], [(1, 2)])
    assert pair.real.pool.count(0) == 1  # the prompt's; sample 0 is left
    pair.finish(1)
    assert pair.admit() == ([(2, 1)], [(1, 3)])
    pair.finish(1)
    pair.finish(0)  # group 2 lives on without a slot, in row 1
    assert pair.admit() == ([], [(0, 4)])
    assert pair.views["slot_group"].tolist() == [1, -1]
    assert pair.views["cu_slots"].tolist() == [0, 0, 1]


def test_the_tables_are_one_buffer_that_outlives_the_name_of_its_scheduler():
    scheduler = _C.SlotScheduler(3, 4, 20, [5, 1], [4, 5, 9], [0, 2, 3])
    tables, views, layout = scheduler.tables, scheduler.views, scheduler.layout
    scheduler.admit()
    scheduler.advance(np.array([0, 2], np.int32))
    del scheduler
    gc.collect()
    expected = {
        "prefix_table": [[0, 1], [5, 0], [0, 0]],
        "prefix_len": [5, 1, 0],
        "suffix_table": [[2, 0, 0], [3, 4, 0], [6, 7, 8]],
        "suffix_len": [1, 0, 1],
        "slot_group": [0, 0, 1],
        "order": [0, 1, 2],
        "cu_slots": [0, 2, 3, 3],
    }
    assert {name: view.tolist() for name, view in views.items()} == expected
    assert tables.dtype == np.int32 and list(layout) == list(views)
    for name, (start, shape) in layout.items():
        assert start % 4 == 0
        assert tables[start : start + np.prod(shape)].reshape(shape).tolist() == expected[name]
        tables[start] = 77
        assert views[name].flat[0] == 77


def test_no_groups_and_empty_groups_are_done_at_once():
    for lengths in ([], [], [0]), ([9, 9], [], [0, 0, 0]):
        scheduler = _C.SlotScheduler(2, 4, 1, *lengths)
        assert scheduler.done and scheduler.admit() == ([], [])
        assert scheduler.views["order"].tolist() == [0, 1]
        assert scheduler.views["suffix_table"].shape == (2, 0)


def decode_steps(scheduler, k_pages, v_pages, steps, rng):
    """Runs all samples; yields what group_decode gives each slot, and its keys and values."""
    page, width = k_pages.shape[1], k_pages.shape[2:]
    prompts, own = {}, {}
    tables = DecodeTables(**{n: torch.from_numpy(v) for n, v in scheduler.views.items()})
    while not scheduler.done:
        groups, placed = scheduler.admit()
        for _, row in groups:
            length = int(tables.prefix_len[row])
            prompts[row] = torch.randn(2, length, *width, generator=rng)
            ids = tables.prefix_table[row].long()
            at = ids[torch.arange(length) // page], torch.arange(length) % page
            k_pages[at], v_pages[at] = prompts[row]
        for slot, sample in placed:
            own[slot] = [sample, prompts[int(tables.slot_group[slot])]]
        scheduler.advance(sorted(own))
        q, k, v = torch.randn(3, len(tables.order), *width, generator=rng)
        out = group_decode(q, k, v, k_pages, v_pages, tables, 0.5)
        for slot, (sample, past) in list(own.items()):
            own[slot][1] = torch.cat([past, torch.stack([k[slot], v[slot]])[:, None]], 1)
            yield q[slot], *own[slot][1], out[slot]
            if tables.suffix_len[slot] == steps[sample]:
                scheduler.finish(slot)
                del own[slot]
        free = [i for i in range(len(k_pages)) if scheduler.pool.count(i) == 0]
        k_pages[free] = v_pages[free] = torch.nan


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_decoding_by_the_tables_is_attention_over_prompt_and_own_tokens(slots):
    steps = [3, 1, 8, 4, 5, 2, 7, 4]
    scheduler = _C.SlotScheduler(slots, 4, 60, [1, 3, 4, 5], steps, [0, 3, 4, 6, 8])
    rng = torch.Generator().manual_seed(0)
    k_pages, v_pages = torch.full((2, 60, 4, 2, 8), torch.nan)
    checked = 0
    for q, k, v, out in decode_steps(scheduler, k_pages, v_pages, steps, rng):
        weights = torch.einsum("hd,thd->ht", q, k).mul(0.5).softmax(-1)
        torch.testing.assert_close(out, torch.einsum("ht,thd->hd", weights, v))
        checked += 1
    assert checked == sum(steps)


GOOD = dict(slots=2, page=4, n_pages=5, prompt_len=[4, 5], limits=[1, 4, 9], cu_groups=[0, 2, 3])


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("slots must be >= 1; given 0", {"slots": 0}),
        ("page must be >= 1; given -4", {"page": -4}),
        ("n_pages must be >= 1; given 0", {"n_pages": 0}),
        ("n_pages: group 1 needs 5, 2 for its prompt and 3 .* given 4", {"n_pages": 4}),
        ("n_pages: group 1 needs 5", {"n_pages": 4, "cu_groups": [0, 0, 3]}),
        ("prompt_len of group 1 must be >= 1; given 0", {"prompt_len": [4, 0]}),
        ("limits of sample 2 must be >= 1; given -1", {"limits": [1, 4, -1]}),
        ("cu_groups must hold 3 values.*given 2", {"cu_groups": [0, 3]}),
        ("cu_groups must hold 3 values.*given 0", {"cu_groups": []}),
        ("cu_groups must start at 0", {"cu_groups": [1, 2, 3]}),
        ("cu_groups must .* never fall", {"cu_groups": [0, 4, 3]}),
        ("cu_groups must .* end at 3, the size of limits", {"cu_groups": [0, 2, 4]}),
    ],
)
def test_bad_arguments_are_refused_by_name(message, changes):
    with pytest.raises(ValueError, match=message):
        _C.SlotScheduler(**{**GOOD, **changes})


@pytest.mark.parametrize("convert", [list, tuple, np.array, lambda x: np.array(x, np.int16)])
def test_integers_of_any_width_are_taken_and_nothing_else(convert):
    lengths = {name: convert(GOOD[name]) for name in ("prompt_len", "limits", "cu_groups")}
    assert _C.SlotScheduler(**{**GOOD, **lengths}).admit() == ([(0, 0)], [(0, 0), (1, 1)])
    for wrong in [4.0, 5.0], np.array([4.0, 5.0], np.float32), [2**32 + 4, 5], [[4, 5]]:
        with pytest.raises(TypeError, match="prompt_len"):
            _C.SlotScheduler(**{**GOOD, "prompt_len": wrong})


@pytest.mark.parametrize(
    ("message", "act"),
    [
        ("slot must be in .0, 4.; given 4", lambda s: s.finish(4)),
        ("slot must be in .0, 4.; given -1", lambda s: s.finish(-1)),
        ("slot 3 is idle", lambda s: s.finish(3)),
        ("slot 3 is idle", lambda s: s.advance([0, 3])),
        ("slot must be in .0, 4.; given 9", lambda s: s.advance([0, 9])),
        ("slots: slot 0 is given twice", lambda s: s.advance([2, 0, 0])),
        ("slots: slot 1 is at its limit of 2", lambda s: s.advance([0, 1])),
    ],
)
def test_a_refused_step_changes_nothing(message, act):
    pair = Pair(4, 4, 9, [3], [9, 2, 4], [0, 3])
    pair.admit()
    pair.advance([1])
    pair.advance([1, 0])
    with pytest.raises(ValueError, match=message):
        act(pair.real)
    pair.compare()


def test_a_pool_that_others_have_emptied_is_reported_not_waited_for():
    scheduler = _C.SlotScheduler(**GOOD)
    taken = scheduler.pool.alloc(4)
    with pytest.raises(RuntimeError, match="sample 0 of group 0 needs 2 pages; 1 of 5 are free"):
        scheduler.admit()
    scheduler.pool.release(taken[0])
    assert scheduler.admit() == ([(0, 0)], [(0, 0)])
