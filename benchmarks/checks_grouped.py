"""Attention of packed groups, forward and backward, against the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import grouped_attention, reference_decode
from ..kernels.group_layout import GroupLayout
from .harness import Case, Expected, Provider, Step

# Of a row's norm. Half precision rounds the weights of a softmax and what comes out; the backward
# takes the difference of two that are as large, one of them from the rounded output.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
PACKING = [300, 1, 517], [[40, 200, 1], [3], [129, 64, 300, 7]]
TINY_PACKING = [20, 1, 33], [[4, 0, 18], [3], []]


@dataclass(frozen=True)
class Check:
    """Attention of some heads of dim d."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    d: int
    softcap: float | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        """As it is shown."""
        options = (f"{x}={getattr(self, x)}" for x in ("softcap", "window") if getattr(self, x))
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join((dtype, f"{self.heads}/{self.kv_heads}", f"d={self.d}", *options))

    @property
    def options(self) -> dict[str, Any]:
        """Of the op."""
        return {"scale": self.d**-0.5, "softcap": self.softcap, "window": self.window}


def checks() -> list[Check]:
    """By flash kernels and by blocks of scores; heads that share keys and heads that don't."""
    return [
        Check(torch.bfloat16, 14, 2, 64),
        Check(torch.float16, 8, 8, 128),
        Check(torch.bfloat16, 8, 4, 256, softcap=5.0),
        Check(torch.bfloat16, 8, 2, 128, window=23),
        Check(torch.float32, 8, 2, 128),
        Check(torch.float32, 8, 1, 80, softcap=5.0, window=23),
    ]


def cases(impl: str, device: torch.device, tiny: bool = False) -> list[Case]:
    """Each checks the output and all gradients. There is one implementation, whatever `impl`."""
    packing = TINY_PACKING if tiny else PACKING
    found = []
    for check in checks():
        data = cache(partial(_data, check, packing))
        found.append(
            Case(
                suite="check-grouped",
                name=check.name,
                shape={},
                device=device,
                inputs=partial(_move, data, device),
                expected=partial(_expected, check, packing, data),
                providers=(Provider("ours", partial(_build, check, packing)),),
            )
        )
    return found


def _data(check: Check, packing: Any) -> dict[str, Tensor]:
    """On the CPU."""
    prompts, completions = packing
    tokens = sum(prompts) + sum(map(sum, completions))
    generator = torch.Generator().manual_seed(check.d)
    heads = {"q": check.heads, "k": check.kv_heads, "v": check.kv_heads, "upstream": check.heads}
    return {
        name: torch.randn(tokens, count, check.d, generator=generator).to(check.dtype)
        for name, count in heads.items()
    }


def _move(data: Callable[[], dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in data().items()}


def _build(check: Check, packing: Any, data: dict[str, Tensor]) -> Step:
    layout = GroupLayout.make(*packing, data["q"].device)
    attend = partial(grouped_attention.grouped_attention, layout=layout, **check.options)
    return partial(_outputs, attend, data)


def _outputs(attend: Callable[..., Tensor], data: dict[str, Tensor]) -> dict[str, Tensor]:
    q, k, v = (data[name].detach().requires_grad_() for name in "qkv")
    out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), data["upstream"])
    return {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def _expected(
    check: Check, packing: Any, data: Callable[[], dict[str, Tensor]]
) -> dict[str, Expected]:
    """By the reference in float64, on the CPU."""
    prompts, completions = packing
    given = {"prompt_len": prompts, "completion_len": completions, **check.options}
    exact = {name: x.double() for name, x in data().items()}
    found = {}
    attend = partial(reference_decode.grouped_attention, **given)
    for name, x in _outputs(attend, exact).items():
        x = x.detach().flatten(0, 1)
        norm = x.norm(dim=-1)
        tolerance = (TOLERANCE if name == "out" else GRADIENT_TOLERANCE)[check.dtype]
        # Small rows on the scale of the others: what adds up to them cancels.
        found[name] = Expected(x, tolerance, norm.clamp(min=norm.mean()))
    return found
