"""The flash-attn route: a stand-in of flash_attn_with_kvcache's signature, written in PyTorch."""

import math
import sys
import types
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from decode_steps import IDLE, check_step, make_step
from grpo_engine import decode_ops
from grpo_engine.kernels import flash_decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
PAGE = 256
TWO_GROUPS = {
    "prompts": [PAGE + 44, IDLE, 1],
    "slots": [(2, 1), (0, PAGE), IDLE, (0, PAGE + 1), (2, 3), (0, 17)],
    "page": PAGE,
}


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """What flash-attn 2.8.3 documents, of the arguments that may be given here."""
    batch, length, heads, d = q.shape
    assert batch > 0
    page, kv_heads = k_cache.shape[1:3]
    assert page % 256 == 0
    assert d <= 256
    assert heads % kv_heads == 0
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert (cache_seqlens <= page * block_table.shape[1]).all()
    assert {x.stride(-1) for x in (k_cache, v_cache, block_table)} == {1}
    assert cache_seqlens.shape == (batch,)
    assert len(block_table) == batch
    assert cache_seqlens.is_contiguous()
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None
    assert alibi_slopes is None
    assert not causal
    assert window_size == (-1, -1)
    assert return_softmax_lse
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads, length), math.inf)
    for i, n in enumerate(cache_seqlens.tolist()):
        if n == 0:
            continue
        keys, values = (
            x[block_table[i].long()]
            .flatten(0, 1)[:n]
            .float()
            .repeat_interleave(heads // kv_heads, 1)
            for x in (k_cache, v_cache)
        )
        scores = softmax_scale * torch.einsum("qhd,nhd->hqn", q[i].float(), keys)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        lse[i] = scores.logsumexp(-1)
        out[i] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """flash-attn 2.8.3 on sm_86; a test may change both."""
    found = types.SimpleNamespace(version="2.8.3", capability=(8, 6), questions=0)

    def version(name):
        found.questions += 1
        if name != "flash-attn" or found.version is None:
            raise metadata.PackageNotFoundError(name)
        return found.version

    def capability(device):
        found.questions += 1
        return found.capability

    module = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    forget()
    yield found
    forget()


def forget():
    flash_decode.installed.cache_clear()
    flash_decode._capability.cache_clear()


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_groups_in_any_order_of_slots(heads, softcap):
    step = make_step(**TWO_GROUPS, heads=heads[0], kv_heads=heads[1])
    check_step(
        flash_decode.group_decode, step, softcap=softcap, dtype=torch.float16, rtol=2e-3, atol=1e-3
    )


@pytest.mark.parametrize(("rows", "row"), [(2, 1), (9, 8)])
def test_fewer_and_more_rows_of_groups_than_slots(rows, row):
    prompts = [3, *[IDLE] * (row - 1), PAGE + 1]
    slots = [(row, 2), (0, 1), IDLE, (row, PAGE + 1)]
    step = make_step(prompts, slots, page=PAGE, rows=rows)
    check_step(flash_decode.group_decode, step, dtype=torch.float16, rtol=2e-3, atol=1e-3)


def test_all_slots_idle():
    step = make_step([IDLE], [IDLE, IDLE], page=PAGE)
    out = check_step(flash_decode.group_decode, step, dtype=torch.float16)
    assert torch.equal(out, torch.zeros(2, 2, 16, dtype=torch.float16))


def test_strided_queries_and_keys():
    step = make_step(**TWO_GROUPS, heads=2, kv_heads=2)
    packed = torch.cat([step.q, step.k, step.v], 1).to(torch.float16)
    q, k, v = packed.split(2, 1)
    given = step.arguments(torch.float16)
    wanted = flash_decode.group_decode(**given, scale=0.25)
    pages = {name: given[name].clone() for name in ("k_pages", "v_pages")}
    again = given | {"q": q, "k": k, "v": v.transpose(1, 2).contiguous().transpose(1, 2)}
    assert torch.equal(flash_decode.group_decode(**again, scale=0.25), wanted)
    assert all(
        torch.equal(given[name].view(torch.int16), x.view(torch.int16)) for name, x in pages.items()
    )


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"d": 80}, True),
        ({"d": 20}, False),
        ({"d": 264}, False),
        ({"page": 16}, False),
        ({"page": 512}, True),
        ({"dtype": torch.float32}, False),
        ({"slots": 32}, True),
        ({"slots": 33}, False),
        ({"slots": 0}, False),
        ({"slots": 8, "rows": 128}, True),
        ({"slots": 8, "rows": 129}, False),
        ({"window": 3 * PAGE - 1}, False),
        ({"window": 3 * PAGE}, True),
        ({"capability": (7, 5)}, False),
        ({"version": None}, False),
        ({"version": "2.5.9.post1"}, False),
        ({"version": "2.6.0.post1"}, True),
        ({"version": "2.8.3.post1+cu12torch2.8"}, True),
        ({"version": "2.8.3.post2"}, False),
        ({"version": "2.8.4"}, False),
    ],
)
def test_what_is_served(changes, served, machine):
    case = {"d": 64, "page": PAGE, "dtype": torch.bfloat16, "slots": 2, "window": None} | changes
    vars(machine).update({name: x for name, x in changes.items() if hasattr(machine, name)})
    step = make_step([1], [IDLE], page=case["page"])
    tables = replace(
        step.tables,
        prefix_table=torch.zeros(case.get("rows", case["slots"]), 1, dtype=torch.int32),
        suffix_table=torch.zeros(case["slots"], 2, dtype=torch.int32),
    )
    q = torch.zeros(case["slots"], 2, case["d"], dtype=case["dtype"])
    assert flash_decode.serves(q, step.k_pages, tables, case["window"]) is served


def test_the_machine_is_asked_once(machine):
    step = make_step([1], [IDLE], page=PAGE)
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    assert all(flash_decode.serves(q, step.k_pages, step.tables, None) for _ in range(3))
    assert machine.questions == 2


@pytest.mark.parametrize(
    ("changes", "dtype", "page"),
    [
        ({}, torch.bfloat16, 256),
        ({}, torch.float32, 32),
        ({"version": None}, torch.float16, 32),
        ({"capability": (7, 5)}, torch.float16, 32),
    ],
)
def test_pages_are_large_only_where_flash_attn_reads_them(changes, dtype, page, machine):
    vars(machine).update(changes)
    # The machine alone is asked: no tensor is made on the device.
    assert decode_ops.page_size(torch.device("cuda"), dtype) == page
    assert decode_ops.page_size(torch.device("cpu"), dtype) == 32
