"""Log-probs of chosen tokens from hidden states, in tiles: [N, V] is never held.

The GEMMs are the BLAS's; what lies between them is folded row by row by a backend: TritonRows of
head_rows.py, or the C++ one. A GEMM unit is 2 N V D FLOP. Scoring takes 1; with a frozen head 2,
because d logp / d hidden [N, D] is saved by the forward; with a trainable head 4, because the
upstream gradient comes only when the logits are gone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .logit_map import LogitMap

TILE_BYTES = 256 << 20
ROW_MULTIPLE = 64  # of a tile: what GEMMs like
BACKWARD_ROWS = 8192  # of a tile in the backward: as many as keep one dW without accumulation


def tiles(count: int, other: int, itemsize: int, tile_bytes: int) -> Iterator[slice]:
    """Even slices of `count` rows such that [slice, other] elements fit into tile_bytes."""
    most = max(1, tile_bytes // (other * itemsize))
    if most > ROW_MULTIPLE:
        most -= most % ROW_MULTIPLE
    parts = -(-count // most)
    size = -(-count // max(1, parts))
    size = min(most, -(-size // ROW_MULTIPLE) * ROW_MULTIPLE)
    return (slice(start, min(count, start + size)) for start in range(0, count, max(1, size)))


def rows_of(lens: LogitMap, rows: slice) -> LogitMap:
    """The part of a map that belongs to some rows."""
    return replace(lens, inv_temperature=lens.inv_temperature[rows])


def columns_of(lens: LogitMap, columns: slice) -> LogitMap:
    """The part of a map that belongs to some columns."""
    return lens if lens.bias is None else replace(lens, bias=lens.bias[columns])


def scored_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, lens: LogitMap, make_rows, tile_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy, lse [N]: one GEMM unit."""
    rows = make_rows()
    out = hidden.new_empty(3, len(hidden), dtype=torch.float32)
    for part in tiles(len(hidden), len(weight), rows.tile_itemsize(hidden.dtype), tile_bytes):
        tile = rows.logits(hidden[part], weight)
        stats, _ = rows.softmax(
            tile, hidden[part], weight, targets[part], rows_of(lens, part), gradient=False
        )
        del tile  # before the next one is made
        for row, values in zip(out, stats, strict=False):
            row[part] = values
    return tuple(out)


class FrozenHeadFn(torch.autograd.Function):
    """Saves u = d logp / d hidden [N, D]; the backward is upstream * u."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, lens, make_rows, tile_bytes):
        rows = make_rows()
        logp, entropy = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        u = torch.empty_like(hidden)
        for part in tiles(len(hidden), len(weight), rows.tile_itemsize(hidden.dtype), tile_bytes):
            tile = rows.logits(hidden[part], weight)
            stats, p = rows.softmax(
                tile, hidden[part], weight, targets[part], rows_of(lens, part), gradient=True
            )
            logp[part], entropy[part] = stats.logp, stats.entropy
            # The target's column is added in float32: with p_y near 1 inside the low-precision
            # GEMM, what remains of 1 - p_y would be rounding.
            own = weight[targets[part]].float() * stats.target_weight[:, None]
            others = torch.zeros_like(own)
            rows.add_product(others, p, weight)
            u[part] = own - others
            del tile, p
        ctx.save_for_backward(u)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        (u,) = ctx.saved_tensors
        return (u * upstream[:, None]).to(u.dtype), *[None] * 5


class TrainableHeadFn(torch.autograd.Function):
    """Makes the logits again in the backward, in tiles of columns, with the row's lse known.

    So a gradient of the weight is written once per tile of columns, summed inside the GEMM, for
    up to BACKWARD_ROWS rows; beyond that it is accumulated in float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, lens, make_rows, tile_bytes):
        logp, entropy, lse = scored_rows(hidden, weight, targets, lens, make_rows, tile_bytes)
        ctx.save_for_backward(hidden, weight, targets, logp, lse)
        ctx.lens, ctx.make_rows, ctx.tile_bytes = lens, make_rows, tile_bytes
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        hidden, weight, targets, logp, lse = ctx.saved_tensors
        rows = ctx.make_rows()
        itemsize = rows.tile_itemsize(hidden.dtype)
        blocks = list(tiles(len(hidden), 1, 1, BACKWARD_ROWS))
        grads = HeadGradients(hidden, weight, ctx.needs_input_grad[:3], blocks=len(blocks))
        for part in blocks:
            near = rows_of(ctx.lens, part)
            for columns in tiles(len(weight), part.stop - part.start, itemsize, ctx.tile_bytes):
                block = weight[columns]
                tile = rows.logits(hidden[part], block)
                dlogits = rows.gradient(
                    tile, columns.start, targets[part], lse[part], logp[part], upstream[part],
                    hidden[part], block, columns_of(near, columns),
                )  # fmt: skip
                grads.add(rows.add_product, dlogits, part, columns)
                del tile, dlogits
        return *grads.results(ctx.bias_dtype), *[None] * 4


