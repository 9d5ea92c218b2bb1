"""The C++ implementations behind the public ops: tensors to arrays and back."""

import functools
from typing import Any

import torch
from torch import Tensor

from . import _C
from .kernels.gradient import attach_gradient
from .kernels.logit_map import LogitMap, RowStats
from .kernels.options import GRPOOptions
from .kernels.reference import LossOutput

METRICS = (
    "kl ratio_mean ratio_min ratio_max clip_low clip_high clip_region advantage_abs "
    "tokens samples nonfinite no_signal"
).split()


def group_advantages(
    rewards: Tensor, cu_groups: Tensor, valid: Tensor | None, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """As kernels/reference.py::group_advantages, for float32 rewards."""
    found = _C.group_advantages(*map(_array, (rewards, cu_groups, valid)), _loss_options(options))
    advantages, signal = map(torch.from_numpy, found)
    return advantages, signal


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    *,
    options: GRPOOptions,
    rewards: Tensor | None = None,
    cu_groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
    valid: Tensor | None = None,
    in_loss: Tensor | None = None,
    mask: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """As kernels/reference.py::grpo_loss, for float32 log-probs."""
    if normalizer is not None:
        normalizer = torch.as_tensor(normalizer, dtype=torch.float32).reshape(1)
    samples = len(logp) if cu_seqlens is None else len(cu_seqlens) - 1
    dlogp = torch.empty_like(logp, memory_format=torch.contiguous_format, requires_grad=False)
    loss, *metrics = _C.group_loss(
        _array(logp),
        _array(old_logp),
        _array(ref_logp if options.beta > 0 else None),
        _array(rewards),
        _array(cu_groups),
        _array(advantages),
        _array(cu_seqlens),
        samples,
        _array(mask),
        _array(valid),
        _array(in_loss),
        _array(importance_ratio),
        _array(normalizer),
        _loss_options(options),
        dlogp.numpy(),
    )
    loss = attach_gradient(logp, torch.scalar_tensor(loss, dtype=torch.float32), dlogp)
    return LossOutput(loss, functools.partial(_named, metrics))


def _named(metrics: list[float]) -> dict[str, Tensor]:
    """The last is there only where statistics were made."""
    values = torch.tensor(metrics, dtype=torch.float32).unbind()
    return dict(zip(METRICS, values, strict=False))


@functools.lru_cache(maxsize=64)
def _loss_options(options: GRPOOptions) -> "_C.LossOptions":
    return _C.LossOptions(options)


def _array(x: Tensor | None) -> Any:
    if x is None:
        return None
    return (x.detach() if x.requires_grad else x).contiguous().numpy()


class CpuRows:
    """The head's GEMMs and row passes over one reused tile; kernels/token_logprob.py drives it."""

    def __init__(self) -> None:
        self._tile: Tensor | None = None

    @staticmethod
    def tile_itemsize(dtype: torch.dtype) -> int:
        """Bytes of a logit in the tile: the CPU's GEMM returns what it is given."""
        return dtype.itemsize

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [C, D] @ weight [B, D]^T -> [C, B] in their dtype; valid until the next call."""
        shape = len(hidden), len(weight)
        count = shape[0] * shape[1]
        if self._tile is None or self._tile.numel() < count:
            self._tile = hidden.new_empty(count)
            _C.prefer_huge_pages(_matrix(self._tile)[0])
        tile = self._tile[:count].view(shape)
        for part in _blocks(len(weight), COLUMN_BLOCK):
            torch.mm(hidden, weight[part].T, out=tile[:, part])
        return tile

    def add_product(self, into: Tensor, a: Tensor, b: Tensor) -> None:
        """into [M, N] f32 += a [M, K] @ b [K, N]; blocks of K are summed in float32."""
        for part in _blocks(a.shape[1], SUM_BLOCK):
            if a.dtype == torch.float32:
                into.addmm_(a[:, part], b[part])
            else:
                _C.accumulate(_array(into), *_matrix(torch.mm(a[:, part], b[part])))

    def softmax(
        self,
        tile: Tensor,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        lens: LogitMap,
        gradient: bool,
    ) -> tuple[RowStats, Tensor | None]:
        """Row statistics; with `gradient` the tile becomes p_v slope_v, 0 at the target."""
        arrays = _tile_arrays(tile, hidden, weight, targets, lens)
        stats = [torch.from_numpy(x) for x in _C.softmax_rows(*arrays, gradient)]
        return RowStats(*stats, *([] if gradient else [None])), tile if gradient else None

    def gradient(
        self,
        tile: Tensor,
        first_column: int,
        targets: Tensor,
        lse: Tensor,
        logp: Tensor,
        upstream: Tensor,
        hidden: Tensor,
        weight: Tensor,
        lens: LogitMap,
    ) -> Tensor:
        """The tile becomes upstream slope_v (1[v = target] - p_v)."""
        arrays = _tile_arrays(tile, hidden, weight, targets, lens)
        _C.gradient_rows(*arrays, first_column, *map(_array, (lse, logp, upstream)))
        return tile


# Measured with oneDNN at V = 151,936, D = 1024: blocks of columns are 10 to 20 % faster than all at
# once; blocks of a sum lose 7 % and keep float32 between them.
COLUMN_BLOCK = 8192
SUM_BLOCK = 32768


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _matrix(x: Tensor) -> tuple[Any, str]:
    """numpy has no bfloat16: half precision goes as the integers that hold it."""
    bits = x if x.dtype == torch.float32 else x.detach().view(torch.int16)
    return _array(bits), str(x.dtype).removeprefix("torch.")


def _tile_arrays(
    tile: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, lens: LogitMap
) -> tuple:
    matrices = [_matrix(x)[0] for x in (tile, hidden, weight)]
    maps = _array(lens.bias), _array(lens.inv_temperature), lens.softcap, lens.logit_scale
    return *matrices, _array(targets), _matrix(tile)[1], *maps
