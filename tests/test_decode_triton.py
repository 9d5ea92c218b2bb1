"""Decode attention in Triton under the interpreter, against the reference in float64.

A program costs the interpreter some 20 ms, so one step holds many edges, and parts are made small
where several are to be seen at work.
"""

import math
from dataclasses import replace

import pytest
import torch

from decode_steps import IDLE, check_order, check_step, make_step
from grpo_engine.kernels import group_attention
from grpo_engine.kernels.group_attention import group_decode

# numpy, of which the interpreter is made, speaks up also where a value is not selected.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture
def small_parts(monkeypatch):
    """A part for every 32 keys, at most five."""
    monkeypatch.setattr(group_attention, "CHUNK", 32)
    monkeypatch.setattr(group_attention, "MOST_PARTS", 5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page"),
    [(1, 1, 16, 5), (3, 1, 64, 5), (4, 1, 80, 16), (6, 2, 20, 5)],
)
def test_lengths_around_a_page(heads, kv_heads, d, page):
    prompts = [page, IDLE, 1, page + 1, page - 1]
    slots = [(3, 1), (0, page), IDLE, (2, page + 1), (0, 1), (4, 2), (3, page - 1)]
    check_step(group_decode, make_step(prompts, slots, heads, kv_heads, d, page))


@pytest.mark.parametrize(("rows", "row"), [(2, 1), (4, 3), (11, 10)])
def test_fewer_and_as_many_and_more_rows_of_groups_than_slots(rows, row):
    # Lanes that are cut from many slots leave the rows; the group of a lane may be the last of all.
    prompts = [3, *[IDLE] * (row - 1), 12]
    slots = [(row, 2), (0, 1), IDLE, (row, 7)]
    check_step(group_decode, make_step(prompts, slots, heads=3, rows=rows))


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 70}])
@pytest.mark.parametrize(("prompt", "own"), [(150, 1), (32, 161), (400, 97)])
def test_several_parts(prompt, own, options, small_parts):
    # 400 keys are more than five parts of 32, so these parts grow; 161 have a new token behind them
    step = make_step([3, prompt], [(1, own), (0, 2), (1, own // 2 + 1)], page=16)
    check_step(group_decode, step, **options)


def test_more_queries_than_a_tile_holds():
    slots = [(0, 1 + i % 3) for i in range(7)] + [(1, 2)]  # 21 queries in tiles of five slots
    check_step(group_decode, make_step([9, 4], slots, heads=3))


@pytest.mark.parametrize("heads", [20, 32])
def test_more_query_heads_than_a_tile_holds(heads):
    step = make_step([9], [(0, 1), (0, 7)], heads, kv_heads=1)
    check_step(group_decode, step, window=10)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 4, 5, 6, 11, 18, 1000])
def test_windows(window, softcap):
    # From inside the own tokens to past the first of the prompt; slots of a tile see unlike spans.
    step = make_step([12, 6], [(0, 5), (1, 1), (0, 17), (0, 1)], heads=2)
    check_step(group_decode, step, window=window, softcap=softcap)


def test_a_window_of_one_is_the_value_of_the_new_token():
    step = make_step([12], [(0, 5), IDLE, (0, 1)], heads=2)
    out = check_step(group_decode, step, window=1)
    torch.testing.assert_close(out[[0, 2]], step.v[[0, 2]].expand(2, 2, 16), rtol=1e-6, atol=0)


def test_all_slots_idle():
    out = check_step(group_decode, make_step([IDLE], [IDLE, IDLE]))
    assert torch.equal(out, torch.zeros(2, 2, 16))


def test_strided_queries_keys_and_values():
    step = make_step([7, 3], [(1, 2), (0, 6)], heads=2, kv_heads=2)
    wanted = check_step(group_decode, step)
    packed = torch.cat([step.q, step.k, step.v], 1)
    q, k, v = packed.split(2, 1)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    for changes in ({"q": q, "k": k, "v": v}, {"q": transposed, "v": v.mT.contiguous().mT}):
        assert torch.equal(check_step(group_decode, replace(step, **changes)), wanted)


def test_the_order_of_slots_changes_no_bit():
    check_order(group_decode)


@pytest.mark.parametrize("factor", [1e2, -1e2])
def test_scores_far_beyond_the_range_of_exp(factor, small_parts):
    step = make_step([70], [(0, 70), (0, 1)], page=16)
    ramp = torch.linspace(0, 1, step.k_pages.shape[0])[:, None, None, None]
    step = replace(step, k_pages=step.k_pages + factor * ramp, q=step.q.abs())
    check_step(group_decode, step, scale=1.0, rtol=0, atol=1e-3)  # of scores of 4000


def test_a_nan_stays_in_its_slot_and_is_not_lost(small_parts):
    step = make_step([40], [(0, 50), (0, 3), (0, 36)], page=16)
    wanted = group_decode(**step.arguments(torch.float32), scale=0.3)
    step.q[1, 0, 3] = math.nan
    out = group_decode(**step.arguments(torch.float32), scale=0.3)
    assert out[1, 0].isnan().all()
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])
    assert torch.equal(out[1, 1], wanted[1, 1])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "window": 8}])
