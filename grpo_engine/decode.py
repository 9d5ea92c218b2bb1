"""One decode step of all slots: static buffers in, hidden states out; a CUDA graph per bucket."""

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from .attention import routed
from .cache import Decode, KVCache
from .forward import decoder_hidden
from .kernels.reference_decode import DecodeTables

CAPTURE_AFTER = 8  # steps of one bucket, which a capture costs about as much as


class DecodeStep:
    """The model's forward for one token of each slot, whatever the slots hold.

    Every step of one bucket has the same shapes and buffers: that is what a CUDA graph needs, and
    what keeps a CPU from making its kernels again.
    """

    def __init__(
        self, causal: nn.Module, cache: KVCache, tables: np.ndarray, views: dict[str, np.ndarray]
    ) -> None:
        """tables: the scheduler's int32 memory, read anew in each step; views: its named parts."""
        self.causal, self.cache, self.device = causal, cache, causal.device
        self._host = torch.from_numpy(tables)
        # On the CPU the step reads the scheduler's own memory.
        self._tables = self._host.to(self.device)
        self._parts = {
            name: _same_place(self._tables, tables, view) for name, view in views.items()
        }
        slots = len(views["slot_group"])
        self._tokens = torch.zeros(1, slots, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros_like(self._tokens)
        self._by_lanes: dict[int, DecodeTables] = {}
        self._used: dict[int, int] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._capture = self.device.type == "cuda"

    def __call__(self, tokens: Tensor, positions: Tensor, lanes: int) -> Tensor:
        """Tokens [lanes] of the first slots at `positions` [lanes] -> hidden [lanes, D].

        Idle slots among them have any token; their rows mean nothing. On CUDA the result is
        overwritten by the next step.
        """
        if self.device.type != "cpu":
            self._tables.copy_(self._host, non_blocking=True)
        self._tokens[0, :lanes].copy_(tokens)
        self._positions[0, :lanes].copy_(positions)
        self._used[lanes] = self._used.get(lanes, 0) + 1
        if lanes not in self._graphs and self._capture and self._used[lanes] > CAPTURE_AFTER:
            self._make_graph(lanes)
        if lanes not in self._graphs:
            return self._forward(lanes)
        graph, hidden = self._graphs[lanes]
        graph.replay()
        return hidden

    def _forward(self, lanes: int) -> Tensor:
        with routed(self.causal):
            return decoder_hidden(
                self.causal,
                input_ids=self._tokens[:, :lanes],
                position_ids=self._positions[:, :lanes],
                group=Decode(self._lane_tables(lanes), self.cache),
            )[0]

    def _lane_tables(self, lanes: int) -> DecodeTables:
        # Rows of groups stay as they are; what goes by slots is cut to the lanes.
        if lanes not in self._by_lanes:
            by_slot = "suffix_table", "suffix_len", "slot_group", "order"
            cut = {name: x[:lanes] if name in by_slot else x for name, x in self._parts.items()}
            self._by_lanes[lanes] = DecodeTables(**cut)
        return self._by_lanes[lanes]

    def _make_graph(self, lanes: int) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                hidden = self._forward(lanes)
        except RuntimeError as error:
            self._capture = False
            warnings.warn(
                f"{type(self.causal).__name__} can't be captured in a CUDA graph, decoding goes on "
                f"without: {error}",
                stacklevel=2,
            )
            torch.cuda.synchronize()
            return
        self._graphs[lanes] = graph, hidden


def _same_place(memory: Tensor, tables: np.ndarray, view: np.ndarray) -> Tensor:
    """The part of `memory` that `view` is of `tables`."""
    first = (view.ctypes.data - tables.ctypes.data) // tables.itemsize
    return memory[first : first + view.size].view(view.shape)


def bucket(active: int, slots: int) -> int:
    """Lanes for so many active slots: steps of an eighth, so that shapes come again."""
    step = max(1, 1 << max(0, (active - 1).bit_length() - 3))
    return min(slots, -(-active // step) * step)
