"""The row passes of the head: softmax statistics and gradients over a tile of raw logits.

One program a row, two sweeps at most. Gradients are written over the logits they came from, in
the dtype of the head, so that a tile is all the memory there is.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logit_map import LogitMap, RowStats
from .row_softmax import (
    add_to_lanes,
    close_row,
    empty_lanes,
    join_lanes,
    one_minus_exp,
    tanh_and_slope,
)

# One program is one row, and a tile of 256 MiB has about three rows a multiprocessor of an H100:
# wide programs, so that three of them keep enough bytes in flight. A thread has two quads.
LANES = 1024
QUAD = tl.constexpr(4)  # columns in the widest load, 16 bytes; every row starts at a multiple
# No fusion: a z that is rounded in one place and not in another is above its own maximum.
LAUNCH = {"num_warps": 16, "enable_fp_fusion": False}

OUT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _quads(LANES: tl.constexpr):
    """[LANES, QUAD]: 0, 1, 2, ..., four columns a lane."""
    return tl.arange(0, LANES)[:, None] * QUAD + tl.arange(0, QUAD)[None, :]


@triton.jit
def _map_logits(
    raw, column, columns, bias_ptr, scale, inv_temperature, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """z and d z / d raw of some columns."""
    if HAS_BIAS:
        raw += tl.load(bias_ptr + column, mask=(column >= 0) & (column < columns), other=0.0)
    if HAS_SOFTCAP:
        tanh, slope = tanh_and_slope(raw * (scale / softcap))
        return softcap * inv_temperature * tanh, scale * inv_temperature * slope
    else:
        return raw * (scale * inv_temperature), scale * inv_temperature


@triton.jit(do_not_specialize=[
    "targets_ptr", "bias_ptr", "inv_temperature_ptr", "stats_ptr", "rows", "stride_quads",
    "columns", "scale", "softcap",
])  # fmt: skip
def softmax_kernel(
    tile_ptr,  # [C, V] f32, raw logits; becomes [C, V] OUT with the same row starts
    targets_ptr,  # [C] i64
    bias_ptr,  # [V] f32
    inv_temperature_ptr,  # [C] f32
    stats_ptr,  # [4, C] f32: logp, entropy, lse, target weight
    rows, stride_quads, columns, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = tile_ptr + row.to(tl.int64) * stride_quads * QUAD
    # What is loaded ends at a multiple of four columns: else no load could be 16 bytes wide.
    padded = (columns + QUAD - 1) // QUAD * QUAD
    inv_temperature = tl.load(inv_temperature_ptr + row)
    target = tl.load(targets_ptr + row)
    valid = (target >= 0) & (target < columns)
    target = tl.where(valid, target, -1).to(tl.int32)
    raw_y = tl.load(row_ptr + target, mask=valid, other=float("nan"))
    z_y, slope_y = _map_logits(
        raw_y, target, columns, bias_ptr, scale, inv_temperature, softcap, HAS_BIAS, HAS_SOFTCAP
    )

    peak, mass, moment = empty_lanes(LANES)
    for start in range(0, columns, LANES * QUAD):
        column = start + _quads(LANES)
        raw = tl.load(row_ptr + column, mask=column < padded, other=0.0)
        z, _ = _map_logits(
            raw, column, columns, bias_ptr, scale, inv_temperature, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        z = tl.where((column < columns) & (column != target), z, float("-inf"))
        peak, mass, moment = add_to_lanes(peak, mass, moment, z)
    peak, mass, moment = join_lanes(peak, mass, moment)
    logp, entropy, q, lse_peak, lse_rest = close_row(z_y, peak, mass, moment)
    tl.store(stats_ptr + row, logp)
    tl.store(stats_ptr + rows + row, entropy)
    tl.store(stats_ptr + 2 * rows + row, lse_peak + lse_rest)

    if OUT is not None:
        tl.store(stats_ptr + 3 * rows + row, slope_y * q)
        out_ptr = row_ptr.to(tl.pointer_type(OUT))
        for start in range(0, columns, LANES * QUAD):
            column = start + _quads(LANES)
            raw = tl.load(row_ptr + column, mask=column < padded, other=0.0)
            z, slope = _map_logits(
                raw, column, columns, bias_ptr, scale, inv_temperature, softcap,
                HAS_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
            weight = tl.exp((z - lse_peak) - lse_rest) * slope
            weight = tl.where(column == target, 0.0, weight)
            # Half-size values go under columns that other warps read: in this block, or before.
            tl.debug_barrier()
            tl.store(out_ptr + column, weight.to(OUT), mask=column < padded)


@triton.jit(do_not_specialize=[
    "targets_ptr", "lse_ptr", "logp_ptr", "upstream_ptr", "bias_ptr", "inv_temperature_ptr",
    "first_column", "stride_quads", "columns", "scale", "softcap",
])  # fmt: skip
def gradient_kernel(
    tile_ptr,  # [C, B] f32, raw logits; becomes [C, B] OUT with the same row starts
    targets_ptr,  # [C] i64
    lse_ptr, logp_ptr, upstream_ptr,  # [C] f32
    bias_ptr,  # [B] f32
    inv_temperature_ptr,  # [C] f32
    first_column, stride_quads, columns, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OUT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = tile_ptr + row.to(tl.int64) * stride_quads * QUAD
    padded = (columns + QUAD - 1) // QUAD * QUAD
    inv_temperature = tl.load(inv_temperature_ptr + row)
    target = (tl.load(targets_ptr + row) - first_column).to(tl.int32)
    lse = tl.load(lse_ptr + row)
    upstream = tl.load(upstream_ptr + row)
    at_target = one_minus_exp(tl.load(logp_ptr + row))

    out_ptr = row_ptr.to(tl.pointer_type(OUT))
    for start in range(0, columns, LANES * QUAD):
        column = start + _quads(LANES)
        raw = tl.load(row_ptr + column, mask=column < padded, other=0.0)
        z, slope = _map_logits(
            raw, column, columns, bias_ptr, scale, inv_temperature, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        weight = tl.where(column == target, at_target, -tl.exp(z - lse)) * slope * upstream
        # Half-size values go under columns that other warps read: in this block, or before.
        tl.debug_barrier()
        tl.store(out_ptr + column, weight.to(OUT), mask=column < padded)


class TritonRows:
    """The row backend of `token_logprob` for CUDA tensors (for CPU tensors: the interpreter)."""

    @staticmethod
    def tile_itemsize(dtype: torch.dtype) -> int:
        """Bytes of a logit in the tile."""
        return torch.float32.itemsize

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [C, D], weight [V, D] -> the raw GEMM [C, V] f32, rows on 16-byte boundaries."""
        columns, padded = len(weight), _padded(len(weight))
        if columns == padded:
            return _product(hidden, weight.T)
        tile = torch.empty(len(hidden), padded, dtype=torch.float32, device=hidden.device)
        return _product(hidden, weight.T, out=tile[:, :columns])

    def add_product(self, into: Tensor, a: Tensor, b: Tensor) -> None:
        """into [M, N] f32 += a [M, K] @ b [K, N], summed in f32."""
        into += _product(a, b)

    def softmax(
        self,
        tile: Tensor,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        lens: LogitMap,
        gradient: bool,
    ) -> tuple[RowStats, Tensor | None]:
        """Statistics of the rows; with `gradient` also p_v slope_v, 0 at the target, over `tile`.

        tile: [C, V] f32 as `logits` makes it; targets: [C] int64.
        A target outside of 0 .. V - 1 gives NaN. Returns the stats and [C, V] in weight's dtype.
        """
        rows, columns = tile.shape
        stats = torch.empty(4, rows, dtype=torch.float32, device=tile.device)
        out = OUT_DTYPES[weight.dtype] if gradient else None
        with torch.cuda.device_of(tile):
            softmax_kernel[(rows,)](
                tile, _vector(targets, torch.int64), _bias(lens), _vector(lens.inv_temperature),
                stats, rows, _stride_quads(tile), columns, *_scalars(lens),
                *_has(lens), out, LANES, **LAUNCH,
            )  # fmt: skip
        logp, entropy, lse, target_weight = stats
        if not gradient:
            return RowStats(logp, entropy, lse, None), None
        return RowStats(logp, entropy, lse, target_weight), _over(tile, weight.dtype)

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
        """upstream * slope_v * (1[v == y] - p_v) of a block of columns, over `tile`.

        tile: [C, B] f32 as `logits` makes it, of the columns from first_column on; lens.bias: [B].
        targets: [C] int64; lse, logp, upstream: [C] f32. Returns [C, B] in weight's dtype.
        """
        rows, columns = tile.shape
        with torch.cuda.device_of(tile):
            gradient_kernel[(rows,)](
                tile, _vector(targets, torch.int64), _vector(lse), _vector(logp),
                _vector(upstream), _bias(lens), _vector(lens.inv_temperature),
                first_column, _stride_quads(tile), columns, *_scalars(lens),
                *_has(lens), OUT_DTYPES[weight.dtype], LANES, **LAUNCH,
            )  # fmt: skip
        return _over(tile, weight.dtype)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def _padded(columns: int) -> int:
    return triton.cdiv(columns, QUAD.value) * QUAD.value


