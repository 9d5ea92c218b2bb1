"""Group sampling: a prompt is prefilled once, its samples continue from its pages in W slots."""

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import _C
from .attention import routed
from .cache import KVCache, Prefill
from .data import Messages
from .decode import DecodeStep, bucket
from .decode_ops import page_size
from .errors import UserError
from .forward import (
    causal_lm,
    check_reach,
    context_length,
    decoder_hidden,
    eos_ids,
    evaluating,
    head_of,
    kv_bytes_per_token,
)
from .fused import fused
from .kernels.grouped_attention import GroupLayout
from .logits import LogitHead
from .prompts import check_room, encode_prompt, end_of_turn
from .rollout import Rollout, SamplingParams
from .seats import Sample, Seats
from .support import check_model

DEFAULT_PARAMS = SamplingParams()
KV_BYTES_CPU = 2 << 30
KV_SHARE_CUDA = 0.5  # of the free memory; the rest is for activations and the training step
PREFILL_TOKENS = 8192  # that go through the model together

Progress = Callable[[int, int], None]


class GroupSampler:
    """Samples groups of completions from any transformers causal LM, or a peft model of one."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        slots: int | str = "auto",
        kv_bytes: int | None = None,
    ) -> None:
        """slots: samples decoded at a time; auto: as many as `kv_bytes` of keys and values allow
        (by default 2 GiB on the CPU, half the free memory on CUDA)."""
        if slots != "auto" and (not isinstance(slots, int) or slots < 1):
            raise ValueError(f"slots must be 'auto' or at least 1; given {slots}")
        check_model(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.slots, self.kv_bytes = slots, kv_bytes
        self.policy_version = 0
        self.eos_ids = eos_ids(model, tokenizer) | end_of_turn(tokenizer)
        self.stats = dict.fromkeys(
            ("kv_bytes_peak", "decode_steps", "prefill_tokens", "decode_tokens"), 0
        )

    def update_policy(self) -> None:
        """Tells that weights or adapter changed. No keys or values outlive a `generate` call."""
        self.policy_version += 1

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int] | str | Messages],
        group_size: int | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        progress: Progress | None = None,
        cancel: Event | None = None,
    ) -> list[list[Rollout]]:
        """Groups in the order of the prompts; `params` given as a list is cycled over a group.

        Random numbers are a function of (seed, group, sample, position): what a sample draws does
        not depend on what it is batched with. After each round `progress` is told the tokens drawn
        and the most that can be. Once `cancel` is set no more is drawn: finished samples are
        complete, the others come with what they have and finish reason "error".
        Raises UserError for a prompt without room, for lengths at which rotary factors depend on
        the batch, and if the KV bytes don't hold one sample.
        """
        encoded = [self._encode(prompt) for prompt in prompts]
        context = context_length(self.model)
        check_room(encoded, context, len(head_of(self.model).weight), "prompts")
        sizes = [group_size] * len(prompts) if isinstance(group_size, int) else list(group_size)
        cycle = [params] if isinstance(params, SamplingParams) else list(params)
        if len(sizes) != len(prompts) or min(sizes, default=1) < 1 or not cycle:
            raise ValueError("group_size must be >= 1, one for all prompts or one each; no params?")
        if any(p.stop for p in cycle) and self.tokenizer is None:
            raise ValueError("stop strings need the tokenizer")
        groups = _make_samples(encoded, sizes, cycle, context)
        for sample in (sample for group in groups for sample in group):
            check_reach(self.model, len(sample.prompt), sample.limit)
        if groups:
            with evaluating(self.model), fused(causal_lm(self.model)):
                _Run(self, groups).draw_all(progress, cancel)
        return [[self._rollout(sample) for sample in group] for group in groups]

    def _encode(self, prompt: list[int] | str | Messages) -> list[int]:
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompts given as text need the tokenizer")
        return encode_prompt(self.tokenizer, prompt)

    def kv_budget(self) -> int:
        """Bytes of keys and values that may be held."""
        device = causal_lm(self.model).device
        if self.kv_bytes is not None:
            return self.kv_bytes
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0] * KV_SHARE_CUDA)
        return KV_BYTES_CPU

    def _rollout(self, sample: Sample) -> Rollout:
        return Rollout(
            prompt_ids=sample.prompt,
            completion_ids=sample.ids,
            logp_sampler=torch.from_numpy(sample.logp),
            logp_processed=torch.from_numpy(sample.processed),
            finish_reason=sample.finish,
            group=sample.group,
            sample=sample.number,
            params=sample.params,
            policy_version=self.policy_version,
        )


class _Run:
    """One call of `generate`: its pages, its slots, and the loop over rounds of draws."""

    def __init__(self, sampler: GroupSampler, groups: list[list[Sample]]) -> None:
        self.stats = sampler.stats
        self.causal = causal_lm(sampler.model)
        self.head = LogitHead(head_of(sampler.model))
        self.prompts = [group[0].prompt for group in groups]
        self.samples = [sample for group in groups for sample in group]
        self.page = page_size(self.causal.device, self.causal.dtype)
        slots, pages = _room(sampler, groups, self.page)
        self.plan = _C.SlotScheduler(
            slots,
            self.page,
            pages,
            np.array([len(p) for p in self.prompts], np.int32),
            np.array([sample.limit for sample in self.samples], np.int32),
            np.cumsum([0, *map(len, groups)], dtype=np.int32),
        )
        self.cache = KVCache(pages, self.page)
        self.step = DecodeStep(self.causal, self.cache, self.plan.tables, self.plan.views)
        device = self.causal.device
        self.seats = Seats(
            slots, self.samples, sampler.eos_ids, sampler.tokenizer, self.head.vocab, device
        )
        self.hidden = torch.zeros(slots, self.head.width, dtype=self.causal.dtype, device=device)
        self.lanes = slots
        self.first_hidden: dict[int, Tensor] = {}  # of the prompts of live groups

    def draw_all(self, progress: Progress | None, cancel: Event | None) -> None:
        """Rounds until every sample has ended: draw for all slots, refill, one decode step."""
        drawn, most = 0, sum(sample.limit for sample in self.samples)
        while not self.plan.done:
            self._refill()
            self._close_ranks()
            slots = self.seats.taken()
            tokens = self._draw(slots)
            drawn += len(slots)
            if progress is not None:
                progress(drawn, most)
            ended = self.seats.ended(slots)
            for slot in slots[ended]:
                self.plan.finish(int(slot))
            if cancel is not None and cancel.is_set():
                self.seats.break_off()
                break
            if not ended.all():
                self._decode(slots[~ended], tokens[torch.from_numpy(~ended)])
        self.stats["decode_tokens"] += drawn
        held = self.plan.pool.peak * self.cache.bytes_per_page()
        self.stats["kv_bytes_peak"] = max(self.stats["kv_bytes_peak"], held)

    def _refill(self) -> None:
        groups, placed = self.plan.admit()
        self._prefill(groups)
        for slot, number in placed:
            sample = self.samples[number]
            self.seats.place(slot, sample)
            self.hidden[slot] = self.first_hidden[sample.group]
        live = {sample.group for sample in self.seats.sample if sample is not None}
        for group in self.first_hidden.keys() - live:
            del self.first_hidden[group]

    def _close_ranks(self) -> None:
        """When no sample waits any more, the last ones sit in the first slots: fewer lanes."""
        taken = self.seats.taken()
        lanes = bucket(len(taken), self.lanes)
        if self.plan.waiting or lanes == self.lanes:
            return
        idle = np.setdiff1d(np.arange(lanes), taken)
        for source, to in zip(taken[taken >= lanes].tolist(), idle.tolist(), strict=False):
            self.plan.move(source, to)
            self.seats.move(source, to)
            self.hidden[to] = self.hidden[source]
        self.lanes = lanes

    def _prefill(self, groups: list[tuple[int, int]]) -> None:
        """(group, row): their prompts go through the model into their pages."""
        while groups:
            count, tokens = 0, 0
            while count < len(groups) and (not count or tokens <= PREFILL_TOKENS):
                tokens += len(self.prompts[groups[count][0]])
                count += 1
            now, groups = groups[:count], groups[count:]
            self.first_hidden.update(
                zip((group for group, _ in now), self._prefill_together(now), strict=True)
            )

    def _prefill_together(self, groups: list[tuple[int, int]]) -> Tensor:
        """The last hidden state of each prompt, [groups, D]."""
        prompts, device = [self.prompts[group] for group, _ in groups], self.causal.device
        table = self.plan.views["prefix_table"]
        places = []
        for prompt, (_, row) in zip(prompts, groups, strict=True):
            page, place = np.divmod(np.arange(len(prompt)), self.page)
            places.append(table[row, page].astype(np.int64) * self.page + place)
        layout = GroupLayout.make([len(p) for p in prompts], [[] for _ in prompts], device)
        places = torch.from_numpy(np.concatenate(places)).to(device)
        with routed(self.causal):
            hidden = decoder_hidden(
                self.causal,
                input_ids=torch.tensor([[t for p in prompts for t in p]], device=device),
                position_ids=layout.positions[None],
                group=Prefill(layout, self.cache, places),
            )[0]
        last = np.cumsum([len(p) for p in prompts]) - 1
        self.stats["prefill_tokens"] += sum(map(len, prompts))
        return hidden[torch.from_numpy(last).to(device)]

    def _draw(self, slots: np.ndarray) -> Tensor:
        hidden = self.hidden[: len(slots)] if len(slots) == self.lanes else self.hidden[slots]
        self.stats["decode_steps"] += 1
        return self.seats.draw(self.head(hidden), slots)

    def _decode(self, slots: np.ndarray, tokens: Tensor) -> None:
        """The tokens just drawn in these slots go through the model."""
        self.plan.advance(slots.astype(np.int32))
        positions = np.zeros(self.lanes, np.int64)
        inputs = torch.zeros(self.lanes, dtype=torch.int64, device=self.causal.device)
        prompt = np.array([len(self.seats.sample[slot].prompt) for slot in slots])
        positions[slots] = prompt + self.seats.length[slots] - 1
        inputs[torch.from_numpy(slots).to(inputs.device)] = tokens
        self.hidden[: self.lanes] = self.step(inputs, torch.from_numpy(positions), self.lanes)


def _room(sampler: GroupSampler, groups: list[list[Sample]], page: int) -> tuple[int, int]:
    """Slots, and pages for what they can hold: within the KV bytes where the slots are auto."""
    per_page = page * kv_bytes_per_token(sampler.model)
    budget = sampler.kv_budget() // per_page
    prompt = max(-(-len(group[0].prompt) // page) for group in groups)
    own = max(-(-sample.limit // page) for group in groups for sample in group)
    samples, smallest = sum(map(len, groups)), min(map(len, groups))

    def needed(slots: int) -> int:
        # In the steady state; a straggler that keeps its group's prompt makes others wait.
        live = min(len(groups), -(-slots // smallest) + (slots > 1))
        return slots * own + live * prompt

    if needed(1) > budget and (sampler.slots == "auto" or sampler.kv_bytes is not None):
        raise UserError(
            f"one sample needs {needed(1) * per_page} bytes of keys and values, and kv_bytes is "
            f"{budget * per_page}: give more, or lower max_tokens"
        )
    if sampler.slots == "auto":
        slots = 1
        while slots < samples and needed(slots + 1) <= budget:
            slots += 1
    else:
        slots = min(sampler.slots, samples)
    worst = slots * own + min(slots, len(groups)) * prompt
    return slots, min(worst, max(budget, needed(slots)))


def _make_samples(
    prompts: list[list[int]], sizes: list[int], cycle: list[SamplingParams], context: int | None
) -> list[list[Sample]]:
    groups = []
    for group, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        room = float("inf") if context is None else context - len(prompt)
        chosen = [cycle[number % len(cycle)] for number in range(size)]
        groups.append(
            [
                Sample(group, number, prompt, params, min(params.max_tokens, room))
                for number, params in enumerate(chosen)
            ]
        )
    return groups
