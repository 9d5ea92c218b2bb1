"""The loss over given log-probs, forward and backward, float32: `grpo bench --suite loss`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from torch import Tensor

from .. import ops
from ..kernels import reference
from ..kernels.options import GRPOOptions
from . import machine, peers
from .harness import Case, Expected, Provider, Step
from .ours import implementations

OPTIONS = GRPOOptions(beta=0.04)
# Sums of float32 terms against float64: the loss is off by 1e-7 or so, a gradient by a few ulps.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True)
class Shape:
    """Samples in groups of `group`, each of `length` tokens, all of them counted."""

    samples: int
    length: int
    group: int = 8

    def __post_init__(self) -> None:
        if self.samples % self.group:
            raise ValueError(f"samples must be a multiple of {self.group}, the size of a group")


SHAPES = {"small": Shape(16, 24), "full": Shape(512, 512), "cuda": Shape(4096, 4096)}


class Problem:
    """Seeded inputs, padded [S, T] and packed [N], and the float64 reference of the result."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        samples, length = shape.samples, shape.length
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        self.logp = -normal(samples, length).abs()
        log_ratio = 0.1 * normal(samples, length)
        ratio = log_ratio.exp()
        # Within rounding of a clip bound float32 and float64 would differ by a whole term.
        near = (ratio - 1).abs().sub(OPTIONS.epsilon).abs() < 1e-4
        self.old = self.logp - torch.where(near, 0.0, log_ratio)
        self.ref = self.logp + 0.2 * normal(samples, length)
        self.rewards = normal(samples)
        int32 = {"dtype": torch.int32, "device": device}
        self.cu_groups = torch.arange(0, samples + 1, shape.group, **int32)
        self.cu_seqlens = torch.arange(0, samples * length + 1, length, **int32)
        self.mask = torch.ones(samples, length, dtype=torch.bool, device=device)
        self.advantages, _ = reference.group_advantages(self.rewards, self.cu_groups, None, OPTIONS)
        self.packed = tuple(x.view(-1) for x in (self.logp, self.old, self.ref))

    def expected(self) -> dict[str, Expected]:
        """Loss and gradient [N] by kernels/reference.py in float64."""
        logp, old, ref = (x.double() for x in (self.logp, self.old, self.ref))
        logp.requires_grad_()
        out = reference.grpo_loss(
            logp, old, ref, options=OPTIONS, advantages=self.advantages.double(), mask=self.mask
        )
        gradient = torch.autograd.grad(out.loss, logp)[0].view(-1)
        return {
            "loss": Expected(out.loss.detach(), LOSS_TOLERANCE),
            "gradient": Expected(gradient, GRADIENT_TOLERANCE, scale=gradient.abs().max()),
        }


def cases(shape: Shape, device: torch.device, quick: bool = False) -> list[Case]:
    """One case: every provider gets the same tokens, ours packed with rewards or padded."""
    # A token: logp, old and ref are read, dlogp is written, 4 B each. A sample: its reward and its
    # token offset are read; a group: its sample offset.
    tokens, groups = shape.samples * shape.length, shape.samples // shape.group
    nbytes = 16 * tokens + 4 * shape.samples + 4 * (shape.samples + 1) + 4 * (groups + 1)
    problem = cache(lambda: Problem(shape, device))
    return [
        Case(
            suite="loss",
            name="grpo",
            shape=asdict(shape),
            device=device,
            inputs=problem,
            expected=lambda: problem().expected(),
            providers=(*_ours(device), *_peers()),
            work=nbytes,
            rate_unit="GB/s",
            machine_rate=lambda: machine.copy_rate(nbytes, device),
        )
    ]


def _ours(device: torch.device) -> list[Provider]:
    available = implementations(device)
    return [
        *(Provider(f"ours-{i}-packed", partial(_packed, i), **x) for i, x in available.items()),
        *(Provider(f"ours-{i}-padded", partial(_padded, i), **x) for i, x in available.items()),
        *(Provider("ours-cpp-bare", _bare, **x) for i, x in available.items() if i == "cpp"),
    ]


def _peers() -> list[Provider]:
    return [
        Provider("eager", partial(_peer, peers.eager_loss)),
        Provider("compiled", _compiled, compiles=True),
        Provider("trl", _trl),
        Provider("empty-function", _empty, floor=True, share=0.0),
    ]


def _packed(impl: str, problem: Problem) -> Step:
    """The statistics of the groups are part of the call."""
    logp, old, ref = problem.packed

    def loss(logp: Tensor) -> Tensor:
        out = ops.grpo_loss(
            logp,
            old,
            ref,
            rewards=problem.rewards,
            cu_groups=problem.cu_groups,
            cu_seqlens=problem.cu_seqlens,
            options=OPTIONS,
            impl=impl,
        )
        return out.loss

    return _forward_backward(loss, logp)


def _padded(impl: str, problem: Problem) -> Step:
    """What the peers get: advantages and a mask."""

    def loss(logp: Tensor) -> Tensor:
        out = ops.grpo_loss(
            logp,
            problem.old,
            problem.ref,
            advantages=problem.advantages,
            mask=problem.mask,
            options=OPTIONS,
            impl=impl,
        )
        return out.loss

    return _forward_backward(loss, problem.logp)


def _bare(problem: Problem) -> Step:
    """The C++ kernel on arrays: no checks of arguments, no autograd."""
    from .. import _C

    given = (*problem.packed, problem.advantages, problem.cu_seqlens)
    logp, old, ref, advantages, cu_seqlens = (x.numpy() for x in given)
    options, gradient = _C.LossOptions(OPTIONS), torch.empty_like(problem.packed[0])
    rest = (len(problem.rewards), *[None] * 5, options, gradient.numpy())

    def step() -> dict[str, Tensor]:
        loss, *_ = _C.group_loss(logp, old, ref, None, None, advantages, cu_seqlens, *rest)
        return {"loss": torch.tensor(loss), "gradient": gradient}

    return step


def _peer(loss: Callable[..., Tensor], problem: Problem, mask: Tensor | None = None) -> Step:
    mask = problem.mask if mask is None else mask
    return _forward_backward(
        lambda logp: loss(logp, problem.old, problem.ref, problem.advantages, mask, OPTIONS),
        problem.logp,
    )


def _compiled(problem: Problem) -> Step:
    return _peer(torch.compile(peers.eager_loss, fullgraph=True, dynamic=False), problem)


def _trl(problem: Problem) -> Step:
    """All of TRL's own method, metrics included; it keeps its mask as int64."""
    return _peer(peers.trl_eager_loss, problem, problem.mask.long())


def _empty(problem: Problem) -> Step:
    """What autograd itself costs around any loss that already knows its gradient."""
    gradient = torch.zeros_like(problem.logp)

    class EmptyFn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logp: Tensor) -> Tensor:
            return logp.new_zeros(())

        @staticmethod
        def backward(ctx, upstream: Tensor) -> Tensor:
            return gradient

    return _forward_backward(EmptyFn.apply, problem.logp)


def _forward_backward(loss: Callable[[Tensor], Tensor], logp: Tensor) -> Step:
    leaf = logp.detach().requires_grad_()

    def step() -> dict[str, Tensor]:
        value = loss(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        return {"loss": value.detach(), "gradient": gradient}

    return step
