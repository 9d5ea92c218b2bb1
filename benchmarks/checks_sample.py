"""Tokens drawn from logits against the reference, every row with filters of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from .. import decode_ops
from ..kernels import reference_decode
from .harness import Case, Expected, Provider, Step

LOGP_TOLERANCE = 2e-5  # of float32 sums
UNDECIDED = 1e-5  # of probability; a number so near to where two tokens meet may be given to either
VOCABS, TINY_VOCABS = (7, 1000, 32003, 151936), (7, 203)
ROWS, TINY_ROWS = 32, 5


@dataclass(frozen=True)
class Check:
    """filtered: with filters and a penalty, of each row its own or off."""

    dtype: torch.dtype
    vocab: int
    filtered: bool

    @property
    def name(self) -> str:
        """As it is shown."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} V={self.vocab}{' filtered' * self.filtered}"


def checks(tiny: bool = False) -> list[Check]:
    """Rows of less than a tile, of several, and of the longest vocabularies."""
    return [
        Check(dtype, vocab, filtered)
        for vocab in (TINY_VOCABS if tiny else VOCABS)
        for dtype in (torch.float32, torch.bfloat16)
        for filtered in (False, True)
    ]


def cases(impl: str, device: torch.device, tiny: bool = False) -> list[Case]:
    """Each checks tokens and both log-probs."""
    found = []
    for check in checks(tiny):
        data = cache(partial(_data, check, TINY_ROWS if tiny else ROWS))
        found.append(
            Case(
                suite="check-sample",
                name=check.name,
                shape={},
                device=device,
                inputs=partial(_move, data, device),
                expected=partial(_expected, data),
                providers=(Provider(f"ours-{impl}", partial(_build, impl)),),
            )
        )
    return found


def _data(check: Check, rows: int) -> dict[str, Tensor]:
    """On the CPU."""
    generator = torch.Generator().manual_seed(check.vocab)
    rand = partial(torch.rand, generator=generator)

    def some(low: float, high: float, off: float) -> Tensor:
        return torch.where(rand(rows) < 0.3, off, low + (high - low) * rand(rows))

    vocab = check.vocab
    data = {
        "logits": (3 * torch.randn(rows, vocab, generator=generator)).to(check.dtype),
        "uniform": rand(rows, dtype=torch.float64),
        "temperature": some(0.5, 1.5, 0.0),
    }
    if check.filtered:
        data |= {
            "top_k": some(1, 1.3 * vocab, 0.0).long(),
            "top_p": some(0.1, 0.99, 1.0),
            "min_p": some(0.0, 0.2, 0.0),
            "repetition_penalty": some(0.6, 2.0, 1.0),
            "seen": rand(rows, vocab) < 0.3,
        }
    return data


def _move(data: Callable[[], dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in data().items()}


def _build(impl: str, data: dict[str, Tensor]) -> Step:
    return lambda: _named(decode_ops.sample_tokens(**data, impl=impl))


def _named(found: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip(("tokens", "logp_sampler", "logp_processed"), found, strict=True))


def _expected(data: Callable[[], dict[str, Tensor]]) -> dict[str, Expected]:
    """By the reference in float64, on the CPU, for the rows whose token is beyond doubt."""
    given = {name: x.double() if x.is_floating_point() else x for name, x in data().items()}

    def drawn(shift: float) -> dict[str, Tensor]:
        uniform = (given["uniform"] + shift).clamp(0, 1 - 1e-12)
        return _named(reference_decode.sample_tokens(**given | {"uniform": uniform}))

    truth, *others = map(drawn, (0.0, -UNDECIDED, UNDECIDED))
    sure = torch.stack([other["tokens"] == truth["tokens"] for other in others]).all(0)
    rows = sure.nonzero().squeeze(1)
    return {
        name: Expected(x[rows].double(), LOGP_TOLERANCE if name != "tokens" else 0.0, rows=rows)
        for name, x in truth.items()
    }
