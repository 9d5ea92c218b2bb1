"""What the peers and we are given, and what each makes of it: loss, gradient, metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor

import grpo_engine as ge
from grpo_engine import GRPOOptions, ops
from grpo_engine.benchmarks.peers import trl_compute_loss, trl_trainer
from grpo_engine.kernels.options import CLIPPED_LOSSES, LossType

# "auto" is one of the others; Triton has no CPU but under its interpreter (interpreted.py).
IMPLEMENTATIONS = [impl for impl in ops.IMPLEMENTATIONS if impl not in ("auto", "triton")]
LAYOUTS = ("padded", "packed")
MASKS = ("full", "ragged", "holes", "nothing")
LENGTHS = {
    "full": (24,) * 8,
    "ragged": (24, 1, 7, 0, 24, 13, 2, 18),  # with an empty completion
    "holes": (24, 9, 7, 3, 24, 13, 2, 18),
    "nothing": (24,) * 8,
}
NEEDED = {"dr_grpo": {"max_completion_length": 32}, "cispo": {"epsilon_high": 1.3}}
KL = {"beta": 0.1, "use_bias_correction_kl": False}
CORRECTED_KL = {"beta": 0.1, "use_bias_correction_kl": True}
SEQUENCE = {"importance_sampling_level": "sequence"}
TWO_SIDED = {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5}
ROUNDING = 1e-6  # of float32 sums of up to 192 terms, relative to the largest number compared


@dataclass
class Batch:
    """8 samples of up to 24 tokens, padded; `mask` is the part of `completion` that counts."""

    logp: Tensor  # [S, T]
    old: Tensor  # [S, T]
    ref: Tensor  # [S, T]
    advantages: Tensor  # [S]
    importance: Tensor  # [S, T]; 1 where masked, as TRL makes it
    completion: Tensor  # [S, T] bool
    tool: Tensor  # [S, T] bool: TRL's tool_mask
    mask: Tensor  # [S, T] bool

    @property
    def cu_seqlens(self) -> Tensor:
        """[S+1] int32: the offsets of the completions, packed."""
        lengths = self.completion.sum(-1)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


@dataclass
class Result:
    """A loss, its gradient in the given log-probs, 0 where padded, and its metrics."""

    loss: Tensor
    gradient: Tensor  # [S, T]
    metrics: dict[str, Tensor]


def make_batch(masked: str = "ragged", dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    """Ratios from 0.2 to 5, a drift in three samples: every clip is met, at either level."""
    rng = torch.Generator().manual_seed(seed)
    shape = (8, 24)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=rng, dtype=torch.float64)

    logp = -2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 0.1
    completion = torch.arange(24) < torch.tensor(LENGTHS[masked])[:, None]
    tool = torch.ones_like(completion)
    if masked == "holes":
        tool = torch.rand(shape, generator=rng) > 0.4
        tool[3] = False  # a completion that a tool wrote from end to end
    elif masked == "nothing":
        tool = torch.zeros_like(completion)
    mask = completion & tool
    drift = torch.tensor([0.6, 0.6, 0, 0, 0, 0, -0.6, 0], dtype=torch.float64)[:, None]
    importance = torch.where(mask, noise(0.3).exp().clamp(max=2.0), 1.0)
    advantages = torch.tensor([1.3, -0.7, 2.4, 2.1, 1.7, 0.0, -0.4, 0.9], dtype=torch.float64)
    floats = (logp, logp - drift + noise(0.4), logp + noise(0.4), advantages, importance)
    return Batch(*(x.to(dtype) for x in floats), completion, tool, mask)


def options_of(loss_type: str, **changes: object) -> GRPOOptions:
    """TRL's defaults, with what the loss type needs."""
    needed = NEEDED.get(loss_type, {})
    return GRPOOptions.preset("trl", **({"loss_type": loss_type} | needed | changes))


def legal_options() -> dict[str, GRPOOptions]:
    """Every loss type and level of TRL, but the pair of test_trl_differences.py."""
    cases = {}
    for loss_type in LossType.__args__:
        variants = {"plain": {}, "kl": KL, "corrected_kl": CORRECTED_KL}
        if loss_type in CLIPPED_LOSSES:
            variants |= {
                "two_sided": TWO_SIDED | CORRECTED_KL,
                "sequence": SEQUENCE,
                "sequence-kl": SEQUENCE | KL,
                "sequence-two_sided": SEQUENCE | KL | TWO_SIDED,
            }
        for name, changes in variants.items():
            cases[f"{loss_type}-{name}"] = options_of(loss_type, **changes)
    gates = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2, "vespo_lambda_neg": 1}
    cases["vespo-gates"] = options_of("vespo", **gates)
    temperatures = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}
    cases["sapo-temperatures"] = options_of("sapo", **temperatures)
    return cases


OPTIONS = legal_options()


def ours(
    batch: Batch, options: GRPOOptions, layout: str, impl: str, importance: bool = False, **changes
) -> Result:
    """ge.grpo_loss; changes: further arguments of it."""
    logp = batch.logp.clone().requires_grad_()
    given = {"old_logp": batch.old, "advantages": batch.advantages}
    if options.beta > 0:
        given["ref_logp"] = batch.ref
    if importance:
        given["importance_ratio"] = batch.importance
    given |= changes
    if layout == "packed":
        row = batch.completion
        given = {
            name: x[row] if isinstance(x, Tensor) and x.shape == row.shape else x
            for name, x in given.items()
        }
        given |= {"cu_seqlens": batch.cu_seqlens, "mask": batch.tool[row]}
        out = ge.grpo_loss(logp[row], options=options, impl=impl, **given)
    else:
        out = ge.grpo_loss(logp, options=options, impl=impl, mask=batch.mask, **given)
    return Result(out.loss.detach(), torch.autograd.grad(out.loss, logp)[0], out.metrics)


def trls(batch: Batch, options: GRPOOptions, importance: bool = False, **changes) -> Result:
    """TRL's _compute_loss; changes: further arguments of trl_compute_loss."""
    trainer = trl_trainer(options)
    logp = batch.logp.clone().requires_grad_()
    given = {"old_logp": batch.old, "ref_logp": batch.ref, "tool_mask": batch.tool.long()}
    if importance:
        given["importance_sampling_ratio"] = batch.importance
    trainer._metrics["train"].clear()
    loss = trl_compute_loss(trainer, logp, batch.completion, batch.advantages, **(given | changes))
    metrics = {name: torch.tensor(x[-1]) for name, x in trainer._metrics["train"].items()}
    return Result(loss.detach(), torch.autograd.grad(loss, logp)[0], metrics)


def assert_close(
    given: Tensor, expected: Tensor, rounding: float = ROUNDING, terms: float = 0.0
) -> None:
    """Every element within `rounding` of the largest expected one, or of what was added up."""
    scale = expected.abs().max() if expected.numel() else expected.new_zeros(())
    scale = scale.clamp(min=terms)
    error = (given.double() - expected.double()).abs().max()
    assert error <= rounding * scale, f"{float(error):.2e} of {float(scale):.2e}"


def assert_same(
    given: Result, expected: Result, options: GRPOOptions, rounding: float = ROUNDING
) -> None:
    """Loss, gradient, and the KL where there is one."""
    # The loss is a sum that cancels; with ratios near 1 its terms are as large as the gradient's.
    assert_close(given.loss, expected.loss, rounding, float(expected.gradient.abs().sum()))
    assert_close(given.gradient, expected.gradient, rounding)
    if options.beta > 0:
        assert_close(given.metrics["kl"], expected.metrics["kl"], rounding)
