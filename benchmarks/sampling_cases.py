"""Group sampling against transformers' `generate` and `generate_batch`; its memory and its slots.

The gate of every case has the greedy tokens of `generate`, one prompt alone, as the truth.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..decode_ops import PAGE
from ..rollout import SamplingParams
from ..sampler import GroupSampler
from . import models
from .harness import Case, Expected, Provider, Step
from .sampling_problem import MOST_LIKELY, UNFILTERED, Problem, batched, repeated

if TYPE_CHECKING:
    from .sampler_suite import Shape

SEED = 1
CHECKED_GROUP = 2  # samples a prompt in the gate, enough to share it
CHECKED_LOGPS = 32  # tokens of a sample
KV_SLOTS = (1, 8)

Route = Callable[..., Tensor]


def generate(shape: "Shape", device: torch.device) -> list[Case]:
    """All samples of all prompts, equally long: new tokens a second."""
    problem = cache(lambda: Problem(shape, device))
    # In bfloat16 sums of another order give other tokens, rightly; log-probs alone are held there.
    exact = shape.dtype == "float32"
    providers = (
        Provider("ours", _ours, check=partial(_check_ours, exact)),
        Provider("generate", partial(_peer, repeated), check=partial(_check, repeated, exact)),
        Provider("generate-batch", partial(_peer, batched), check=partial(_check, batched, exact)),
    )

    def expected() -> dict[str, Expected]:
        greedy = problem().greedy(shape.new).repeat_interleave(CHECKED_GROUP, dim=0)
        return problem().expected(greedy.flatten(), len(greedy))

    return [
        Case(
            suite="sampler",
            name="generate",
            shape=shape.used(),
            device=device,
            inputs=problem,
            expected=expected,
            providers=providers,
            work=shape.prompts * shape.group * shape.new,
            rate_unit="tokens/s",
            rate_scale=1.0,
            most_rounds=models.MODELS[shape.model].most_rounds,
        )
    ]


def kv(shape: "Shape", device: torch.device) -> list[Case]:
    """Bytes of keys and values at most, against prompts held once and against repeated prompts.

    The gate: prompts held once and a suffix for every slot, each rounded up to pages, and no more.
    """
    providers = [
        Provider(f"ours-{slots}-slots", partial(_kv, slots), untimed="bytes are counted")
        for slots in KV_SLOTS
    ]
    figures = ("kv_mib", "of_prompt_once", "of_repeated")
    return [_counted("kv", shape, device, providers, figures, lambda p: [shape.new] * shape.group)]


def ragged(shape: "Shape", device: torch.device) -> list[Case]:
    """Rounds of decoding for samples of very different lengths, against slots refilled at once."""
    providers = [Provider(f"ours-{shape.slots}-slots", _ragged, untimed="rounds are counted")]
    figures = ("decode_steps", "of_ideal", "ideal", "group_by_group")
    return [_counted("ragged", shape, device, providers, figures, lambda p: p.lengths)]


def list_schedule(lengths: Sequence[int], slots: int) -> int:
    """Rounds until all have ended where each, in turn, begins in the slot that is free first."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def _counted(
    name: str,
    shape: "Shape",
    device: torch.device,
    providers: Sequence[Provider],
    figures: tuple[str, ...],
    lengths: Callable[[Problem], list[int]],
) -> Case:
    """A case without times, of greedy samples with these lengths in every group."""
    problem = cache(lambda: Problem(shape, device))

    def expected() -> dict[str, Expected]:
        wanted = lengths(problem())
        rows = problem().greedy(max(wanted))
        tokens = torch.cat([row[:count] for row in rows for count in wanted])
        return problem().expected(tokens, len(rows) * len(wanted))

    return Case(
        suite="sampler",
        name=name,
        shape=shape.used(),
        device=device,
        inputs=problem,
        expected=expected,
        providers=tuple(providers),
        figures=figures,
    )


def _ours(problem: Problem) -> Step:
    shape, sampler = problem.shape, GroupSampler(problem.model)
    params = SamplingParams(max_tokens=shape.new, ignore_eos=True, seed=SEED)

    def step() -> dict[str, Tensor]:
        sampler.generate(problem.prompts, shape.group, params)
        return {}

    return step


