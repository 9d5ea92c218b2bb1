"""Which decode attention runs, and what the one in C++ refuses before it writes anything."""

import functools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from decode_steps import IDLE, check_step, make_step
from grpo_engine import cpu_decode, decode_ops
from grpo_engine.kernels import flash_decode, group_attention, reference_decode

DECODERS = {
    "cpp": cpu_decode,
    "torch": reference_decode,
    "triton": group_attention,
    "flash": flash_decode,
}


def small_step():
    """Rows 0 and 2 live, row 1 empty; slot 2 idle. Pages 1 to 7 of 9 are used."""
    step = make_step([7, IDLE, 3], [(2, 6), (0, 2), IDLE, (0, 1)], heads=2, kv_heads=2)
    assert step.tables.order.tolist() == [1, 3, 0, 2]
    assert step.tables.cu_slots.tolist() == [0, 2, 2, 3, 3]
    return step


def assert_refused(step, message, **options):
    given = vars(step) | {"scale": 1.0} | options
    before = [step.k_pages.clone(), step.v_pages.clone()]
    with pytest.raises(ValueError, match=message):
        cpu_decode.group_decode(**given)
    for pool, was in zip((step.k_pages, step.v_pages), before, strict=True):
        assert torch.equal(pool, was) or torch.equal(
            pool.contiguous().view(torch.int32), was.contiguous().view(torch.int32)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 32)}, r"q must have 3 dimensions; given \[4, 32\]"),
        ({"k_pages": torch.zeros(9, 5, 32)}, r"k_pages must have 4 dimensions; given \[9, 5, 32\]"),
        ({"q": torch.zeros(4, 3, 16)}, "q must have a multiple of 2 heads; given 3"),
        ({"q": torch.zeros(4, 0, 16)}, "q must have a multiple of 2 heads; given 0"),
        ({"k_pages": torch.zeros(9, 5, 0, 16)}, "q must have a multiple of 0 heads; given 2"),
        (
            {"q": torch.zeros(4, 2, 16).double()},
            "q must be one of float32, bfloat16, float16; .*64",
        ),
        ({"q": torch.zeros(4, 2, 16).int()}, "q must be one of .*int32"),
        ({"q": torch.zeros(4, 2, 16).half()}, r"k must be \[4, 2, 16\] torch.float16 on cpu"),
        ({"q": torch.zeros(4, 16, 2).mT}, "q must be contiguous in its last dimension; .*: 2"),
        ({"q": torch.zeros(4, 2, 16, device="meta")}, "q must be .* on cpu; .* on meta"),
        ({"k": torch.zeros(4, 1, 16)}, r"k must be \[4, 2, 16\] .*; given \[4, 1, 16\]"),
        ({"k": torch.zeros(4, 2, 16).bfloat16()}, "k must be .*float32 on cpu; .*bfloat16"),
        ({"k": torch.zeros(4, 2, 32)[..., ::2]}, "k must be contiguous in its last dimension"),
        ({"v": torch.zeros(4, 2, 8)}, r"v must be \[4, 2, 16\]"),
        ({"v": torch.zeros(4, 16, 2).mT}, "v must be contiguous in its last dimension"),
        ({"k_pages": torch.zeros(9, 5, 2, 8)}, r"k_pages must be \[9, 5, 2, 16\]"),
        ({"k_pages": torch.zeros(9, 5, 16, 2).mT}, "k_pages must be contiguous; its strides"),
        ({"v_pages": torch.zeros(8, 5, 2, 16)}, r"v_pages must be \[9, 5, 2, 16\]"),
        ({"v_pages": torch.zeros(9, 5, 2, 16).half()}, "v_pages must be .*float32 on cpu"),
        ({"v_pages": torch.zeros(9, 2, 5, 16).transpose(1, 2)}, "v_pages must be contiguous"),
    ],
)
def test_tensors_that_cannot_be_read(changes, message):
    step = replace(small_step(), k_pages=torch.zeros(9, 5, 2, 16), v_pages=torch.ones(9, 5, 2, 16))
    assert_refused(replace(step, **changes), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap must be > 0; given 0.0"),
        ({"softcap": -1.0}, "softcap must be > 0; given -1.0"),
        ({"softcap": float("nan")}, "softcap must be > 0; given nan"),
        ({"window": 0}, "window must be >= 1; given 0"),
        ({"window": -3}, "window must be >= 1; given -3"),
    ],
)
def test_options_that_mean_nothing(options, message):
    assert_refused(small_step(), message, **options)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("suffix_len", lambda x: x.long(), "suffix_len must be contiguous int32 on cpu; .*int64"),
        ("order", lambda x: x.repeat(2)[::2], "order must be contiguous int32 on cpu"),
        ("prefix_table", lambda x: x.to("meta"), "prefix_table must be .*on cpu; given .*meta"),
        ("suffix_table", lambda x: x.T.contiguous().T, "suffix_table must be contiguous"),
        ("prefix_table", lambda x: x[:-1], "prefix_table must have 2 dimensions, the first of 4"),
        ("prefix_table", lambda x: x[:, 0].clone(), "prefix_table must have 2 dimensions"),
        ("suffix_table", lambda x: x[:-1], "suffix_table must have 2 dimensions, the first of 4"),
        ("suffix_len", lambda x: x[:-1], "suffix_len must have 1 dimensions, the first of 4"),
        ("suffix_len", lambda x: x[:, None], "suffix_len must have 1 dimensions, the first of 4"),
        ("order", lambda x: x[:-1], "order must have 1 dimensions, the first of 4"),
        ("cu_slots", lambda x: x[:-1], "cu_slots must have 1 dimensions, the first of 5"),
        ("slot_group", lambda x: x[:, None].contiguous(), "slot_group must have 1 dimensions"),
        # Values: row 0 has 7 tokens on 2 pages of 4, slot 0 has 6, slot 1 has 2.
        ("prefix_table", {(0, 0): 9}, "prefix_table must hold pages of the pool"),
        ("prefix_table", {(0, 1): -1}, "prefix_table must hold pages of the pool"),
        ("prefix_len", {0: -1}, "prefix_len must be >= 0 and fit into the pages of prefix_table"),
        ("prefix_len", {0: 21}, "prefix_len must be >= 0 and fit into the pages of prefix_table"),
        ("suffix_table", {(0, 1): 9}, "suffix_table must hold pages of the pool"),
        ("suffix_table", {(1, 0): -1}, "suffix_table must hold pages of the pool"),
        ("suffix_len", {0: 21}, "suffix_len must fit into the pages of suffix_table"),
        ("cu_slots", {0: 1}, "cu_slots must start at 0"),
        ("cu_slots", {2: 1}, "cu_slots must never fall and end at most at W"),
        ("cu_slots", {4: 5}, "cu_slots must never fall and end at most at W"),
        ("cu_slots", {3: 5}, "cu_slots must never fall and end at most at W"),
        ("cu_slots", {3: 2, 4: 2}, "order must hold each active slot once"),
        ("cu_slots", {4: 4}, "order must hold the slots of each row, as slot_group"),
        ("order", {0: 4}, "order must hold slots"),
        ("order", {2: -1}, "order must hold slots"),
        ("order", {0: 3}, "order must hold each active slot once"),
        ("order", {0: 0}, "order must hold the slots of each row, as slot_group"),
        ("slot_group", {3: 1}, "order must hold the slots of each row, as slot_group"),
        ("slot_group", {3: -1}, "order must hold the slots of each row, as slot_group"),
        ("slot_group", {0: 9}, "order must hold the slots of each row, as slot_group"),
    ],
)
def test_tables_that_point_outside_or_contradict_each_other(name, change, message):
    step = small_step()
    x = getattr(step.tables, name).clone()
    if callable(change):
        x = change(x)
    else:
        for place, value in change.items():
            x[place] = value
    assert_refused(replace(step, tables=replace(step.tables, **{name: x})), message)


