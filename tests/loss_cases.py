"""Cases of the group loss for any implementation, and what the reference says of them in float64.

A case is the dict of arguments of `grpo_loss`, in float32. Small and ragged, with an empty
completion and log-ratios beyond both clips.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np
import torch
from torch import Tensor

from grpo_engine.kernels import reference
from grpo_engine.kernels.options import GRPOOptions
from grpo_engine.kernels.reference import LossOutput
from loss_names import CLIPPED
from loss_names import LOSSES as NAMES

LOSSES = [
    *((loss, "token") for loss in NAMES),
    *((loss, "sequence") for loss in CLIPPED),
]
# One of each path through a kernel: five terms, with and without a mean over a sample's tokens.
PATHS = [
    ("grpo", "token"),
    ("dapo", "sequence"),
    ("cispo", "token"),
    ("sapo", "token"),
    ("vespo", "token"),
]
KLS = [None, *product(["k1", "k2", "k3"], [False, True])]

LENGTHS = [6, 0, 9, 5]
ADVANTAGES = [0.9, 1.0, -1.1, 0.6]
DRIFT = [-0.45, 0.0, 0.5, -0.2]  # of old from logp, a sample


@dataclass(frozen=True)
class Outcome:
    """What a loss gave: a number, d loss / d logp, and numbers."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def make_options(
    loss: str, level: str = "token", kl: tuple[str, bool] | None = None, **changes: object
) -> GRPOOptions:
    """Options that are legal for the loss; `kl`: estimator and bias correction, None: no KL."""
    fields = {"loss_type": loss, "importance_sampling_level": level, "beta": 0.0}
    fields["epsilon_high"] = 1.3 if loss == "cispo" else 0.25
    fields["max_completion_length"] = 9 if loss == "dr_grpo" else None
    if kl is not None:
        fields |= {"beta": 0.3, "kl_estimator": kl[0], "use_bias_correction_kl": kl[1]}
    return GRPOOptions(**{**fields, **changes})


def make_case(
    options: GRPOOptions,
    lengths: Sequence[int] = LENGTHS,
    drift: Sequence[float] | float = DRIFT,
    noise: float = 0.3,
    seed: int = 0,
    importance: bool = False,
    masked: bool = True,
    **changes: object,
) -> dict:
    """Packed arguments of `grpo_loss`; ADVANTAGES unless `changes` brings a credit."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    logp = -rng.gamma(2.0, 0.7, n)
    drift = drift if isinstance(drift, float) else np.repeat(drift, lengths)
    arrays = {
        "logp": logp,
        "old_logp": logp + drift + rng.normal(0, noise, n),
        "ref_logp": logp + rng.normal(0, 0.5, n),
        "importance_ratio": rng.uniform(0.6, 1.4, n),
    }
    if not importance:
        del arrays["importance_ratio"]
    if options.beta == 0:
        arrays["ref_logp"] = np.full(n, np.nan)  # given, but not to be read
    case = {name: torch.tensor(x, dtype=torch.float32) for name, x in arrays.items()}
    case |= {"options": options, "cu_seqlens": offsets(lengths)}
    counts = torch.tensor(rng.random(n) < 0.8)
    if masked:
        case["mask"] = counts
    if not {"advantages", "rewards"} & changes.keys():
        case["advantages"] = torch.tensor(ADVANTAGES)
    return case | changes


def offsets(sizes: Sequence[int]) -> Tensor:
    """[len + 1] int32."""
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def padded(case: dict, garbage: float = 0.0, width: int | None = None) -> dict:
    """The same case as [S, T], `garbage` in the padding of every tensor."""
    cu = case["cu_seqlens"].tolist()
    lengths = np.diff(cu)
    width = max(lengths, default=0) if width is None else width
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    per_token = {name for name, x in case.items() if is_per_token(name, x, cu[-1])}
    mask = case.get("mask", torch.ones(cu[-1], dtype=torch.bool))
    wide = {}
    for name, x in {**case, "mask": mask}.items():
        if name in per_token | {"mask"}:
            wide[name] = torch.full(inside.shape, garbage if x.is_floating_point() else 0).to(x)
            wide[name][inside] = x
        elif name != "cu_seqlens":
            wide[name] = x
    return wide


def is_per_token(name: str, x: object, n_tokens: int) -> bool:
    """Whether an argument of a packed case holds a value a token."""
    names = ("logp", "old_logp", "ref_logp", "importance_ratio", "advantages", "mask")
    return name in names and x is not None and x.shape == (n_tokens,)


def outcome(op: Callable[..., LossOutput], case: dict, upstream: float = 1.0) -> Outcome:
    """Value, gradient and metrics of one implementation."""
    logp = case["logp"].clone().requires_grad_()
    out = op(**{"old_logp": None, "ref_logp": None, **case, "logp": logp})
    (out.loss * upstream).backward()
    return Outcome(out.loss.item(), logp.grad, {k: float(v) for k, v in out.metrics.items()})


def expected(case: dict, upstream: float = 1.0) -> Outcome:
    """The reference in float64."""
    exact = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in case.items()
    }
    return outcome(reference.grpo_loss, exact, upstream)


def assert_same(out: Outcome, truth: Outcome) -> None:
    """float32 against float64: what is exactly zero, or a count, must be so exactly."""
    np.testing.assert_allclose(out.loss, truth.loss, rtol=2e-6, atol=1e-6)
    got, want = out.gradient.double(), truth.gradient
    scale = want.nan_to_num().abs().max().item() if want.numel() else 0.0
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6 * scale)
    assert (got[want == 0] == 0).all()
    assert out.metrics.keys() == truth.metrics.keys()
    for name, value in truth.metrics.items():
        exact = name in ("tokens", "samples", "nonfinite")
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-6, "atol": 1e-6}
        np.testing.assert_allclose(out.metrics[name], value, err_msg=name, **tolerance)
