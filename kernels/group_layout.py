"""Where the tokens of packed groups lie: all that attention needs and only lengths decide.

A packing is, group after group, the prompt once and then its completions. A segment is a prompt or
a completion: what is causal over itself.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Padding up to this many rows a segment costs less than one more call.
SHORT = 16

Span = tuple[int, int]  # rows [start, stop)


class Group(NamedTuple):
    """The packed rows of a group: prompt [start, middle), completions [middle, stop)."""

    start: int
    middle: int
    stop: int


class Segment(NamedTuple):
    """A prompt or a completion with tokens."""

    length: int
    position: int
    """of its first token"""
    before: int
    """the row that predicts its first token; -1: a prompt"""


@dataclass(frozen=True, eq=False)
class Rows:
    """The packed rows that a call works on, in its order."""

    at: slice | Tensor
    """[T] int64; a slice where nothing needs to be copied"""
    pads: Tensor | None = None
    """the places in `at` that repeat the last row of their segment, to fill a batch"""
    real: Tensor | None = None
    """the other places; None: all"""

    @staticmethod
    def of(at: Tensor, pads: Tensor | None, device: torch.device) -> "Rows":
        """at: [T] int64; pads: [T] bool or None; both on the CPU."""
        if pads is not None and pads.any():
            filled, real = pads.nonzero().squeeze(1), (~pads).nonzero().squeeze(1)
            return Rows(at.to(device), filled.to(device), real.to(device))
        first = int(at[0])
        if torch.equal(at, torch.arange(first, first + len(at))):
            return Rows(slice(first, first + len(at)))
        return Rows(at.to(device))

    def take(self, x: Tensor) -> Tensor:
        """x [N, ...] -> [T, ...]."""
        return x[self.at] if isinstance(self.at, slice) else x.index_select(0, self.at)

    def take_gradient(self, x: Tensor) -> Tensor:
        """As `take`, but 0 at the pads, so that nothing flows from there."""
        taken = self.take(x)
        return taken if self.pads is None else taken.index_fill_(0, self.pads, 0)

    def put(self, into: Tensor, x: Tensor) -> None:
        """into [N, ...] at these rows = x [T, ...]."""
        if self.real is None:
            into[self.at] = x
        else:
            into[self.at[self.real]] = x.index_select(0, self.real)

    def add(self, into: Tensor, x: Tensor) -> None:
        """into [N, ...] at these rows += x [T, ...]; for rows without pads."""
        if isinstance(self.at, slice):
            into[self.at] += x
        else:
            into.index_add_(0, self.at, x)


@dataclass(frozen=True, eq=False)
class Batch:
    """A call of [samples, T / samples] queries; causal: each sample over itself."""

    queries: Rows
    keys: Rows
    causal: bool
    samples: int


@dataclass(frozen=True, eq=False)
class Varlen:
    """A call of sequences end to end; sequence i: queries and keys cu[i] : cu[i + 1]."""

    queries: Rows
    keys: Rows
    causal: bool
    cu_queries: Tensor
    """[sequences + 1] int32"""
    cu_keys: Tensor
    """[sequences + 1] int32"""
    max_queries: int
    max_keys: int


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """A packing, made once per micro-batch and used by every layer."""

    groups: tuple[Group, ...]
    starts: tuple[int, ...]
    """first row of each segment that has tokens, and N"""
    longest: int
    """tokens of the longest prompt with completion"""
    positions: Tensor
    """[N] int64; within prompt and completion, so each completion starts at its prompt's length"""
    predicts: Tensor
    """[sum of completion lengths] int64; for each completion token the row that predicts it"""
    completion: Tensor
    """[N] int64; number of the completion that a row belongs to, -1: a prompt"""

    @classmethod
    def make(
        cls,
        prompt_len: list[int],
        completion_len: list[list[int]],
        device: torch.device | str = "cpu",
    ) -> "GroupLayout":
        """Lengths in tokens, a list of completions a group; [] has none, as in a prefill.

        Raises ValueError for a prompt without tokens, from which nothing could be predicted.
        """
        _check_lengths(prompt_len, completion_len)
        groups, segments, start = [], [], 0
        for prompt, completions in zip(prompt_len, completion_len, strict=True):
            middle = start + prompt
            own = [length for length in completions if length]
            segments += [Segment(prompt, 0, -1), *(Segment(n, prompt, middle - 1) for n in own)]
            groups.append(Group(start, middle, middle + sum(own)))
            start = groups[-1].stop
        lengths, first_position, before = torch.tensor(segments).T
        starts = [0, *accumulate(lengths.tolist())]
        first_row, rows = torch.tensor(starts[:-1]), torch.arange(start)
        segment = torch.repeat_interleave(lengths)
        previous = rows - 1
        previous[first_row] = before
        of_completion = before[segment] >= 0
        return cls(
            groups=tuple(groups),
            starts=tuple(starts),
            longest=max(p + max([0, *c]) for p, c in zip(prompt_len, completion_len, strict=True)),
            positions=(rows - (first_row - first_position)[segment]).to(device),
            predicts=previous[of_completion].to(device),
            completion=segment.where(of_completion, -1).to(device),
        )

    @property
    def tokens(self) -> int:
        """N."""
        return self.starts[-1]

    @property
    def answered(self) -> list[Group]:
        """The groups that have completion tokens."""
        return [group for group in self.groups if group.stop > group.middle]

    def segment_start(self, row: int) -> int:
        """The first row of the segment that a row belongs to."""
        return self.starts[bisect_right(self.starts, row) - 1]

    @cached_property
    def batches(self) -> list[Batch]:
        """Padded calls: segments of about one length causally, completions on each prompt."""
        spans = sorted(pairwise(self.starts), key=lambda span: span[0] - span[1])
        device, calls = self.positions.device, []
        while spans:
            longest = spans[0][1] - spans[0][0]
            least = min(longest - SHORT, longest * 7 // 8)
            alike = [span for span in spans if span[1] - span[0] >= least]
            spans = spans[len(alike) :]
            rows = _padded_rows(sorted(alike), longest, device)
            calls.append(Batch(rows, rows, True, len(alike)))
        for start, middle, stop in self.answered:
            calls.append(Batch(Rows(slice(middle, stop)), Rows(slice(start, middle)), False, 1))
        return calls

    @cached_property
    def varlen(self) -> list[Varlen]:
        """Two calls: all segments causally, the completions of each group on its prompt."""
        device, groups = self.positions.device, self.answered
        segments = list(pairwise(self.starts))
        calls = [_varlen(segments, segments, True, device)]
        if groups:
            completions = [(group.middle, group.stop) for group in groups]
            prompts = [(group.start, group.middle) for group in groups]
            calls.append(_varlen(completions, prompts, False, device))
        return calls


def _check_lengths(prompt_len: list[int], completion_len: list[list[int]]) -> None:
    if len(prompt_len) != len(completion_len) or not prompt_len:
        raise ValueError(
            f"as many prompts as groups of completions, at least one; given {len(prompt_len)} and "
            f"{len(completion_len)}"
        )
    if min(prompt_len) < 1:
        raise ValueError(f"prompt_len must be >= 1; given {min(prompt_len)}")
    if (shortest := min(min(c, default=0) for c in completion_len)) < 0:
        raise ValueError(f"completion_len must be >= 0; given {shortest}")


def _padded_rows(spans: list[Span], width: int, device: torch.device) -> Rows:
    """Rows [samples * width]; a shorter span goes on with its last row."""
    start, stop = torch.tensor(spans).T[..., None]
    at = start + torch.arange(width)
    return Rows.of(at.minimum(stop - 1).flatten(), (at >= stop).flatten(), device)


def _varlen(queries: list[Span], keys: list[Span], causal: bool, device: torch.device) -> Varlen:
    rows, cu, most = zip(*(_sequences(spans, device) for spans in (queries, keys)), strict=True)
    return Varlen(*rows, causal, *cu, *most)


def _sequences(spans: list[Span], device: torch.device) -> tuple[Rows, Tensor, int]:
    """Spans end to end: rows, offsets [sequences + 1] int32, the longest."""
    lengths = [stop - start for start, stop in spans]
    at = torch.cat([torch.arange(*span) for span in spans])
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Rows.of(at, None, device), cu, max(lengths)
