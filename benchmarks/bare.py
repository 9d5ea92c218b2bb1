"""The GEMMs of the head alone, in the tiles that the op uses: the floor of its time."""

import torch
from torch import Tensor

from ..kernels.token_logprob import tiles
from .harness import Step


def bare_gemms(
    units: int, hidden: Tensor, weight: Tensor, tile_bytes: int, block: int | None = None
) -> Step:
    """1: logits; 2: and dH (frozen head); 3: and dW; 4: and the logits again (trainable head).

    hidden: [N, D], weight: [V, D] of one dtype. block: of the vocabulary, a GEMM each; None: one
    GEMM a tile.
    """
    (n, _), (v, _) = hidden.shape, weight.shape
    on_cuda = hidden.device.type == "cuda"
    itemsize = 4 if on_cuda else hidden.element_size()  # on CUDA a tile is float32
    every = slice(None)
    if units == 4:
        todo = [(part, every, ()) for part in tiles(n, v, itemsize, tile_bytes)]
        todo += [(every, part, ("dH", "dW")) for part in tiles(v, n, itemsize, tile_bytes)]
    else:
        after = ((), ("dH",), ("dH", "dW"))[units - 1]
        todo = [(part, every, after) for part in tiles(n, v, itemsize, tile_bytes)]
    largest = max(len(hidden[rows]) * len(weight[columns]) for rows, columns, _ in todo)
    # Stands for what a row pass would have made of the logits; zeros would run too fast.
    made = torch.randn(largest, dtype=hidden.dtype, device=hidden.device)

    def step() -> dict[str, Tensor]:
        tile = None if on_cuda else torch.empty_like(made)
        for rows, columns, after in todo:
            _gemms(after, hidden[rows], weight[columns], made, tile, block)
        return {}

    return step


def _gemms(
    after: tuple[str, ...],
    hidden: Tensor,
    weight: Tensor,
    made: Tensor,
    tile: Tensor | None,
    block: int | None,
) -> None:
    shape = len(hidden), len(weight)
    dlogits = made[: shape[0] * shape[1]].view(shape)
    logits = None if tile is None else tile[: shape[0] * shape[1]].view(shape)
    size = block or shape[1]
    parts = [slice(start, start + size) for start in range(0, shape[1], size)]
    for part in parts:
        _mm(hidden, weight[part].T, None if logits is None else logits[:, part])
    if "dH" in after:
        for part in parts:
            _mm(dlogits[:, part], weight[part])
    if "dW" in after:
        for part in parts:
            _mm(dlogits[:, part].T, hidden)


def _mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> None:
    if a.is_cuda and a.dtype != torch.float32:
        torch.mm(a, b, out_dtype=torch.float32)
    else:
        torch.mm(a, b, out=out)
