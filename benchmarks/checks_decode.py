"""Decode attention in pages against the reference, on small hard inputs; on CUDA in a graph."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import decode_ops
from ..kernels import reference_decode
from ..kernels.reference_decode import DecodeTables
from . import checks_grouped
from .harness import Case, Expected, Provider, Step

# Of a row's norm. Half precision rounds the weights of a softmax and what comes out.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NOTHING = 8192.0  # stands for what no one may read or write; exact in every dtype
LIVE_GROUPS, ROWS, SLOTS, TINY_SLOTS = 4, 40, 18, 5
MOST, TINY_MOST = (1200, 300), (40, 20)  # tokens of a prompt, own tokens


@dataclass(frozen=True)
class Check(checks_grouped.Check):
    """Attention of some heads of dim d over pages of so many keys."""

    page: int = 16

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"{super().name} page={self.page}"


def checks() -> list[Check]:
    """Every tile of the kernels, pages that flash-attn takes and others, and all options."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    return [
        Check(bf16, 14, 2, 64, page=256),
        Check(bf16, 4, 4, 128, page=256),
        Check(bf16, 8, 2, 256, page=256, softcap=5.0),
        Check(f16, 28, 4, 128, page=256),
        Check(bf16, 8, 2, 128),
        Check(bf16, 40, 1, 80, window=23),
        Check(f16, 8, 2, 128, softcap=5.0, window=31),
        Check(f32, 14, 2, 64),
        Check(f32, 8, 2, 128, window=23),
        Check(f32, 8, 4, 256, softcap=5.0),
    ]


def cases(impl: str, device: torch.device, tiny: bool = False) -> list[Case]:
    """Each checks two steps: what comes out of them, and all of the pages."""
    found = []
    for check in checks():
        data = cache(partial(_data, check, tiny))
        found.append(
            Case(
                suite="check-decode",
                name=check.name,
                shape={},
                device=device,
                inputs=partial(_move, data, device),
                expected=partial(_expected, check, data),
                providers=tuple(_providers(check, impl, device)),
            )
        )
    return found


def _providers(check: Check, impl: str, device: torch.device) -> Iterator[Provider]:
    decode = partial(decode_ops.group_decode, impl=impl)
    yield Provider(f"ours-{impl}", partial(_build, check, decode))
    if device.type == "cuda" and check.page % 256 == 0:
        from ..kernels import flash_decode

        missing = "" if flash_decode.installed() else "no flash-attn that a CUDA graph can capture"
        build = partial(_build, check, flash_decode.group_decode)
        yield Provider("ours-flash", build, unavailable=missing)