def _stride_quads(tile: Tensor) -> int:
    stride, unit = tile.stride()
    aligned = stride % QUAD.value == 0 and tile.data_ptr() % 16 == 0
    if tile.dtype != torch.float32 or unit != 1 or not aligned or stride < _padded(tile.shape[1]):
        raise ValueError(
            "tile must be float32 with rows on 16-byte boundaries, as TritonRows.logits makes it; "
            f"given {tile.dtype} {list(tile.shape)} with strides {tile.stride()}"
        )
    return stride // QUAD.value


def _vector(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    # The upstream gradient of a sum is one number with stride 0.
    return x.to(dtype).contiguous()


def _bias(lens: LogitMap) -> Tensor | None:
    return None if lens.bias is None else _vector(lens.bias)


def _has(lens: LogitMap) -> tuple[bool, bool]:
    return lens.bias is not None, lens.softcap is not None


def _scalars(lens: LogitMap) -> tuple[float, float]:
    return float(lens.logit_scale), float(lens.softcap or 0.0)


def _over(tile: Tensor, dtype: torch.dtype) -> Tensor:
    return tile if dtype == torch.float32 else tile.view(dtype)[:, : tile.shape[1]]


def specialisations() -> Iterator[tuple[str, triton.JITFunction, dict, dict, dict]]:
    """All copies of the kernels: name, function, signature, constexprs, compile options."""
    outs = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}
    for kernel, kinds in ((softmax_kernel, {"stats": None} | outs), (gradient_kernel, outs)):
        for kind, out in kinds.items():
            for has_bias in (False, True):
                for has_softcap in (False, True):
                    constexprs = {
                        "HAS_BIAS": has_bias, "HAS_SOFTCAP": has_softcap, "OUT": out, "LANES": LANES
                    }  # fmt: skip
                    signature = _signature(kernel, has_bias)
                    if not has_bias:
                        constexprs["bias_ptr"] = None
                    name = f"{kernel.__name__.removesuffix('_kernel')}/{kind}"
                    name += "/bias" * has_bias + "/softcap" * has_softcap
                    yield name, kernel, signature, constexprs, LAUNCH


def _signature(kernel: triton.JITFunction, has_bias: bool) -> dict[str, str]:
    known = {"targets_ptr": "*i64", "scale": "fp32", "softcap": "fp32"}
    signature = {}
    for name in kernel.arg_names:
        kind = "constexpr" if name.isupper() else "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = known.get(name, kind)
    return signature if has_bias else {**signature, "bias_ptr": "constexpr"}