@pytest.mark.parametrize("slots", [0, 3, 5])
def test_another_number_of_slots_in_the_tensors_than_in_the_tables(slots):
    step = small_step()
    others = {name: torch.zeros(slots, 2, 16) for name in ("q", "k", "v")}
    assert_refused(replace(step, **others), "q must have as many slots as the tables")


def test_what_the_tables_of_idle_rows_and_slots_say_does_not_matter():
    step = small_step()
    t = step.tables
    wanted = check_step(cpu_decode.group_decode, step, scale=1.0)
    t.prefix_len[1], t.prefix_len[3], t.prefix_table[1], t.suffix_table[2] = -5, 10**6, -1, 10**6
    t.prefix_table[0, 2:], t.suffix_table[0, 2:] = -1, 9  # past the pages in use
    out = cpu_decode.group_decode(**step.arguments(torch.float32), scale=1.0)
    assert torch.equal(out, wanted)


@pytest.fixture
def reached(monkeypatch):
    """Who reaches an implementation raises LookupError with its name."""
    for name, module in DECODERS.items():
        monkeypatch.setattr(module, "group_decode", Mock(side_effect=LookupError(name)))


def choice(dtype=torch.float32, **options):
    with pytest.raises(LookupError) as caught:
        decode_ops.group_decode(**small_step().arguments(dtype), scale=1.0, **options)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("impl", "name"), [("auto", "cpp"), ("cpp", "cpp"), ("torch", "torch")])
def test_cpu_tensors_go_to_cpp_and_to_torch_by_name(dtype, impl, name, reached):
    assert choice(dtype, impl=impl) == name


def test_float64_goes_to_torch_alone(reached):
    assert choice(torch.float64) == "torch"
    assert choice(torch.float64, impl="torch") == "torch"
    for impl in ("cpp", "triton"):
        with pytest.raises(ValueError, match=f"float64 goes only with impl 'torch'; .*'{impl}'"):
            choice(torch.float64, impl=impl)


def test_an_unknown_implementation_is_refused(reached):
    with pytest.raises(ValueError, match=r"impl must be one of auto, triton, cpp, torch; .*'fast'"):
        choice(impl="fast")


@pytest.mark.parametrize(
    ("impl", "serves", "name"),
    [("auto", True, "flash"), ("auto", False, "triton"), ("triton", True, "triton")],
)
def test_flash_attn_only_where_it_serves_and_nobody_asked_for_triton(
    impl, serves, name, reached, monkeypatch
):
    asked = Mock(return_value=serves)
    monkeypatch.setattr(flash_decode, "serves", asked)
    monkeypatch.setattr(decode_ops, "implementation", lambda impl, q: "triton")  # as on CUDA
    assert choice(impl=impl, window=3) == name
    assert [call.args[3] for call in asked.call_args_list] == [3] * (impl == "auto")


# numpy, of which Triton's interpreter is made, speaks up also where a value is not selected.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["auto", "cpp", "torch", "triton"])
def test_every_implementation_passes_its_options_on(impl):
    decode = functools.partial(decode_ops.group_decode, impl=impl)
    check_step(decode, small_step(), scale=0.4, softcap=1.5, window=4)
