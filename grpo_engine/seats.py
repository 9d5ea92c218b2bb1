"""What the slots hold while they decode: the samples, as arrays by slot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .decode_ops import draw_tokens
from .rollout import SamplingParams

STOP_SLACK = 8  # tokens
# By column: its type, and the value at which the filter is off.
FILTERS = {
    "top_k": (np.int64, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
}


class Sample:
    """A sample before, while and after it is drawn."""

    def __init__(
        self, group: int, number: int, prompt: list[int], params: SamplingParams, limit: int
    ) -> None:
        """number: within the group; limit: tokens that it may have."""
        self.group, self.number, self.prompt = group, number, prompt
        self.params, self.limit = params, limit
        self.ids: list[int] = []
        self.logp = self.processed = np.empty(0, np.float32)
        self.finish = "error"  # until it has ended

    def uniforms(self) -> np.ndarray:
        """[limit] float64 in [0, 1): a function of (seed, group, number, position) alone."""
        seed = self.params.seed
        if seed is None:
            return np.random.default_rng().random(self.limit)
        key = np.array([seed, (self.group << 32) | self.number], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(self.limit)


class Seats:
    """Draws the tokens of the samples that sit in W slots, and sees which of them have ended."""

    def __init__(
        self,
        slots: int,
        samples: Sequence[Sample],
        eos_ids: frozenset[int],
        tokenizer: Any,
        vocab: int,
        device: torch.device,
    ) -> None:
        longest = max(sample.limit for sample in samples)
        self.tokenizer, self.device = tokenizer, device
        self.sample: list[Sample | None] = [None] * slots
        self._eos = np.array(sorted(eos_ids), dtype=np.int64)
        self._filters = [
            name
            for name, (_, off) in FILTERS.items()
            if any(getattr(sample.params, name) != off for sample in samples)
        ]
        self._at = np.zeros(slots, _record(longest))
        self.length = self._at["length"]
        self._seen = None
        if "repetition_penalty" in self._filters:
            self._seen = torch.zeros(slots, vocab, dtype=torch.bool, device=device)

    def taken(self) -> np.ndarray:
        """The slots that hold a sample, rising."""
        return np.flatnonzero([sample is not None for sample in self.sample])

    def place(self, slot: int, sample: Sample) -> None:
        """The sample begins in this slot."""
        params = sample.params
        self.sample[slot] = sample
        at = self._at[slot]
        at["length"], at["limit"] = 0, sample.limit
        at["heeds_eos"], at["has_stop"] = not params.ignore_eos, bool(params.stop)
        at["uniform"][: sample.limit] = sample.uniforms()
        for name in ("temperature", *FILTERS):
            at[name] = getattr(params, name)
        if self._seen is not None:
            self._seen[slot] = False
            self._seen[slot, sample.prompt] = True

    def move(self, source: int, to: int) -> None:
        """What sits in slot `source` sits in the idle slot `to` from now on."""
        self.sample[to], self.sample[source] = self.sample[source], None
        self._at[to] = self._at[source]
        if self._seen is not None:
            self._seen[to] = self._seen[source]

    def draw(self, logits: Tensor, slots: np.ndarray) -> Tensor:
        """logits [n, V] f32 of these slots -> the tokens [n] drawn, on their device."""
        at = slots, self.length[slots]
        filters = {name: self._column(self._at[name][slots]) for name in self._filters}
        if self._seen is not None:
            filters["seen"] = self._seen[slots]
        uniform = self._column(self._at["uniform"][at])
        temperature = self._column(self._at["temperature"][slots])
        tokens, logp, processed = draw_tokens(logits, uniform, temperature, **filters)
        if self._seen is not None:
            self._seen[slots, tokens] = True
        self._at["ids"][at] = tokens.cpu().numpy()
        self._at["logp"][at] = logp.cpu().numpy()
        self._at["processed"][at] = processed.cpu().numpy()
        self.length[slots] += 1
        return tokens

    def ended(self, slots: np.ndarray) -> np.ndarray:
        """[n] bool: whose last token was an end; their samples are complete then."""
        last = self._at["ids"][slots, self.length[slots] - 1]
        stopped = self._at["heeds_eos"][slots] & np.isin(last, self._eos)
        for i in np.flatnonzero(self._at["has_stop"][slots] & ~stopped):
            stopped[i] = self._ends_with_stop(slots[i])
        ended = stopped | (self.length[slots] >= self._at["limit"][slots])
        for slot, stop in zip(slots[ended], stopped[ended], strict=True):
            self._take_out(slot).finish = "stop" if stop else "length"
        return ended

    def break_off(self) -> None:
        """Samples that sit in slots keep what they have; their finish reason stays "error"."""
        for slot, sample in enumerate(self.sample):
            if sample is not None:
                self._take_out(slot)

    def _take_out(self, slot: int) -> Sample:
        sample, at, length = self.sample[slot], self._at[slot], self.length[slot]
        self.sample[slot] = None
        sample.ids = at["ids"][:length].tolist()
        sample.logp, sample.processed = at["logp"][:length].copy(), at["processed"][:length].copy()
        return sample

    def _ends_with_stop(self, slot: int) -> bool:
        # A token is at least a byte; the slack is for tokens before the stop string.
        stops = self.sample[slot].params.stop
        longest = max(len(stop.encode()) for stop in stops)
        length = self.length[slot]
        tail = self._at["ids"][slot, max(0, length - longest - STOP_SLACK) : length]
        text = self.tokenizer.decode(tail.tolist())
        return any(stop in text for stop in stops)

    def _column(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _record(longest: int) -> np.dtype:
    """Of one slot; tokens and random numbers up to the longest limit."""
    filters = [(name, kind) for name, (kind, _) in FILTERS.items()]
    return np.dtype(
        [
            ("length", np.int64),
            ("limit", np.int64),
            ("heeds_eos", bool),
            ("has_stop", bool),
            ("temperature", np.float32),
            *filters,
            ("uniform", np.float64, longest),
            ("ids", np.int64, longest),
            ("logp", np.float32, longest),
            ("processed", np.float32, longest),
        ],
        align=True,
    )