def test_half_precision_sums_in_float32(options, dtype, atol, small_parts):
    step = make_step([50, 3], [(0, 40), (1, 2), (0, 1)], heads=3, page=16)
    check_step(group_decode, step, dtype=dtype, rtol=2 * atol, atol=atol, **options)


class Recorder:
    """Stands in for a kernel: what its launches were."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *arguments, **constexprs: self.grids.append(grid)


@pytest.mark.parametrize(
    ("slots", "prefix_pages", "parts"),
    [
        (4, 64, 4 + 2),  # 1024 and 320 tokens, 256 a part
        (4, 4096, 16 + 2),
        (1, 1, 1 + 2),
        (128, 4096, 4 + 2),  # 256 programs a part
        (1024, 4096, 1 + 1),
    ],
)
def test_grids_follow_from_shapes_for_the_host_can_read_no_length(
    slots, prefix_pages, parts, monkeypatch
):
    attend, merge = Recorder(), Recorder()
    monkeypatch.setattr(group_attention, "attend_kernel", attend)
    monkeypatch.setattr(group_attention, "merge_kernel", merge)
    step = make_step([1], [IDLE], heads=8, kv_heads=2, page=16)
    given = {name: x.to("meta") for name, x in vars(step).items() if name != "tables"}
    tables = {name: x.to("meta") for name, x in vars(step.tables).items()}
    tables["prefix_table"] = torch.empty(slots, prefix_pages, dtype=torch.int32, device="meta")
    tables["suffix_table"] = torch.empty(slots, 20, dtype=torch.int32, device="meta")
    for name in ("q", "k", "v"):
        given[name] = given[name].expand(slots, -1, -1)
    out = group_decode(**given, tables=replace(step.tables, **tables), scale=1.0)
    assert out.shape == (slots, 8, 16)
    assert attend.grids == [(slots, 2, parts)]
    assert merge.grids == [(slots, 8)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 2, 16).half()}, "must share one"),
        ({"q": torch.zeros(2, 2, 16).double()}, "must share one"),
        ({"q": torch.zeros(2, 3, 16)}, "multiple of H_kv"),
        ({"q": torch.zeros(2, 2, 15)}, "multiple of H_kv"),
        ({"k": torch.zeros(3, 2, 16)}, r"k, v must be \[2, 2, 16\]"),
        ({"v": torch.zeros(2, 1, 16)}, r"k, v must be \[2, 2, 16\]"),
        ({"k_pages": torch.zeros(4, 5, 16, 2).mT}, "contiguous"),
        ({"v_pages": torch.zeros(3, 5, 2, 16)}, "same shape"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(changes, message):
    step = make_step([3], [(0, 1), IDLE], heads=2, kv_heads=2)
    step = replace(step, k_pages=torch.zeros(4, 5, 2, 16), v_pages=torch.zeros(4, 5, 2, 16))
    with pytest.raises(ValueError, match=message):
        group_decode(**(vars(step) | changes), scale=1.0)


def test_a_head_dim_above_256_is_refused():
    step = make_step([3], [(0, 1)], d=257)
    with pytest.raises(ValueError, match="at most 256"):
        group_decode(**vars(step), scale=1.0)
