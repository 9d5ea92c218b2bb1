"""The inputs of the head suite and their truth."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.options import GRPOOptions
from .harness import Expected

OPTIONS = GRPOOptions(beta=0.04)
LOGIT_STD = 2.0
DTYPE = torch.bfloat16
# What bf16 logits allow: below |z| = 16 they are rounded by 2^-5 at most, the target's and those in
# the log-sum-exp alike; that moves a probability and a ratio by 3 % each.
TOLERANCES = {"logp": 0.07, "entropy": 0.07, "loss": 0.02, "gradient": 0.1}
CHECKED_ROWS = 64
TRUTH_BYTES = 128 << 20  # of float64 logits at a time


@dataclass(frozen=True)
class Shape:
    """N tokens in samples of equal length, one group; D hidden, V vocabulary, a tile in MiB."""

    tokens: int
    hidden: int
    vocab: int
    samples: int = 8
    tile_mib: int = 256
    gemm: int = 0
    """size of the square GEMM whose rate is this machine's; 0: as machine.py has it"""

    def __post_init__(self) -> None:
        if self.tokens % self.samples:
            raise ValueError(f"tokens must be a multiple of {self.samples}, the samples")


SHAPES = {
    "small": Shape(tokens=32, hidden=16, vocab=203, gemm=64),
    "full": Shape(tokens=2048, hidden=1024, vocab=151936),
    "cuda": Shape(tokens=8192, hidden=4096, vocab=151936, samples=32),
}


class Problem:
    """Seeded inputs and their float64 truth."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.tile_bytes = shape.tile_mib << 20
        n, d, v = shape.tokens, shape.hidden, shape.vocab
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        self.hidden = normal(n, d, dtype=DTYPE)
        self.weight = normal(v, d, dtype=DTYPE) * (LOGIT_STD / d**0.5)
        self.targets = torch.randint(v, (n,), generator=generator, device=device)
        self.rewards = normal(shape.samples)
        self.cu_groups = torch.tensor([0, shape.samples], dtype=torch.int32, device=device)
        self.cu_seqlens = torch.arange(0, n + 1, n // shape.samples, device=device).int()
        self.advantages, _ = reference.group_advantages(self.rewards, self.cu_groups, None, OPTIONS)
        # Away from the clip bounds, log 0.8 and log 1.2, by more than rounded logits can move it.
        uniform = torch.rand(n, generator=generator, device=device) - 0.5
        outside = torch.arange(n, device=device) % 4 == 0
        self.log_ratio = torch.where(outside, uniform.sign() / 2, uniform / 10)
        self.log_ref_ratio = normal(n) / 5

    @cached_property
    def truth(self) -> tuple[Tensor, Tensor]:
        """logp and entropy [N] in float64, a few rows of logits at a time."""
        weight = self.weight.double()
        rows = max(1, TRUTH_BYTES // (8 * len(weight)))
        chunks = [
            reference.token_logprob(hidden.double(), weight, targets)
            for hidden, targets in zip(
                self.hidden.split(rows), self.targets.split(rows), strict=True
            )
        ]
        logp, entropy = zip(*chunks, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    @cached_property
    def old(self) -> Tensor:
        """[N] float32."""
        return self.truth[0].float() - self.log_ratio

    @cached_property
    def ref(self) -> Tensor:
        """[N] float32."""
        return self.truth[0].float() + self.log_ref_ratio

    @cached_property
    def expected(self) -> dict[str, Expected]:
        """Log-probs with the gradient of their sum, and the loss with its own, by name."""
        logp, entropy = self.truth
        leaf = logp.detach().requires_grad_()
        old, ref, advantages = (x.double() for x in (self.old, self.ref, self.advantages))
        out = reference.grpo_loss(
            leaf, old, ref, options=OPTIONS, advantages=advantages, cu_seqlens=self.cu_seqlens
        )
        upstream = torch.autograd.grad(out.loss, leaf)[0]
        return {
            "logp": Expected(logp, TOLERANCES["logp"]),
            "entropy": Expected(entropy, TOLERANCES["entropy"]),
            "loss": Expected(out.loss.detach(), TOLERANCES["loss"]),
            "hidden_gradient": self._hidden_gradient(torch.ones_like(logp)),
            "weight_gradient": self._weight_gradient(torch.ones_like(logp)),
            "loss_hidden_gradient": self._hidden_gradient(upstream),
            "loss_weight_gradient": self._weight_gradient(upstream),
        }

    def _hidden_gradient(self, upstream: Tensor) -> Expected:
        """Of some rows, the first and the last among them; rows do not depend on each other."""
        rows = _spread(len(self.hidden), self.device)
        hidden = self.hidden[rows].double().requires_grad_()
        logp, _ = reference.token_logprob(hidden, self.weight.double(), self.targets[rows])
        return _by_row(torch.autograd.grad(logp @ upstream[rows], hidden)[0], rows)

    def _weight_gradient(self, upstream: Tensor) -> Expected:
        """Of some words over all rows: dW_v = sum_n upstream_n (1[v = y_n] - p_nv) h_n."""
        words = torch.cat((_spread(len(self.weight), self.device), self.targets[:CHECKED_ROWS]))
        hidden = self.hidden.double()
        target_logit = (hidden * self.weight[self.targets].double()).sum(-1)
        lse = target_logit - self.truth[0]
        logits = reference.head_logits(hidden, self.weight[words].double())
        hit = (self.targets[:, None] == words).double()
        dlogits = upstream[:, None] * (hit - (logits - lse[:, None]).exp())
        return _by_row(dlogits.T @ hidden, words)


def _spread(n: int, device: torch.device) -> Tensor:
    return torch.linspace(0, n - 1, min(n, CHECKED_ROWS), device=device).long()


def _by_row(gradient: Tensor, rows: Tensor) -> Expected:
    norm = gradient.norm(dim=-1)
    return Expected(gradient, TOLERANCES["gradient"], norm.clamp(min=norm.mean()), rows)
