"""Group sampling: a prompt is prefilled once, its samples continue from the shared prefix."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .data import Messages
from .errors import require
from .forward import (
    causal_lm,
    check_model,
    context_length,
    decoder_hidden,
    evaluating,
    head_of,
)
from .ops import head_logits, sample_tokens
from .prompts import check_room, encode_prompt
from .rollout import Rollout, SamplingParams

DEFAULT_PARAMS = SamplingParams()
KV_BYTES_CPU = 2 << 30
STOP_SLACK = 8  # tokens
KV_SHARE_CUDA = 0.5  # of the free memory; the rest is for activations and the training step


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
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.slots, self.kv_bytes = slots, kv_bytes
        self.policy_version = 0
        self.eos_ids = eos_ids(model, tokenizer)
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
    ) -> list[list[Rollout]]:
        """Groups in the order of the prompts; `params` given as a list is cycled over a group.

        Random numbers are a function of (seed, group, sample, position): what a sample draws does
        not depend on what it is batched with. Raises UserError for a prompt without room.
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
        rows = _make_rows(encoded, sizes, cycle, context)
        slots = self._slots(rows)
        with evaluating(self.model):
            for wave in _waves(rows, slots):
                self._decode_wave(wave, slots)
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for row in rows:
            groups[row.group].append(self._rollout(row))
        return groups

    def _encode(self, prompt: list[int] | str | Messages) -> list[int]:
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompts given as text need the tokenizer")
        return encode_prompt(self.tokenizer, prompt)

    def _slots(self, rows: Sequence["_Row"]) -> int:
        if self.slots != "auto":
            return self.slots
        budget, device = self.kv_bytes, causal_lm(self.model).device
        if budget is None and device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(device)[0] * KV_SHARE_CUDA)
        # Rows of a wave are as wide as its longest prompt and completion together.
        prompt = max((len(r.prompt) for r in rows), default=1)
        row = prompt + max((r.limit for r in rows), default=0)
        tokens = (budget or KV_BYTES_CPU) // kv_bytes_per_token(self.model)
        if tokens // row < max((r.sample + 1 for r in rows), default=0):
            tokens -= prompt  # a group in several parts keeps its prefix while they wait
        return max(1, tokens // row)

    def _decode_wave(self, rows: list["_Row"], slots: int) -> None:
        """Prefills the prompts of these groups once and continues them, `slots` rows at a time."""
        prompts = {row.group: row.prompt for row in rows}
        place = {group: i for i, group in enumerate(prompts)}
        cache, mask, hidden = self._prefill(list(prompts.values()))
        for start in range(0, len(rows), slots):
            part = rows[start : start + slots]
            # Selecting rows consumes the cache; parts that follow need the prefix as it was.
            prefix = cache if start + slots >= len(rows) else copy.deepcopy(cache)
            index = torch.tensor([place[row.group] for row in part], device=mask.device)
            prefix.batch_select_indices(index)
            kept = 0 if prefix is cache else _nbytes(cache)
            self._continue(part, prefix, mask[index], hidden[index], kept)

    def _prefill(self, prompts: list[list[int]]) -> tuple[Any, Tensor, Tensor]:
        """Prompts padded on the left -> their cache, mask [B, T] and last hidden states [B, D]."""
        cache_class = require("transformers", "train", "sampling").DynamicCache
        causal = causal_lm(self.model)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=causal.device)
        lengths = torch.tensor([[len(p)] for p in prompts], device=causal.device)
        mask = (torch.arange(width, device=causal.device) >= width - lengths).long()
        cache = cache_class(config=causal.config)
        hidden = decoder_hidden(
            causal,
            cache,
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        )
        self.stats["prefill_tokens"] += sum(map(len, prompts))
        return cache, mask, hidden[:, -1]

    def _continue(
        self, rows: list["_Row"], cache: Any, mask: Tensor, hidden: Tensor, kept: int
    ) -> None:
        """Draws until every row has ended; `kept`: bytes of the prefix that waits meanwhile."""
        causal, head = causal_lm(self.model), head_of(self.model).float()
        draw = _Draw(rows, len(head.weight), mask.device)
        while True:
            logits = head_logits(hidden, head.weight, head.bias, head.softcap, head.logit_scale)
            tokens = draw(logits)
            self.stats["decode_tokens"] += len(rows)
            alive = [i for i, row in enumerate(rows) if not self._finished(row)]
            if len(alive) < len(rows):
                self._note_kv(kept + _nbytes(cache))
                if not alive:
                    return
                rows, index = [rows[i] for i in alive], torch.tensor(alive, device=mask.device)
                cache.batch_select_indices(index)
                mask, tokens = mask[index], tokens[index]
                draw = _Draw(rows, len(head.weight), mask.device)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            hidden = decoder_hidden(
                causal,
                cache,
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1,
            )[:, -1]
            self.stats["decode_steps"] += 1

    def _finished(self, row: "_Row") -> bool:
        if row.ids[-1] in self.eos_ids and not row.params.ignore_eos:
            row.finish = "stop"
        elif row.params.stop and self._ends_with_stop(row):
            row.finish = "stop"
        elif len(row.ids) >= row.limit:
            row.finish = "length"
        return row.finish is not None

    def _ends_with_stop(self, row: "_Row") -> bool:
        # A token is at least a byte; the slack is for tokens before the stop string.
        longest = max(len(stop.encode()) for stop in row.params.stop)
        tail = self.tokenizer.decode(row.ids[-longest - STOP_SLACK :])
        return any(stop in tail for stop in row.params.stop)

    def _note_kv(self, held: int) -> None:
        self.stats["kv_bytes_peak"] = max(self.stats["kv_bytes_peak"], held)

    def _rollout(self, row: "_Row") -> Rollout:
        return Rollout(
            prompt_ids=row.prompt,
            completion_ids=row.ids,
            logp_sampler=torch.tensor(row.logp),
            logp_processed=torch.tensor(row.processed),
            finish_reason=row.finish,
            group=row.group,
            sample=row.sample,
            params=row.params,
            policy_version=self.policy_version,
        )


