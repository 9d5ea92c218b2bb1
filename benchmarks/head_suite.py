"""Log-probs from hidden states and the head, bf16: `grpo bench --suite head`."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial

import torch
from torch import Tensor

from .. import ops
from . import machine, peers
from .bare import bare_gemms
from .harness import Case, Provider, Step
from .head_problem import DTYPE, OPTIONS, SHAPES, Problem, Shape
from .ours import implementations

__all__ = ["SHAPES", "Shape", "cases"]

# What this project promises, see the contract of the head.
LIMITS = {
    "logp": 5e-3,
    "entropy": 5e-3,
    "hidden_gradient": 0.02,
    "weight_gradient": 0.02,
    "loss": 5e-3,
    "loss_hidden_gradient": 0.02,
    "loss_weight_gradient": 0.02,
}
CPU_GEMM_BLOCK = 8192  # as the op's, see grpo_engine/cpu.py
FULL_LOGITS = "--quick: it holds all logits, [N, V]"


def cases(shape: Shape, device: torch.device, quick: bool = False) -> list[Case]:
    """The head frozen, trainable as an op, trainable fused with the loss, and without gradient."""
    problem = cache(lambda: Problem(shape, device))
    whole = {"left_out": FULL_LOGITS} if quick else {}
    losses = [
        provider for provider in _losses(False, device, whole) if "torch" not in provider.name
    ]
    units = {
        "frozen": (2, [*_logprobs("frozen", device, whole), *losses]),
        "trainable": (4, _logprobs("trainable", device, whole)),
        "trainable-fused": (3, _losses(True, device, whole)),
        "no-gradient": (1, _logprobs("no-gradient", device, whole)),
    }
    return [
        Case(
            suite="head",
            name=name,
            shape=asdict(shape),
            device=device,
            inputs=problem,
            expected=lambda: problem().expected,
            providers=(*providers, *_floors(count, device)),
            # A unit is one GEMM over all logits: 2 N V D FLOP.
            work=count * 2 * shape.tokens * shape.vocab * shape.hidden,
            rate_unit="GFLOP/s",
            machine_rate=lambda: machine.gemm_rate(DTYPE, device, shape.gemm),
        )
        for name, (count, providers) in units.items()
    ]


def _logprobs(mode: str, device: torch.device, whole: dict[str, str]) -> list[Provider]:
    """whole: what keeps those that hold all logits from being run."""
    return [
        *_ours("", partial(_our_logprob, mode), device, whole),
        Provider("trl", partial(_logprob, peers.trl_chunked_logprob, mode)),
        Provider("eager", partial(_logprob, _eager, mode), **whole),
    ]


def _losses(trainable: bool, device: torch.device, whole: dict[str, str]) -> list[Provider]:
    return [
        *_ours("-loss", partial(_our_loss, trainable), device, whole),
        Provider("liger-loss", partial(_liger, trainable), compiles=True),
    ]


def _ours(
    suffix: str,
    build: Callable[[str, Problem], Step],
    device: torch.device,
    whole: dict[str, str],
) -> list[Provider]:
    return [
        Provider(
            f"ours-{impl}{suffix}",
            partial(build, impl),
            LIMITS,
            **(limits | whole if impl == "torch" else limits),
        )
        for impl, limits in implementations(device).items()
    ]


LogProb = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _logprob(logprob: LogProb, mode: str, problem: Problem) -> Step:
    """Log-probs, and the gradient of their sum where the mode has one."""
    leaves = _leaves(mode == "trainable", problem)

    def forward() -> dict[str, Tensor]:
        logp, entropy = logprob(*leaves.values(), problem.targets)
        return {"logp": logp} if entropy is None else {"logp": logp, "entropy": entropy}

    def step() -> dict[str, Tensor]:
        if mode == "no-gradient":
            with torch.no_grad():
                return forward()
        out = forward()
        return out | _gradients(out["logp"].sum(), leaves)

    return step


def _our_logprob(mode: str, impl: str, problem: Problem) -> Step:
    op = partial(ops.token_logprob, impl=impl, tile_bytes=problem.tile_bytes)
    return _logprob(op, mode, problem)


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """What one writes without a library: logits in the dtype of the head, the rest in float32."""
    logp = (hidden @ weight.T).float().log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), None


def _our_loss(trainable: bool, impl: str, problem: Problem) -> Step:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        out = ops.linear_grpo_loss(
            hidden,
            weight,
            problem.targets,
            problem.old,
            problem.ref,
            rewards=problem.rewards,
            cu_groups=problem.cu_groups,
            cu_seqlens=problem.cu_seqlens,
            options=OPTIONS,
            tile_bytes=problem.tile_bytes,
            impl=impl,
        )
        return out.loss

    return _loss(loss, trainable, problem)


def _liger(trainable: bool, problem: Problem) -> Step:
    samples = problem.shape.samples

    def padded(x: Tensor) -> Tensor:
        return x.view(samples, -1, *x.shape[1:])

    targets, old, ref = map(padded, (problem.targets, problem.old, problem.ref))
    mask = torch.ones_like(targets)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return peers.liger_chunked_loss(
            padded(hidden), weight, targets, problem.advantages, mask, ref, old, OPTIONS
        )

    return _loss(loss, trainable, problem)


def _floors(units: int, device: torch.device) -> list[Provider]:
    """The bare GEMMs, on the CPU also in the blocks that suit its GEMM best."""
    blocks = {"": None, "-blocked": CPU_GEMM_BLOCK} if device.type == "cpu" else {"": None}
    return [
        Provider(f"bare-gemms-{units}{name}", partial(_bare, units, block), floor=True)
        for name, block in blocks.items()
    ]


def _bare(units: int, block: int | None, problem: Problem) -> Step:
    return bare_gemms(units, problem.hidden, problem.weight, problem.tile_bytes, block)


def _loss(loss: Callable[[Tensor, Tensor], Tensor], trainable: bool, problem: Problem) -> Step:
    leaves = _leaves(trainable, problem)

    def step() -> dict[str, Tensor]:
        value = loss(*leaves.values())
        gradients = _gradients(value, leaves)
        return {"loss": value} | {f"loss_{name}": x for name, x in gradients.items()}

    return step


def _leaves(trainable: bool, problem: Problem) -> dict[str, Tensor]:
    return {
        "hidden_gradient": problem.hidden.detach().requires_grad_(),
        "weight_gradient": problem.weight.detach().requires_grad_(trainable),
    }


def _gradients(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(value, list(wanted.values())), strict=True))