def _check_ours(exact: bool, problem: Problem) -> Step:
    def step() -> dict[str, Tensor]:
        lengths = [problem.shape.new] * CHECKED_GROUP
        outputs, _ = _greedily(problem, lengths, "auto")
        if not exact:
            del outputs["tokens"]
        params = SamplingParams(
            max_tokens=min(CHECKED_LOGPS, problem.shape.new), ignore_eos=True, seed=SEED
        )
        groups = GroupSampler(problem.model).generate(problem.prompts, CHECKED_GROUP, params)
        return outputs | {"logp_gap": problem.logp_gap(r for group in groups for r in group)}

    return step


def _peer(route: Route, problem: Problem) -> Step:
    if route is batched:
        _ = problem.paged_model  # copied here, so that it is no part of a call's memory

    def step() -> dict[str, Tensor]:
        route(problem, problem.shape.group, **UNFILTERED)
        return {}

    return step


def _check(route: Route, exact: bool, problem: Problem) -> Step:
    def step() -> dict[str, Tensor]:
        tokens = route(problem, CHECKED_GROUP, **MOST_LIKELY)
        lengths = [problem.shape.new] * len(tokens)
        outputs = _held(tokens.tolist(), lengths)
        return outputs if exact else {"missing": outputs["missing"]}

    return step


def _kv(slots: int, problem: Problem) -> Step:
    shape = problem.shape
    per_token = models.MODELS[shape.model].kv_bytes_per_token(shape.dtype)
    # Samples are equally long: the slots hold whole groups, or a part of one, at a time.
    live = min(shape.prompts, -(-slots // shape.group))
    once = per_token * (live * shape.prompt + slots * shape.new)
    again = per_token * shape.group * (shape.prompt + shape.new)
    pages = live * -(-shape.prompt // PAGE) + slots * -(-shape.new // PAGE)

    def step() -> dict[str, Tensor]:
        outputs, stats = _greedily(problem, [shape.new] * shape.group, slots)
        peak = torch.tensor(float(stats["kv_bytes_peak"]))
        figures = {"kv_mib": peak / 2**20, "of_prompt_once": peak / once}
        beyond = (peak / (per_token * PAGE) - pages).clamp(min=0)
        return outputs | figures | {"of_repeated": peak / again, "pages_beyond": beyond}

    return step


def _ragged(problem: Problem) -> Step:
    shape, lengths = problem.shape, problem.lengths
    ideal = list_schedule(lengths * shape.prompts, shape.slots)
    parts = [lengths[i : i + shape.slots] for i in range(0, shape.group, shape.slots)]
    waiting = shape.prompts * sum(map(max, parts))

    def step() -> dict[str, Tensor]:
        outputs, stats = _greedily(problem, lengths, shape.slots)
        rounds = stats["decode_steps"]
        figures = {"decode_steps": rounds, "of_ideal": rounds / ideal, "ideal": ideal}
        figures["group_by_group"] = waiting
        return outputs | {name: torch.tensor(x) for name, x in figures.items()}

    return step


def _greedily(
    problem: Problem, lengths: list[int], slots: int | str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Greedy samples of these lengths in every group -> outputs for the gate, stats."""
    sampler = GroupSampler(problem.model, slots=slots)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    groups = sampler.generate(problem.prompts, len(lengths), params)
    found = [r.completion_ids for group in groups for r in group]
    return _held(found, lengths * len(groups)), sampler.stats


def _held(found: list[list[int]], lengths: list[int]) -> dict[str, Tensor]:
    """Completions as the outputs that are held to the greedy ones; -1 where tokens are missing."""
    missing = [n - len(ids) for n, ids in zip(lengths, found, strict=True)]
    whole = [ids[:n] + [-1] * (n - len(ids)) for n, ids in zip(lengths, found, strict=True)]
    tokens = torch.tensor([token for ids in whole for token in ids])
    return {"missing": torch.tensor(missing), "tokens": tokens}