def _data(check: Check, tiny: bool) -> dict[str, Any]:
    """Two steps over one pool of pages, which is NaN but for what a slot may see."""
    generator = torch.Generator().manual_seed(check.d + check.page)
    normal = partial(torch.randn, generator=generator)
    slots = TINY_SLOTS if tiny else SLOTS
    most = TINY_MOST if tiny else MOST
    widths = [-(-max(n, check.page + 1) // check.page) for n in most]
    count = LIVE_GROUPS * widths[0] + slots * widths[1]
    ids = 1 + torch.randperm(2 * count, generator=generator).int()
    shape = (2 * count + 1, check.page, check.kv_heads, check.d)
    k_pages, v_pages = (torch.full(shape, torch.nan, dtype=check.dtype) for _ in range(2))
    steps = [_tables(check.page, slots, most, widths, half, generator) for half in ids.split(count)]
    for t in steps:
        # The newest own token isn't there yet.
        spans = [*zip(t.prefix_table, t.prefix_len, strict=True)]
        spans += zip(t.suffix_table, (t.suffix_len - 1).clamp(min=0), strict=True)
        for pages, length in spans:
            token = torch.arange(int(length))
            at = pages[token // check.page].long(), token % check.page
            for pool in (k_pages, v_pages):
                pool[at] = normal(len(token), *shape[2:]).to(check.dtype)
    return {
        "q": (2 * normal(2, slots, check.heads, check.d)).to(check.dtype),
        "k": normal(2, slots, *shape[2:]).to(check.dtype),
        "v": normal(2, slots, *shape[2:]).to(check.dtype),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "steps": steps,
    }


def _tables(
    page: int,
    slots: int,
    most: tuple[int, int],
    widths: list[int],
    ids: Tensor,
    generator: torch.Generator,
) -> DecodeTables:
    """More rows of groups than slots, few of them live; a slot in six is idle."""

    def some(limit: int, count: int) -> Tensor:
        lengths = torch.tensor([1, page - 1, page, page + 1, limit]).clamp(max=max(limit, page + 1))
        return lengths[torch.randint(5, (count,), generator=generator)]

    live = torch.randperm(ROWS, generator=generator)[:LIVE_GROUPS]
    group = live[torch.randint(LIVE_GROUPS, (slots,), generator=generator)]
    group[torch.randperm(slots, generator=generator)[: -(-slots // 6)]] = -1
    prefix_len = torch.zeros(ROWS, dtype=torch.int64)
    prefix_len[live] = some(most[0], LIVE_GROUPS)
    prefix_table = torch.zeros(ROWS, widths[0], dtype=torch.int32)
    prefix_table[live] = ids[: LIVE_GROUPS * widths[0]].view(LIVE_GROUPS, -1)
    counts = torch.bincount(group[group >= 0], minlength=ROWS)
    return DecodeTables(
        prefix_table=prefix_table,
        prefix_len=prefix_len.int(),
        suffix_table=ids[LIVE_GROUPS * widths[0] :].view(slots, -1),
        suffix_len=torch.where(group >= 0, some(most[1], slots), 0).int(),
        slot_group=group.int(),
        order=torch.where(group >= 0, group, ROWS).argsort(stable=True).int(),
        cu_slots=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
    )


def _move(data: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    moved = {name: x.to(device) for name, x in data().items() if name != "steps"}
    steps = [{name: x.to(device) for name, x in vars(t).items()} for t in data()["steps"]]
    return moved | {"steps": [DecodeTables(**step) for step in steps]}


def _build(check: Check, decode: Callable[..., Tensor], data: dict[str, Any]) -> Step:
    """The second step is a replay of the graph of the first, over other values of its tables."""

    def run() -> dict[str, Tensor]:
        inputs = [data[name][0].clone() for name in ("q", "k", "v")]
        pools = [data[name].clone() for name in ("k_pages", "v_pages")]
        first, second = data["steps"]
        tables = DecodeTables(**{name: x.clone() for name, x in vars(first).items()})
        call = partial(decode, *inputs, *pools, tables, **check.options)
        found = {"first": call().clone()}
        graph = _capture(call) if inputs[0].is_cuda else None
        for x, name in zip(inputs, ("q", "k", "v"), strict=True):
            x.copy_(data[name][1])
        for field in fields(DecodeTables):
            getattr(tables, field.name).copy_(getattr(second, field.name))
        if graph is None:
            found["replayed"] = call()
        else:
            graph[0].replay()
            found["replayed"] = graph[1]
        for x, name in zip(pools, ("k_pages", "v_pages"), strict=True):
            found[name] = x.nan_to_num(nan=NOTHING)
        return found

    return run


def _capture(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def _expected(check: Check, data: Callable[[], dict[str, Any]]) -> dict[str, Expected]:
    """By the reference in float64, on the CPU."""
    exact = {name: x if name == "steps" else x.double() for name, x in data().items()}
    out = _build(check, reference_decode.group_decode, exact)()
    rows = {name: out.pop(name).flatten(0, 1) for name in ("first", "replayed")}
    found = {name: Expected(x.flatten(), 0.0) for name, x in out.items()}
    for name, x in rows.items():
        norm = x.norm(dim=-1)
        found[name] = Expected(x, TOLERANCE[check.dtype], torch.where(norm > 0, norm, 1.0))
    return found
