"""Keys and values in pages: a prefill writes them, decode steps read and extend them."""

from dataclasses import dataclass

from torch import Tensor

from .decode_ops import group_decode
from .kernels.grouped_attention import GroupLayout, grouped_attention
from .kernels.reference_decode import DecodeTables


class KVCache:
    """The pages of every layer; made at the first write, when the model shows their shape."""

    def __init__(self, pages: int, page: int) -> None:
        """pages: how many; page: tokens a page."""
        self.pages, self.page = pages, page
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, page, H_kv, d]; like: [N, H_kv, d]."""
        if number not in self._layers:
            shape = self.pages, self.page, *like.shape[1:]
            self._layers[number] = like.new_empty(shape), like.new_empty(shape)
        return self._layers[number]

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """places: [N] int64, page * tokens a page + place in the page of each token."""
        for pool, new in zip(self.layer(layer, k), (k, v), strict=True):
            pool.flatten(0, 1).index_copy_(0, places, new)

    def bytes_per_page(self) -> int:
        """Of all layers, keys and values."""
        return sum(pool[0].nbytes for pools in self._layers.values() for pool in pools)


@dataclass(frozen=True)
class Prefill:
    """The kwarg `group` of prompts that go through the model for the first and only time."""

    layout: GroupLayout
    cache: KVCache
    places: Tensor
    """[N] int64"""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        self.cache.write(layer, self.places, k, v)
        return grouped_attention(q, k, v, self.layout, scale, softcap, window)


@dataclass(frozen=True)
class Decode:
    """The kwarg `group` of a decode step, one token a slot."""

    tables: DecodeTables
    cache: KVCache

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        return group_decode(
            q, k, v, *self.cache.layer(layer, k), self.tables, scale, softcap, window
        )
