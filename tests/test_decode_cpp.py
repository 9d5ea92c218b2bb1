"""Decode attention in C++ by each instruction set, against the reference in float64."""

import math
from dataclasses import replace

import pytest
import torch

from decode_steps import IDLE, check_order, check_step, int32, make_step
from grpo_engine import _C
from grpo_engine.cpu_decode import group_decode
from sample_cases import ISAS

HALF_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding, relative
CHUNK = 256  # keys of a prompt that one task reads; above 16 chunks they grow
TILE = 48  # query rows that read a chunk together


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    """Every test by every instruction set of this CPU, torch.empty full of NaN."""
    _C.use_isa(request.param)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    _C.use_isa(_C.best_isa())


def bits(step, dtype=torch.float32, **options):
    """The result as integers, so that NaN equals itself; `step` stays as it is."""
    out = group_decode(**step.arguments(dtype), **{"scale": 0.3} | options)
    return out.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])


def alone(step, slot):
    """The same step for one of its slots, as if there were no other."""
    t = step.tables
    row = int(t.slot_group[slot])
    kept = slice(slot, slot + 1)
    tables = replace(
        t,
        suffix_table=t.suffix_table[kept].clone(),
        suffix_len=t.suffix_len[kept].clone(),
        slot_group=t.slot_group[kept].clone(),
        order=int32([0]),
        cu_slots=int32([int(row < r) for r in range(len(t.prefix_len) + 1)]),
    )
    return replace(step, q=step.q[kept], k=step.k[kept], v=step.v[kept], tables=tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page"),
    [(1, 1, 16, 5), (2, 1, 20, 16), (3, 1, 64, 5), (4, 2, 80, 16), (9, 1, 128, 5), (6, 2, 256, 5)],
)
def test_lengths_around_a_page(heads, kv_heads, d, page, dtype):
    prompts = [page, IDLE, 1, page + 1, page - 1]
    slots = [(3, 1), (0, page), IDLE, (2, page + 1), (0, 1), (4, 2), (3, page - 1)]
    rtol = HALF_STEP.get(dtype, 0) + 3e-6
    step = make_step(prompts, slots, heads, kv_heads, d, page)
    check_step(group_decode, step, dtype=dtype, rtol=rtol, atol=3e-6)


@pytest.mark.parametrize("d", [1, 3, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims_that_fill_no_vector(d, dtype):
    step = make_step([70], [(0, 3), (0, 66)], heads=2, d=d, page=16)
    check_step(group_decode, step, dtype=dtype, rtol=HALF_STEP.get(dtype, 0) + 3e-6, atol=3e-6)


@pytest.mark.parametrize(("rows", "row"), [(2, 1), (4, 3), (11, 10)])
def test_fewer_and_as_many_and_more_rows_of_groups_than_slots(rows, row):
    prompts = [3, *[IDLE] * (row - 1), 12]
    slots = [(row, 2), (0, 1), IDLE, (row, 7)]
    check_step(group_decode, make_step(prompts, slots, heads=3, rows=rows))


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 70}, {"window": 480}])
@pytest.mark.parametrize("prompt", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 63, 700])
def test_prompts_of_several_chunks(prompt, options):
    # Windows: of 70, the members of the tile see unlike parts of the last chunk or no chunk at all.
    step = make_step([3, prompt], [(1, 1), (0, 2), (1, 66), (1, 75)], heads=3, page=16)
    check_step(group_decode, step, rtol=3e-6, atol=3e-6, **options)


@pytest.mark.parametrize("prompt", [16 * CHUNK, 16 * CHUNK + 1])
def test_chunks_grow_where_sixteen_would_not_reach(prompt):
    step = make_step([prompt], [(0, 130), (0, 1)], heads=2, page=64)
    check_step(group_decode, step, scale=0.1, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("slots", "heads", "kv_heads"), [(49, 1, 1), (34, 6, 2), (3, 60, 1)])
