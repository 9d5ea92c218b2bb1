"""The head of one implementation against the reference, on small hard inputs."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..kernels import reference
from ..kernels.options import GRPOOptions
from .harness import Case, Expected, Provider, Step

MODES = ("no-gradient", "frozen", "trainable", "loss-frozen", "loss-trainable")
DTYPES = (torch.float32, torch.bfloat16)
VOCABS, TINY_VOCABS = (7, 1000, 32003, 151936), (7, 203)
ALL_MODES_AT = {7, 203, 1000}
HIDDEN, SAMPLES = 64, 8
TOKENS, TINY_TOKENS = 96, 16
TILES = 3
OPTIONS = GRPOOptions()
# Logits are float32 sums; the 5e-3 is the contract of the head for half precision.
LOGP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
# Of a row of a gradient: half precision rounds it, and 1 - p loses digits where p is near 1.
ROW_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Check:
    """adorned: with bias, a temperature a row, softcap and logit scale."""

    mode: str
    dtype: torch.dtype
    vocab: int
    adorned: bool
    tokens: int

    @property
    def name(self) -> str:
        """As it is shown."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mode} {dtype} V={self.vocab}{' adorned' * self.adorned}"


def cases(impl: str, device: torch.device, tiny: bool = False) -> list[Case]:
    """Each checks log-probs, or a loss, and all gradients of one combination."""
    found = []
    for check in checks(tiny):
        data = cache(partial(_data, check))
        found.append(
            Case(
                suite="check-head",
                name=check.name,
                shape={},
                device=device,
                inputs=partial(_move, data, device),
                expected=partial(_expected, check, data),
                providers=(Provider(f"ours-{impl}", partial(_build, impl, check)),),
            )
        )
    return found


def checks(tiny: bool = False) -> list[Check]:
    """All modes at small vocabularies, gradients at the large ones; no case without its dtypes."""
    tokens = TINY_TOKENS if tiny else TOKENS
    return [
        Check(mode, dtype, vocab, adorned, tokens)
        for vocab in (TINY_VOCABS if tiny else VOCABS)
        for adorned in (False, True)
        for mode in MODES
        for dtype in DTYPES
        if vocab in ALL_MODES_AT or (mode in ("frozen", "trainable") and not adorned)
    ]


def _data(check: Check) -> dict[str, Any]:
    """On the CPU. The second half of the rows is nearly sure of its target."""
    generator = torch.Generator().manual_seed(check.vocab)
    normal = partial(torch.randn, generator=generator)
    n, v = check.tokens, check.vocab
    weight = (normal(v, HIDDEN) * 2 / HIDDEN**0.5).to(check.dtype)
    targets = torch.randint(v, (n,), generator=generator)
    half = n // 2
    hidden = normal(n, HIDDEN)
    hidden[half:] = torch.linspace(2, 4, n - half)[:, None] * weight[targets[half:]].float()
    length = torch.tensor([0, *[n // (SAMPLES - 1)] * (SAMPLES - 2)])
    cu_seqlens = torch.cat((torch.zeros(1), length.cumsum(0), torch.tensor([n]))).int()
    adorned = {
        "bias": normal(v),
        "temperature": torch.rand(n, generator=generator) + 0.5,
        "softcap": 20.0,
        "logit_scale": 0.9,
    }
    data = {
        "hidden": hidden.to(check.dtype),
        "weight": weight,
        "targets": targets,
        "head": adorned if check.adorned else {},
        "upstream": normal(n),
        "rewards": normal(SAMPLES),
        "cu_groups": torch.tensor([0, 5, SAMPLES], dtype=torch.int32),
        "cu_seqlens": cu_seqlens,
    }
    logp, _ = reference.token_logprob(*_exact(data), **_exact_head(data))
    # Ratios within the clip range or far outside, as in head_problem.py.
    outside, uniform = torch.arange(n) % 4 == 0, torch.rand(n, generator=generator) - 0.5
    data["old"] = logp.float() - torch.where(outside, uniform.sign() / 2, uniform / 10)
    data["ref"] = logp.float() + normal(n) / 5
    return data


def _exact(data: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return data["hidden"].double(), data["weight"].double(), data["targets"]


def _exact_head(data: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if isinstance(x, Tensor) else x for k, x in data["head"].items()}


def _move(data: Any, device: torch.device) -> dict[str, Any]:
    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    moved = {name: move(x) for name, x in data().items()}
    moved["head"] = {name: move(x) for name, x in moved["head"].items()}
    return moved


def _build(impl: str, check: Check, data: dict[str, Any]) -> Step:
    itemsize = 4 if data["hidden"].is_cuda else data["hidden"].element_size()
    tile_bytes = max(1, check.tokens * check.vocab * itemsize // TILES)
    options = {"tile_bytes": tile_bytes, "impl": impl}
    return lambda: _outputs(
        check,
        data,
        (data["hidden"], data["weight"], data["targets"]),
        data["head"],
        partial(ops.token_logprob, **options),
        partial(ops.linear_grpo_loss, **options),
    )


def _expected(check: Check, data: Any) -> dict[str, Expected]:
    """By the reference in float64, on the CPU."""

    def linear(hidden, weight, targets, old, ref, *, head, **given):
        logp, _ = reference.token_logprob(hidden, weight, targets, **head)
        return reference.grpo_loss(logp, old, ref, **given)

    d = data()
    wide = d | {name: d[name].double() for name in ("old", "ref", "rewards", "upstream")}
    out = _outputs(
        check,
        wide,
        _exact(d),
        _exact_head(d),
        reference.token_logprob,
        lambda *args, **given: linear(
            *args,
            head={name: given.pop(name) for name in d["head"]},
            **given,
        ),
    )
    logp, row = LOGP_TOLERANCE[check.dtype], ROW_TOLERANCE[check.dtype]
    found = {}
    for name, x in out.items():
        x = x.detach()
        if not name.endswith("gradient"):
            found[name] = Expected(x, logp)
            continue
        norm = x.norm(dim=-1) if x.dim() > 1 else x.abs()
        # Rows of dH on their own, however small; sums over rows on the scale of the others.
        least = 0.01 * norm.mean() if name == "hidden_gradient" else norm.mean()
        found[name] = Expected(x, row, norm.clamp(min=least))
    return found


def _outputs(
    check: Check,
    data: dict[str, Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    head: dict[str, Any],
    token_logprob: Any,
    linear_grpo_loss: Any,
) -> dict[str, Tensor]:
    trainable, with_loss = check.mode.endswith("trainable"), check.mode.startswith("loss")
    hidden, weight = (x.detach().requires_grad_() for x in tensors[:2])
    weight.requires_grad_(trainable)
    leaves = {"hidden_gradient": hidden}
    if trainable:
        leaves["weight_gradient"] = weight
        if "bias" in head:
            head = head | {"bias": head["bias"].detach().requires_grad_()}
            leaves["bias_gradient"] = head["bias"]
    given = (hidden, weight, tensors[2])
    if with_loss:
        names = ("rewards", "cu_groups", "cu_seqlens")
        out = linear_grpo_loss(
            *given,
            data["old"],
            data["ref"],
            options=OPTIONS,
            **{name: data[name] for name in names},
            **head,
        )
        value, found = out.loss, {"loss": out.loss}
    else:
        with torch.set_grad_enabled(check.mode != "no-gradient"):
            logp, entropy = token_logprob(*given, **head)
        value, found = logp @ data["upstream"], {"logp": logp, "entropy": entropy}
    if check.mode != "no-gradient":
        gradients = torch.autograd.grad(value, list(leaves.values()))
        found |= dict(zip(leaves, gradients, strict=True))
    return found
