"""Sampling by numpy in float64, and the implementations that are held against it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from grpo_engine import _C
from grpo_engine.decode_ops import sample_tokens

ISAS = ["plain", "avx2", "avx512"]
ISAS = ISAS[: ISAS.index(_C.best_isa()) + 1]
IMPLEMENTATIONS = ["torch", *(f"cpp {isa}" for isa in ISAS)]
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
NEAR = 1e-6  # of probability; a number so near to where two tokens meet may be given to either


@contextlib.contextmanager
def implementation(name: str) -> Iterator[Callable]:
    """sample_tokens by "torch", "triton" or "cpp" with an instruction set."""
    impl, _, isa = name.partition(" ")
    if isa:
        _C.use_isa(isa)
    yield functools.partial(sample_tokens, impl=impl)
    _C.use_isa(_C.best_isa())


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - z.max() - math.log(np.exp(z - z.max()).sum())


def processed_row(
    logits: np.ndarray,
    temperature: float,
    seen: np.ndarray | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The log-probs of one row [V] as they are, tempered, and the probabilities drawn from."""
    z = logits.astype(np.float64)
    plain = log_softmax(z / (temperature or 1.0))
    if seen is not None:
        z[seen] = np.where(z > 0, z / repetition_penalty, z * repetition_penalty)[seen]
    p = np.zeros(len(z))
    if temperature == 0:
        p[z.argmax()] = 1
        return plain, p
    ranked = np.argsort(-z, kind="stable")
    p = np.exp(log_softmax(z / temperature))[ranked]
    p[p < min_p * p[0]] = 0
    p[top_k or len(p) :] = 0
    p /= p.sum()
    if top_p < 1:
        p[np.cumsum(p) - p >= top_p] = 0
    return plain, (p / p.sum())[np.argsort(ranked)]


def assert_row(drawn: list, uniform: float, plain: np.ndarray, p: np.ndarray, atol: float) -> None:
    """drawn: token, logp_sampler and logp_processed of one row."""
    token, logp_sampler, logp_processed = drawn
    cdf = np.cumsum(p)
    before = cdf[token] - p[token]
    assert p[token] > 0, f"{token} has probability 0"
    assert before - NEAR <= uniform * cdf[-1] <= cdf[token] + NEAR, (token, before, cdf[token])
    assert abs(logp_sampler - plain[token]) < atol
    assert abs(logp_processed - math.log(p[token])) < atol


def assert_rows(
    result: tuple,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    seen: torch.Tensor | None = None,
    atol: float = 5e-6,
    **filters: torch.Tensor,
) -> None:
    """Every row of a call against numpy."""
    columns = {name: x.tolist() for name, x in filters.items()}
    rows = zip(*(x.tolist() for x in result), strict=True)
    for i, drawn in enumerate(rows):
        own = {name: x[i] for name, x in columns.items()}
        marked = None if seen is None else seen[i].numpy()
        z, t = logits[i].float().numpy(), temperature[i].item()
        assert_row(drawn, uniform[i].item(), *processed_row(z, t, marked, **own), atol)


def mixed_rows(rows: int, vocab: int, seed: int = 0, std: float = 2.0) -> dict:
    """Arguments of sample_tokens; every row has its own temperature and filters, some off."""
    g = torch.Generator().manual_seed(seed)

    def some(low: float, high: float, off: float) -> torch.Tensor:
        x = low + (high - low) * torch.rand(rows, generator=g)
        return torch.where(torch.rand(rows, generator=g) < 0.3, off, x)

    return {
        "logits": std * torch.randn(rows, vocab, generator=g),
        "uniform": torch.rand(rows, generator=g, dtype=torch.float64),
        "temperature": some(0.3, 2.0, 0.0),
        "top_k": some(1, 1.3 * vocab + 1, 0.0).long(),
        "top_p": some(0.1, 0.99, 1.0),
        "min_p": some(0.0, 0.4, 0.0),
        "repetition_penalty": some(0.6, 2.5, 1.0),
        "seen": torch.rand(rows, vocab, generator=g) < 0.3,
    }