def _nbytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def eos_ids(model: nn.Module, tokenizer: Any = None) -> frozenset[int]:
    """The ids that end a completion: those of the tokenizer and of the generation config."""
    generation = getattr(causal_lm(model), "generation_config", None)
    found: set[int] = set()
    for source in (tokenizer, generation, causal_lm(model).config):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def kv_bytes_per_token(model: nn.Module) -> int:
    """Bytes of keys and values that one token of one sample holds: 2 layers kv_heads head_dim."""
    config = causal_lm(model).config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * causal_lm(model).dtype.itemsize


@dataclass
class _Row:
    """A sample while it is decoded."""

    group: int
    sample: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    uniforms: np.ndarray  # [limit], the random number of each position
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    finish: str | None = None


def _make_rows(
    prompts: list[list[int]], sizes: list[int], cycle: list[SamplingParams], context: int | None
) -> list[_Row]:
    rows = []
    for group, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        for sample in range(size):
            params = cycle[sample % len(cycle)]
            limit = params.max_tokens
            if context is not None:
                limit = min(limit, context - len(prompt))
            uniforms = _uniforms(params.seed, group, sample, limit)
            rows.append(_Row(group, sample, prompt, params, limit, uniforms))
    return rows


def _uniforms(seed: int | None, group: int, sample: int, count: int) -> np.ndarray:
    """Counter-based random numbers of one sample, the same whatever it is batched with."""
    if seed is None:
        return np.random.default_rng().random(count)
    key = np.array([seed, (group << 32) | sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def _waves(rows: list[_Row], slots: int) -> list[list[_Row]]:
    """Whole groups that are decoded together, as many as fit into the slots, at least one."""
    waves: list[list[_Row]] = []
    for _, members in itertools.groupby(rows, key=lambda row: row.group):
        group = list(members)
        if not waves or len(waves[-1]) + len(group) > slots:
            waves.append([])
        waves[-1].extend(group)
    return waves


class _Draw:
    """Draws one token for each row and notes it there."""

    def __init__(self, rows: list[_Row], vocab: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.temperature = self._column("temperature")
        self.filters = {
            name: self._column(name)
            for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1))
            if any(getattr(row.params, name) != off for row in rows)
        }
        if "repetition_penalty" in self.filters:
            seen = torch.zeros(len(rows), vocab, dtype=torch.bool)
            for i, row in enumerate(rows):
                seen[i, row.prompt + row.ids] = True
            self.filters["seen"] = seen.to(device)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> tokens [B]."""
        # In float64: rounded to float32 a number could become 1, which no token answers to.
        drawn_at = [float(row.uniforms[len(row.ids)]) for row in self.rows]
        uniform = torch.tensor(drawn_at, dtype=torch.float64)
        tokens, logp, processed = sample_tokens(
            logits, uniform.to(self.device), self.temperature, **self.filters
        )
        if "seen" in self.filters:
            self.filters["seen"].scatter_(1, tokens[:, None], True)
        drawn = zip(tokens.tolist(), logp.tolist(), processed.tolist(), strict=True)
        for row, (token, lp, pp) in zip(self.rows, drawn, strict=True):
            row.ids.append(token)
            row.logp.append(lp)
            row.processed.append(pp)
        return tokens

    def _column(self, name: str) -> Tensor:
        return torch.tensor([getattr(row.params, name) for row in self.rows], device=self.device)
