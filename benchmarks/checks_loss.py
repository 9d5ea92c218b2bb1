"""grpo_loss of one implementation against the reference, on small hard inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..kernels import reference
from ..kernels.options import CLIPPED_LOSSES, GRPOOptions, LossType
from .harness import Case, Expected, Provider, Step

GROUPS = (1, 2, 7, 16, 3)  # samples of a group
LENGTHS = (0, 1, 127, 128, 129, 40, 1000, 4097)  # tokens of a sample, in turn
TINY_GROUPS, TINY_LENGTHS = (1, 2, 4), (0, 1, 17, 33)
# Float32 against float64; a vespo weight is the exponential of a sum over a sample.
LOSS_TOLERANCE, GRADIENT_TOLERANCE, METRIC_TOLERANCE = 2e-5, 2e-5, 1e-4
CAP, DELTA = 1.4, 2.0
BOUNDS = (0.8, 1.2, CAP, DELTA)  # of the ratio, where a term jumps


@dataclass(frozen=True)
class Check:
    """Options and what else the op is given.

    layout: packed | padded. credit: rewards | sample | token (advantages of one).
    extras: of no_old, importance, normalizer, flags, mask, all_masked.
    """

    name: str
    options: GRPOOptions
    layout: str = "packed"
    credit: str = "rewards"
    extras: tuple[str, ...] = ()


def cases(impl: str, device: torch.device, tiny: bool = False) -> list[Case]:
    """Each checks loss, gradient and metrics of one combination."""
    data = cache(partial(_data, *((TINY_GROUPS, TINY_LENGTHS) if tiny else (GROUPS, LENGTHS))))
    return [
        Case(
            suite="check-loss",
            name=check.name,
            shape={},
            device=device,
            inputs=partial(_arguments, check, data, torch.float32, device),
            expected=lambda check=check: _expected(check, data),
            providers=(Provider(f"ours-{impl}", partial(_build, impl)),),
        )
        for check in checks()
    ]


def checks() -> list[Check]:
    """All loss types and levels, the KL estimators, and every option at least once."""
    needs = {"cispo": {"epsilon_high": CAP}, "dr_grpo": {"max_completion_length": 512}}
    found = []
    for kind in LossType.__args__:
        for level in ("token", "sequence") if kind in CLIPPED_LOSSES else ("token",):
            options = GRPOOptions(
                loss_type=kind, importance_sampling_level=level, **needs.get(kind, {})
            )
            found.append(Check(f"{kind} {level}", options))
            extras = ("mask", "importance")
            found.append(Check(f"{kind} {level} padded", options, "padded", "sample", extras))
    for level, kl, corrected in product(("token", "sequence"), ("k1", "k2", "k3"), (False, True)):
        options = GRPOOptions(
            importance_sampling_level=level, kl_estimator=kl, use_bias_correction_kl=corrected
        )
        name = f"{level} {kl}{' corrected' * corrected}"
        found.append(Check(name, options, "padded" if kl == "k2" else "packed", extras=("mask",)))
    for changes in (
        {"beta": 0.0},
        {"delta": DELTA},
        {"baseline": "median"},
        {"baseline": "loo", "ddof": 1, "advantage_clip": None},
        {"scale_rewards": "batch", "min_std": 0.5},
        {"scale_rewards": "none", "advantage_clip": 0.3},
    ):
        name = " ".join(f"{key}={value}" for key, value in changes.items())
        found.append(Check(name, GRPOOptions(**changes), extras=("flags",)))
    default = GRPOOptions()
    found.append(Check("on-policy", default, extras=("no_old", "normalizer")))
    found.append(Check("token advantages", default, credit="token", extras=("importance",)))
    found.append(Check("all masked", default, "padded", extras=("all_masked",)))
    return found


def _data(groups: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Packed float32 tensors on the CPU; ratios on both sides of the bounds, none near one."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    samples = sum(groups)
    length = torch.tensor([lengths[i % len(lengths)] for i in range(samples)])
    n = int(length.sum())
    logp = -normal(n).abs()
    shift = torch.tensor([(-0.5, 0.0, 0.5)[i % 3] for i in range(samples)])
    log_ratio = shift.repeat_interleave(length) + 0.05 * normal(n)
    near = torch.stack([(log_ratio.exp() - bound).abs() < 1e-3 for bound in BOUNDS]).any(0)
    rewards = normal(samples)
    first = groups[0] + groups[1]
    rewards[groups[0] : first] = 0.1  # a group without signal
    rewards[-1] = torch.nan
    counted = torch.rand(n, generator=generator) < 0.8
    return {
        "length": length,
        "cu_groups": _offsets(torch.tensor(groups)),
        "cu_seqlens": _offsets(length),
        "logp": logp,
        "old": logp - torch.where(near, 0.0, log_ratio),
        "ref": logp + 0.3 * normal(n),
        "importance": torch.rand(n, generator=generator) + 0.5,
        "rewards": rewards,
        "sample": normal(samples),
        "token": normal(n),
        "counted": counted,
        "valid": torch.arange(samples) % 5 != 1,
        "in_loss": torch.arange(samples) % 4 != 2,
    }


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0))).int()


def _arguments(check: Check, data: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Of grpo_loss; what does not count is NaN."""
    d, extras, options = data(), check.extras, check.options
    token_mask = torch.zeros_like(d["counted"]) if "all_masked" in extras else d["counted"]
    masked = "mask" in extras or "all_masked" in extras

    def token(x: Tensor | None, fill: float = torch.nan) -> Tensor | None:
        if x is None:
            return None
        if masked and x is not token_mask:
            x = torch.where(token_mask, x, fill)
        if check.layout == "packed":
            return x.to(device)
        rows = x.split(d["length"].tolist())
        return torch.nn.utils.rnn.pad_sequence(rows, True, fill).to(device)

    def real(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    arguments = {
        "logp": real(token(d["logp"])),
        "old_logp": None if "no_old" in extras else real(token(d["old"], -torch.inf)),
        "ref_logp": real(token(d["ref"])) if options.beta else None,
        "options": options,
        "cu_seqlens": d["cu_seqlens"].to(device) if check.layout == "packed" else None,
        "importance_ratio": real(token(d["importance"])) if "importance" in extras else None,
        "normalizer": 37.0 if "normalizer" in extras else None,
    }
    if masked:
        arguments["mask"] = token(token_mask, 0.0)
    elif check.layout == "padded":
        arguments["mask"] = token(torch.ones_like(token_mask), 0.0)
    if check.credit == "rewards":
        arguments |= {"rewards": real(d["rewards"].to(device))}
        arguments |= {"cu_groups": d["cu_groups"].to(device)}
    else:
        credit = d["sample"].to(device) if check.credit == "sample" else token(d["token"])
        arguments["advantages"] = real(credit)
    if "flags" in extras:
        arguments |= {name: d[name].to(device) for name in ("valid", "in_loss")}
    return arguments


def _build(impl: str, arguments: Mapping[str, Any]) -> Step:
    return lambda: _outputs(partial(ops.grpo_loss, impl=impl), arguments)


def _outputs(loss: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    given = dict(arguments)
    logp = given.pop("logp").detach().requires_grad_()
    old, ref = given.pop("old_logp"), given.pop("ref_logp")
    out = loss(logp, old, ref, **given)
    metrics = torch.stack([out.metrics[name].double() for name in sorted(out.metrics)])
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return {"loss": out.loss, "gradient": gradient, "metrics": metrics}


def _expected(check: Check, data: Any) -> dict[str, Expected]:
    """By the reference in float64, on the CPU."""
    arguments = _arguments(check, data, torch.float64, torch.device("cpu"))
    out = _outputs(reference.grpo_loss, arguments)
    loss, gradient, metrics = (out[name].detach() for name in ("loss", "gradient", "metrics"))
    gradient = gradient.reshape(-1)
    largest = gradient.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "loss": Expected(loss, LOSS_TOLERANCE, loss.abs().clamp(min=1)),
        "gradient": Expected(gradient, GRADIENT_TOLERANCE, largest),
        "metrics": Expected(metrics, METRIC_TOLERANCE, metrics.abs().clamp(min=1)),
    }
