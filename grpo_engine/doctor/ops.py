"""Each op as `auto` runs it on a device, held against the reference on a small problem."""

import importlib
from collections.abc import Callable, Iterator
from importlib import metadata

import torch
from torch import Tensor

from ..decode_ops import group_decode, page_size, sample_tokens
from ..implementation import implementation
from ..kernels.options import GRPOOptions
from ..kernels.reference_decode import DecodeTables
from ..ops import grpo_loss, token_logprob
from ..rewards.load_function import describe
from .checks import FAIL, OK, Check

NEAR = 1e-4  # float32, sums in another order
TOKENS, WIDTH, VOCAB = 24, 16, 40
SAMPLES = (0, 4, 9, 20, TOKENS)
HEADS, KV_HEADS, DIM, PROMPT, OWN = 4, 2, 16, 5, 3

Op = Callable[[torch.device, str], Tensor]


def check_ops(device: torch.device) -> Iterator[Check]:
    """What `auto` takes for each op on tensors of this device, why, and how far it is off."""
    chosen = implementation("auto", torch.empty(0, device=device))
    reason = _reason(chosen, device)
    for name, op in OPS.items():
        told = _decode_reason(chosen, device) if name == "group_decode" else ""
        yield _check(name, op, device, f"{chosen}{told}; {reason}")


def _check(name: str, op: Op, device: torch.device, text: str) -> Check:
    try:
        found, expected = op(device, "auto"), op(device, "torch")
    except Exception as error:  # whatever a compiler or a driver says
        return Check(name, FAIL, f"{text}; {describe(error)}")
    gap = float((found - expected).abs().max())
    status = OK if gap <= NEAR else FAIL  # NaN is not
    return Check(name, status, f"{text}; off the reference by {gap:.0e}")


def _reason(chosen: str, device: torch.device) -> str:
    """Why it is none of the others."""
    if device.type == "cpu":
        return "triton needs a CUDA device"
    if chosen == "torch":
        return "triton is not installed, pip install 'grpo-engine[cuda]'; cpp is for CPU tensors"
    return "cpp is for CPU tensors"


def _decode_reason(chosen: str, device: torch.device) -> str:
    if chosen != "triton":
        return ""
    flash = importlib.import_module("grpo_engine.kernels.flash_decode")
    if flash.usable(device, torch.bfloat16):
        return " in float32, flash-attn in half precision where it serves the shape"
    try:
        there = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        there = "not installed"
    return f", not flash-attn ({there}): from {flash.FIRST} to below {flash.BEYOND}, sm_80 or later"


def _loss(device: torch.device, impl: str) -> Tensor:
    logp = _values(device, TOKENS).requires_grad_()
    old, ref = logp.detach() * 0.9, logp.detach() * 0.8
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)
    groups, seqlens = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 4], SAMPLES)
    )
    out = grpo_loss(
        logp, old, ref, rewards=rewards, cu_groups=groups, cu_seqlens=seqlens,
        options=GRPOOptions(beta=0.1), impl=impl,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return torch.cat([out.loss.detach()[None], gradient]).cpu()


def _logprob(device: torch.device, impl: str) -> Tensor:
    hidden = _values(device, TOKENS, WIDTH).requires_grad_()
    weight = _values(device, VOCAB, WIDTH)
    targets = torch.arange(TOKENS, device=device) % VOCAB
    logp, entropy = token_logprob(hidden, weight, targets, temperature=0.7, impl=impl)
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    return torch.cat([logp.detach(), entropy.detach(), gradient.flatten()]).cpu()


def _tokens(device: torch.device, impl: str) -> Tensor:
    logits, uniform = _values(device, TOKENS, VOCAB), (torch.arange(TOKENS) + 0.5) / TOKENS
    drawn = sample_tokens(
        logits,
        uniform.double().to(device),
        torch.full((TOKENS,), 0.8, device=device),
        top_p=torch.full((TOKENS,), 0.9, device=device),
        impl=impl,
    )
    return torch.cat([x.float().cpu() for x in drawn])


def _decode(device: torch.device, impl: str) -> Tensor:
    page = page_size(device, torch.float32)
    pages = _values(device, 4, page, KV_HEADS, DIM)
    q = _values(device, 2, HEADS, DIM)
    k, v = q[:, :KV_HEADS] * 0.5, q[:, KV_HEADS:] * 0.5
    # Two slots of one group: its prompt in page 0, their own tokens in pages 1 and 2.
    tables = [[0], [0]], [PROMPT, 0], [[1], [2]], [OWN, OWN - 1], [0, 0], [0, 1], [0, 2, 2]
    tables = DecodeTables(*(torch.tensor(x, dtype=torch.int32, device=device) for x in tables))
    return group_decode(q, k, v, pages, pages.clone(), tables, DIM**-0.5, impl=impl).cpu()


OPS: dict[str, Op] = {
    "grpo_loss": _loss,
    "token_logprob": _logprob,
    "sample_tokens": _tokens,
    "group_decode": _decode,
}


def _values(device: torch.device, *shape: int) -> Tensor:
    """Float32 numbers between -1 and 1 that look like noise."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) ** 2 * 0.37 + 0.1).view(shape).to(device)
