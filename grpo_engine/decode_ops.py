"""The ops of decoding: here an implementation is chosen."""

import torch
from torch import Tensor

from . import checks
from .implementation import implementation, triton_module, triton_or_torch
from .kernels import reference_decode
from .kernels.reference_decode import DecodeTables

PAGE = 32  # tokens
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def page_size(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of a page that `group_decode` is best at: small ones waste little memory."""
    if device.type == "cuda" and triton_or_torch() == "triton":
        flash = triton_module("flash_decode")
        if flash.usable(device, dtype):
            return flash.FLASH_PAGE
    return PAGE


def group_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: DecodeTables,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """One decode step: writes the new keys and values into their pages, then attends.

    q: [W, H, d]; k, v: [W, H_kv, d]; k_pages, v_pages: [pages, page, H_kv, d], contiguous; all of
    one dtype: f32, bf16, f16 (f64 with impl="torch"). tables: contiguous, on the device of q; on
    the CPU the tensors are kept, and read anew in each call.
    scale, softcap > 0: of the scores; window >= 1: tokens that a slot sees, its own included.
    impl: auto | triton | cpp | torch; auto: on CUDA flash-attn where it is installed and serves
    the shape, else triton; cpp on the CPU; torch for float64.
    Returns [W, H, d]; 0 for idle slots, for which nothing is written. Without gradient.
    Raises ValueError that names the argument.
    Reference: kernels/reference_decode.py::group_decode.
    """
    chosen = implementation(impl, q)
    if chosen == "cpp":
        from .cpu_decode import group_decode as decode
    elif chosen == "torch":
        decode = reference_decode.group_decode
    else:
        flash = triton_module("flash_decode")
        serves = impl == "auto" and flash.serves(q, k_pages, tables, window)
        decode = flash.group_decode if serves else triton_module("group_attention").group_decode
    return decode(q, k, v, k_pages, v_pages, tables, scale, softcap, window)


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    seen: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, drawn by the inverse of the distribution function in token order.

    logits: [B, V] f32, bf16, f16 (f64 with impl="torch"); -inf: never drawn.
    uniform: [B] float in [0, 1); give float64, for float32 can round up to 1.
    temperature: [B] float, >= 0; 0 is greedy.
    top_k: [B] int, 0: off; top_p: [B] in (0, 1], 1: off; min_p: [B] in [0, 1], 0: off.
    repetition_penalty: [B] > 0, 1: off, for the tokens of the row that `seen` [B, V] bool marks.
    impl: auto | triton | cpp | torch; auto: triton on CUDA, cpp on the CPU, torch for float64.
    Returns tokens [B] int64, logp_sampler [B] f32 (tempered, before penalty and filters; at
    temperature 1 for greedy rows) and logp_processed [B] f32 (of what was drawn from; greedy: 0).
    A row with NaN or +inf, or only -inf, raises ValueError; with impl triton, which waits for
    nothing, its token is -1 and its log-probs are NaN. Else raises ValueError that names the
    argument (values are looked at only on the CPU).
    Reference: kernels/reference_decode.py::sample_tokens.
    """
    _check(logits, uniform, temperature, top_k, top_p, min_p, repetition_penalty, seen)
    return draw_tokens(
        logits, uniform, temperature, top_k, top_p, min_p, repetition_penalty, seen, impl
    )


def draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    seen: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_tokens` of arguments that are known to be right: a check costs as much as a draw."""
    impl = implementation(impl, logits)
    if impl == "cpp":
        from .cpu_sampling import sample_tokens as sample
    elif impl == "triton":
        sample = triton_module("sampling").sample_tokens
    else:
        sample = _sample_by_torch
    return sample(logits, uniform, temperature, top_k, top_p, min_p, repetition_penalty, seen)


def _sample_by_torch(logits: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if not len(logits):
        empty = logits.new_empty(0)
        return empty.long(), empty, empty
    bad = ~logits.amax(-1).isfinite()
    if bad.any():
        raise ValueError(
            "logits must be a distribution in every row; row "
            f"{int(bad.int().argmax())} has NaN or +inf, or only -inf"
        )
    return reference_decode.sample_tokens(logits, *rest)


def _check(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    repetition_penalty: Tensor | None,
    seen: Tensor | None,
) -> None:
    if checks.tensor("logits", logits).dim() != 2 or logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits must be float [B, V]; given {list(logits.shape)} {logits.dtype}")
    if len(logits) and logits.shape[1] < 1:
        raise ValueError(f"logits must have a token; given {list(logits.shape)}")
    if repetition_penalty is not None and seen is None:
        raise ValueError("seen must be given with repetition_penalty")
    if seen is not None:
        checks.same_shape("seen", checks.tensor("seen", seen), logits.shape)
        if seen.dtype != torch.bool:
            raise ValueError(f"seen must be bool; given {seen.dtype}")
    if top_k is not None and checks.tensor("top_k", top_k).is_floating_point():
        raise ValueError(f"top_k must be whole numbers; given {top_k.dtype}")
    ranges = {
        "uniform": (uniform, "from 0 to below 1", lambda x: (x >= 0) & (x < 1)),
        "temperature": (temperature, "finite and >= 0", lambda x: (x >= 0) & x.isfinite()),
        "top_k": (top_k, ">= 0", lambda x: x >= 0),
        "top_p": (top_p, "above 0, up to 1", lambda x: (x > 0) & (x <= 1)),
        "min_p": (min_p, "from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
        "repetition_penalty": (
            repetition_penalty,
            "finite and > 0",
            lambda x: (x > 0) & x.isfinite(),
        ),
    }
    for name, (x, range_, holds) in ranges.items():
        if x is None:
            continue
        checks.same_shape(name, checks.tensor(name, x), logits.shape[:1])
        if x.device.type == "cpu" and not holds(x).all():
            raise ValueError(f"{name} must be {range_}; given {x[~holds(x)][0].item()}")