class HeadGradients:
    """dH, dW and dbias, each if wanted, gathered from tiles of d loss / d (raw logits)."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: tuple, blocks: int) -> None:
        """`blocks` of rows will be added for each column."""
        self.hidden, self.weight = hidden, weight
        wants_hidden, wants_weight, wants_bias = wanted
        f32 = {"dtype": torch.float32}
        self.dhidden = torch.zeros_like(hidden, **f32) if wants_hidden else None
        self.dbias = weight.new_zeros(len(weight), **f32) if wants_bias else None
        # One block is summed inside the GEMM; several in half precision would lose what they add.
        self.sums_in_gemm = blocks == 1
        start = torch.empty_like(weight) if blocks == 1 else torch.zeros_like(weight, **f32)
        self.dweight = start if wants_weight else None

    def add(
        self,
        add_product: Callable[[Tensor, Tensor, Tensor], None],
        dlogits: Tensor,
        rows: slice,
        columns: slice,
    ) -> None:
        """dlogits [rows, columns] of the raw product hidden . weight^T."""
        if self.dhidden is not None:
            add_product(self.dhidden[rows], dlogits, self.weight[columns])
        if self.dweight is not None and self.sums_in_gemm:
            torch.mm(dlogits.T, self.hidden[rows], out=self.dweight[columns])
        elif self.dweight is not None:
            add_product(self.dweight[columns], dlogits.T, self.hidden[rows])
        if self.dbias is not None:
            self.dbias[columns] += dlogits.sum(0, dtype=torch.float32)

    def results(self, bias_dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
        """In the dtypes of what they are the gradients of; None where not wanted."""
        dtypes = self.hidden.dtype, self.weight.dtype, bias_dtype
        found = self.dhidden, self.dweight, self.dbias
        return tuple(g if g is None else g.to(d) for g, d in zip(found, dtypes, strict=True))


def logit_map(
    hidden: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
) -> LogitMap:
    """The map of all N rows, in float32."""
    if isinstance(temperature, Tensor):
        inverse = temperature.detach().float().reciprocal()
    else:
        inverse = hidden.new_full((len(hidden),), 1.0 / temperature, dtype=torch.float32)
    bias = None if bias is None else bias.detach().float().contiguous()
    return LogitMap(bias, inverse.contiguous(), softcap, logit_scale)


def trains_head(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd wants a gradient of the head itself."""
    wanted = weight.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and torch.is_grad_enabled()


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    make_rows: Callable,
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor]:
    """As reference.token_logprob; `make_rows` makes the backend of one pass."""
    lens = logit_map(hidden, bias, temperature, softcap, logit_scale)
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.long().contiguous()
    pass_ = lens, make_rows, tile_bytes
    if trains_head(weight, bias):
        return TrainableHeadFn.apply(hidden, weight, bias, targets, *pass_)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return FrozenHeadFn.apply(hidden, weight, targets, *pass_)
    return scored_rows(hidden.detach(), weight.detach(), targets, *pass_)[:2]