def test_more_queries_than_a_tile_holds(slots, heads, kv_heads):
    assert slots * heads // kv_heads > TILE
    step = make_step([CHUNK + 9, 4], [(0, 1 + i % 3) for i in range(slots)], heads, kv_heads)
    check_step(group_decode, step, window=CHUNK, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("softcap", [None, 1.5, 50.0])
@pytest.mark.parametrize("window", [1, 4, 5, 6, 11, 18, 1000])
def test_windows(window, softcap):
    # From inside the own tokens to past the first of the prompt; slots of a tile see unlike spans.
    step = make_step([12, 6], [(0, 5), (1, 1), (0, 17), (0, 1)], heads=2)
    check_step(group_decode, step, window=window, softcap=softcap, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("own", [1, 64, 65, 130])
def test_what_lies_before_the_window_is_as_if_it_were_not_there(own):
    step = make_step([300], [(0, own)], heads=2, page=16)
    wanted = bits(step, window=100)
    first = 300 + own - 100  # the first position that is seen
    for pool in (step.k_pages, step.v_pages):
        for token in range(min(first, 300)):
            pool[step.tables.prefix_table[0, token // 16], token % 16] = 7.5
        for token in range(first - 300):
            pool[step.tables.suffix_table[0, token // 16], token % 16] = 7.5
    assert torch.equal(bits(step, window=100), wanted)
    assert not torch.equal(bits(step, window=101), wanted)


def test_a_window_of_one_is_the_value_of_the_new_token():
    step = make_step([12], [(0, 5), IDLE, (0, 1)], heads=2)
    out = check_step(group_decode, step, window=1)
    assert torch.equal(out[[0, 2]], step.v[[0, 2]].expand(2, 2, 16))


def test_all_slots_idle_and_a_slot_of_no_group_with_tokens():
    step = make_step([5], [IDLE, (0, 2), IDLE])
    tables = replace(
        step.tables, slot_group=int32([-1] * 3), cu_slots=int32([0] * 4), order=int32([2, 0, 1])
    )
    given = replace(step, tables=tables).arguments(torch.float32)
    assert torch.equal(group_decode(**given, scale=1.0), torch.zeros(3, 2, 16))
    assert torch.equal(given["k_pages"].view(torch.int32), step.k_pages.view(torch.int32))
    out = check_step(group_decode, make_step([IDLE], [IDLE, IDLE]))
    assert torch.equal(out, torch.zeros(2, 2, 16))


def test_strided_queries_keys_and_values():
    step = make_step([7, 3], [(1, 2), (0, 6)], heads=2, kv_heads=2)
    wanted = check_step(group_decode, step)
    packed = torch.cat([step.q, step.k, step.v], 1)
    q, k, v = packed.split(2, 1)
    by_head = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    for changes in ({"q": q, "k": k, "v": v}, {"q": by_head, "v": v}):
        changed = replace(step, **changes)
        assert not changed.q.is_contiguous()
        assert torch.equal(check_step(group_decode, changed), wanted)
        assert torch.equal(bits(changed), bits(step))


def test_one_row_of_keys_for_every_slot_and_head():
    step = make_step([7], [(0, 2), (0, 6)], heads=2, kv_heads=2)
    check_step(group_decode, replace(step, k=step.k[:1, :1].expand(2, 2, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 290}])
def test_a_slot_has_the_same_bits_alone(dtype, options):
    # 3 heads: tiles of 16 slots, of which some see more of the prompt than others.
    slots = [(i % 2, 1 + 11 * (i // 2) % 140) for i in range(40)]
    step = make_step([600, 31], [*slots, IDLE], heads=3, d=20, page=16)
    together = bits(step, dtype, **options)
    for slot in range(40):
        assert torch.equal(bits(alone(step, slot), dtype, **options)[0], together[slot]), slot


def test_the_order_of_slots_changes_no_bit():
    check_order(group_decode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_number_of_threads_changes_no_bit(dtype):
    step = make_step([600, 300], [(i % 2, 1 + 9 * i) for i in range(20)], heads=4, d=32, page=16)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(bits(step, dtype))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("prompt", [70, 600])
@pytest.mark.parametrize("factor", [1e2, -1e2])
def test_scores_far_beyond_the_range_of_exp(factor, prompt):
    step = make_step([prompt], [(0, 70), (0, 1)], page=16)
    ramp = torch.linspace(0, 1, step.k_pages.shape[0])[:, None, None, None]
    step = replace(step, k_pages=step.k_pages + factor * ramp, q=step.q.abs())
    check_step(group_decode, step, scale=1.0, rtol=0, atol=1e-3)  # of scores of 4000


@pytest.mark.parametrize("gap", [86.0, 88.0, 103.0, 1e4])
def test_a_weight_is_e_to_the_gap_down_to_the_least_normal_number_and_then_0(gap):
    # One key of the prompt has score 0, the new one `gap`; values 1 and 0 leave the weight alone.
    step = make_step([1], [(0, 1)], heads=1, page=16)
    step.q.fill_(0.0)[..., 0] = 1.0
    step.k.fill_(0.0)[..., 0] = gap
    step.v.zero_()
    place = int(step.tables.prefix_table[0, 0]), 0
    step.k_pages[place], step.v_pages[place] = 0.0, 1.0
    out = group_decode(**step.arguments(torch.float32), scale=1.0)
    wanted = math.exp(-gap) if gap < 87 else 0.0
    assert out.flatten().tolist() == pytest.approx([wanted] * 16, rel=1e-5, abs=0)


def test_a_nan_stays_in_its_slot_and_is_not_lost():
    step = make_step([CHUNK + 40], [(0, 50), (0, 3), (0, 70)], page=16)
    wanted = group_decode(**step.arguments(torch.float32), scale=0.3)
    step.q[1, 0, 3] = math.nan
    out = group_decode(**step.arguments(torch.float32), scale=0.3)
    assert out[1, 0].isnan().all()
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])
    assert torch.equal(out[1, 1], wanted[1, 1])
    step.q[1, 0, 3], step.v[2, 0, 5], step.k[0, 0, 1] = 1.0, math.nan, math.nan
    out = group_decode(**step.arguments(torch.float32), scale=0.3)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()
    assert out[2].isnan().nonzero().tolist() == [[0, 5], [1, 5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "window": 300}])
def test_half_precision_sums_in_float32_and_rounds_once(options, dtype):
    step = make_step([600, 3], [(0, 140), (1, 2), (0, 1)], heads=3, page=16)
    rtol = HALF_STEP[dtype] + 3e-6
    check_step(group_decode, step, dtype=dtype, rtol=rtol, atol=3e-6, **options)


def test_tables_are_read_anew_and_what_one_step_wrote_the_next_one_sees():
    step = make_step([9], [(0, 4), (0, 12)], heads=2)
    pools = step.k_pages.clone(), step.v_pages.clone()
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        q = torch.randn(2, 2, 16, generator=random)
        k, v = (torch.randn(2, 1, 16, generator=random) for _ in range(2))
        now = replace(step, q=q, k=k, v=v, k_pages=pools[0].clone(), v_pages=pools[1].clone())
        wanted = check_step(group_decode, now)
        out = group_decode(q, k, v, *pools, step.tables, 0.25)
        assert torch.equal(out, wanted)
        step.tables.suffix_len.add_(1)  # in place, the tensors are those of the last step
