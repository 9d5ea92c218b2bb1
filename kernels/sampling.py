"""One token from each row of logits: filters found without sorting, then the inverse CDF.

One program a row. The logits are read again in each pass, as tiles of [TALL, LANES], and are
ranked by integers of the same order as the floats: the bound of a filter is found digit by digit.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_filters import keep_count, keep_likely, keep_mass
from .sampling_passes import (
    KEY_OF_LOWEST,
    key_of,
    load_logits,
    locate,
    peak_of,
    sum_all,
    sum_kept,
)

# A row may be all that a multiprocessor has: 64 KiB in flight, four quads a thread.
LANES, TALL = 1024, 8
LAUNCH = {"num_warps": 32, "enable_fp_fusion": False, "maxnreg": 64}
LOGITS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit(do_not_specialize=["has_top_k", "has_top_p", "has_min_p", "stride", "columns"])
def sample_kernel(
    logits_ptr,  # [B, V] f32, bf16 or f16, rows `stride` apart
    uniform_ptr,  # [B] f64
    temperature_ptr,  # [B] f32
    top_k_ptr,  # [B] i64; it and the next two are read only if there is one
    top_p_ptr, min_p_ptr,  # [B] f32
    penalty_ptr,  # [B] f32 or None
    seen_ptr,  # [B, V] u8 or None
    token_ptr,  # [B] i64
    logp_sampler_ptr, logp_processed_ptr,  # [B] f32
    has_top_k, has_top_p, has_min_p, stride, columns,
    FILTERED: tl.constexpr, LANES: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    inverse = tl.minimum(1 / temperature, 3e38)  # 0 * inf is NaN

    plain_peak = peak_of(logits_ptr, None, 1.0, columns, LANES, TALL)
    plain_total = sum_all(logits_ptr, plain_peak, inverse, columns, LANES, TALL)
    penalty, peak = 1.0, plain_peak
    if seen_ptr is not None:
        seen_ptr += row * columns
        penalty = tl.load(penalty_ptr + row)
        peak = peak_of(logits_ptr, seen_ptr, penalty, columns, LANES, TALL)

    least, last = tl.full([], KEY_OF_LOWEST, tl.uint32), columns
    if greedy:
        least = key_of(peak)
        last = locate(
            logits_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, 0.0, least, True,
            LANES, TALL,
        )  # fmt: skip
    elif FILTERED:
        min_p = tl.load(min_p_ptr + row, mask=has_min_p != 0, other=0.0)
        top_k = tl.load(top_k_ptr + row, mask=has_top_k != 0, other=0)
        top_p = tl.load(top_p_ptr + row, mask=has_top_p != 0, other=1.0)
        if min_p > 0:
            least = tl.maximum(least, keep_likely(peak, min_p, temperature))
        if top_k > 0:
            least, last = keep_count(
                logits_ptr, seen_ptr, penalty, columns, peak, inverse, top_k, least, last,
                LANES, TALL,
            )  # fmt: skip
        if top_p < 1:
            least, last = keep_mass(
                logits_ptr, seen_ptr, penalty, columns, peak, inverse, top_p, least, last,
                LANES, TALL,
            )  # fmt: skip
    total = sum_kept(
        logits_ptr, seen_ptr, penalty, columns, peak, inverse, least, last, LANES, TALL
    )
    token = locate(
        logits_ptr, seen_ptr, penalty, columns, peak, inverse, least, last,
        tl.load(uniform_ptr + row) * total, least, False, LANES, TALL,
    )  # fmt: skip

    valid = (plain_total > 0) & (total > 0) & (token >= 0)  # NaN if a logit is NaN or +inf
    drawn = load_logits(logits_ptr, seen_ptr, penalty, token, columns)
    plain = tl.load(logits_ptr + token, mask=token >= 0, other=0.0).to(tl.float32)
    plain = (plain - plain_peak) / temperature - tl.log(plain_total.to(tl.float32))
    processed = (drawn - peak) / temperature - tl.log(total.to(tl.float32))
    tl.store(token_ptr + row, tl.where(valid, token, -1).to(tl.int64))
    tl.store(logp_sampler_ptr + row, tl.where(valid, plain, float("nan")))
    tl.store(logp_processed_ptr + row, tl.where(valid, processed, float("nan")))


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels/reference_decode.py::sample_tokens, for float32, bfloat16 and float16 logits.

    A row with NaN or +inf, or only -inf, has token -1 and log-probs NaN. Waits for nothing.
    """
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if repetition_penalty is None:
        seen = None
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logp_sampler, logp_processed = torch.empty(2, rows, device=logits.device)
    temperature = _column(temperature)
    filters = _column(top_k, torch.int64), _column(top_p), _column(min_p)
    has = [x is not None for x in filters]
    unread = tokens, temperature, temperature
    if rows:
        with torch.cuda.device_of(logits):
            sample_kernel[(rows,)](
                logits, _column(uniform, torch.float64), temperature,
                *(y if x is None else x for x, y in zip(filters, unread, strict=True)),
                None if seen is None else _column(repetition_penalty),
                None if seen is None else seen.contiguous().view(torch.uint8),
                tokens, logp_sampler, logp_processed,
                *map(int, has), logits.stride(0), columns, any(has), LANES, TALL, **LAUNCH,
            )  # fmt: skip
    return tokens, logp_sampler, logp_processed


def _column(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def specialisations() -> Iterator[tuple[str, triton.JITFunction, dict, dict, dict]]:
    """Copies of the kernel: name, function, signature, constexprs, compile options.

    All, but of float16, which differs from bfloat16 in the load alone, only the largest.
    """
    known = {
        "uniform_ptr": "*fp64", "top_k_ptr": "*i64", "seen_ptr": "*u8", "token_ptr": "*i64"
    }  # fmt: skip
    for dtype in LOGITS.values():
        for filtered in (False, True):
            for penalised in (False, True):
                if dtype == "fp16" and not (filtered and penalised):
                    continue
                constexprs = {"FILTERED": filtered, "LANES": LANES, "TALL": TALL}
                if not penalised:
                    constexprs |= {"penalty_ptr": None, "seen_ptr": None}
                signature = {
                    name: "constexpr" if name in constexprs
                    else known.get(name, "*fp32" if name.endswith("_ptr") else "i32")
                    for name in sample_kernel.arg_names
                }  # fmt: skip
                signature["logits_ptr"] = f"*{dtype}"
                name = f"sample/{dtype}" + "/filtered" * filtered + "/penalised" * penalised
                yield name, sample_kernel, signature, constexprs, LAUNCH
