"""Steps of decode attention for tests: pages of NaN but for what a slot may see."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_engine.kernels import reference_decode
from grpo_engine.kernels.reference_decode import DecodeTables

IDLE = None


@dataclass(frozen=True)
class Step:
    """The tensors of one call of group_decode."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    tables: DecodeTables

    def arguments(self, dtype: torch.dtype) -> dict[str, Tensor | DecodeTables]:
        """Copies of the tensors as `dtype`, strides kept."""
        tensors = {
            n: getattr(self, n).to(dtype, copy=True) for n in self.__annotations__ if n != "tables"
        }
        return tensors | {"tables": self.tables}


def int32(x):
    return torch.tensor(x, dtype=torch.int32)


def make_step(
    prompts, slots, heads=2, kv_heads=1, d=16, page=5, seed=0, spare=2, rows=None
):  # fmt: skip
    """prompts: tokens of the prompt of each row (IDLE: no group there), of `rows` in all (default:
    as many as slots); slots: (row, own tokens) of each slot, or IDLE. Every table has `spare` pages
    too many, which are page 0; that page, and whatever a slot may not see, is NaN."""
    random = torch.Generator().manual_seed(seed)
    rows, width = len(slots) if rows is None else rows, len(slots)
    prompts = [*prompts, *[IDLE] * (rows - len(prompts))]
    owns = [IDLE if slot is IDLE else slot[1] for slot in slots]
    need = [-(-(n or 0) // page) for n in prompts + owns]
    ids = (1 + torch.randperm(sum(need), generator=random)).split(need)
    k_pages, v_pages = (torch.full((sum(need) + 2, page, kv_heads, d), math.nan) for _ in range(2))

    def table(lengths, page_ids, missing):
        filled = torch.zeros(len(lengths), max(map(len, page_ids)) + spare, dtype=torch.int32)
        for line, length, pages in zip(filled, lengths, page_ids, strict=True):
            line[: len(pages)] = pages
            for token in range((length or 0) - missing):
                for pool in (k_pages, v_pages):
                    where = pages[token // page], token % page
                    pool[where] = torch.randn(kv_heads, d, generator=random)
        return filled

    group = [-1 if slot is IDLE else slot[0] for slot in slots]
    order = sorted(range(width), key=lambda w: (group[w] < 0, group[w], w))
    counts = [group.count(row) for row in range(rows)]
    q = torch.randn(width, heads, d, generator=random) * 2
    k, v = (torch.randn(width, kv_heads, d, generator=random) for _ in range(2))
    tables = DecodeTables(
        prefix_table=table(prompts, ids[:rows], missing=0),
        prefix_len=int32([7 if n is IDLE else n for n in prompts]),
        suffix_table=table(owns, ids[rows:], missing=1),  # the newest token isn't there yet
        suffix_len=int32([n or 0 for n in owns]),
        slot_group=int32(group),
        order=int32(order),
        cu_slots=int32([sum(counts[:row]) for row in range(rows + 1)]),
    )
    return Step(q, k, v, k_pages, v_pages, tables)


def check_step(
    group_decode, step, scale=None, rtol=2e-6, atol=2e-6, dtype=torch.float32, **options
):
    """Output, written tokens and untouched pages, against the reference in float64."""
    scale = step.q.shape[-1] ** -0.5 if scale is None else scale
    step = replace(step, **step.arguments(dtype))
    given = step.arguments(dtype)
    truth = reference_decode.group_decode(**step.arguments(torch.float64), scale=scale, **options)
    out = group_decode(**given, scale=scale, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), truth, rtol=rtol, atol=atol)
    live = step.tables.suffix_len > 0
    assert (out[live].abs().amax(-1) > 0).all()
    assert (out[~live] == 0).all()
    for name in ("k", "v"):
        wanted = getattr(step, f"{name}_pages").clone()
        page = wanted.shape[1]
        for slot in live.nonzero().flatten().tolist():
            last = int(step.tables.suffix_len[slot]) - 1
            wanted[step.tables.suffix_table[slot, last // page], last % page] = given[name][slot]
        as_bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        assert torch.equal(given[f"{name}_pages"].view(as_bits), wanted.view(as_bits))
    return out


def check_order(group_decode):
    """Slots in another order, within their rows too: the same bits."""
    step = make_step([40, 7], [(0, 9), (1, 3), IDLE, (0, 30), (1, 1)], heads=3)
    wanted = group_decode(**step.arguments(torch.float32), scale=0.3)
    moved = torch.tensor([3, 0, 4, 2, 1])
    t, came_from = step.tables, moved.argsort()
    tables = replace(
        t,
        suffix_table=t.suffix_table[moved],
        suffix_len=t.suffix_len[moved],
        slot_group=t.slot_group[moved],
        order=came_from[t.order.long()][[1, 0, 3, 2, 4]].int(),  # rows in order, their slots not
    )
    q, k, v = (x[moved] for x in (step.q, step.k, step.v))
    out = check_step(group_decode, replace(step, q=q, k=k, v=v, tables=tables), scale=0.3)
    assert torch.equal(out, wanted[moved])
