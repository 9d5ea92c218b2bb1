"""From a batch to a gradient: scoring without gradient, and the accumulated loss with one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .errors import UserError
from .forward import evaluating
from .groups.batch import Batch
from .kernels.options import GRPOOptions
from .ops import grpo_loss, loss_normalizer
from .packed import completion_logprobs

MicroBatches = Sequence[Sequence[int]]  # sample numbers


@torch.no_grad()
def score_logprobs(model: nn.Module, batch: Batch, micros: MicroBatches) -> dict[int, Tensor]:
    """Log-probs [len] of each sample under `model`, in eval mode, by the route of the loss."""
    scored: dict[int, Tensor] = {}
    with evaluating(model):
        for micro in micros:
            logp, _ = _logprobs(model, batch, micro)
            lengths = [len(batch.rollouts[s].completion_ids) for s in micro]
            scored.update(zip(micro, logp.cpu().split(lengths), strict=True))
    return scored


def accumulate_gradient(
    model: nn.Module, batch: Batch, micros: MicroBatches, options: GRPOOptions
) -> dict[str, float]:
    """Adds the gradient of the whole batch to the parameters; returns its metrics.

    The normaliser is that of the whole batch, so the split into micro-batches changes nothing.
    """
    lengths = torch.tensor(batch.lengths())
    normalizer = float(
        loss_normalizer(options, batch.in_loss.sum(), (lengths * batch.in_loss).sum())
    )
    totals, kl = _Totals(), _SampleKl()
    model.train()
    for micro in micros:
        logp, entropy = _logprobs(model, batch, micro)
        old, ref = _packed(batch.old_logp, micro, logp), _packed(batch.ref_logp, micro, logp)
        out = grpo_loss(
            logp,
            old,
            ref,
            advantages=_advantages(batch, micro, options).to(logp),
            cu_seqlens=_offsets(lengths[micro], logp.device),
            options=options,
            normalizer=normalizer,
        )
        out.loss.backward()
        sampled = torch.cat([batch.rollouts[s].logp_sampler for s in micro]).to(logp)
        gap = ((logp.detach() if old is None else old) - sampled).abs()
        totals.add(out.loss.detach(), out.metrics, entropy=entropy, logp_gap=gap)
        if ref is not None:
            kl.add(micro, logp.detach(), ref, lengths[micro])
    batch.kl = kl.by_sample()
    return totals.metrics()


def _logprobs(model: nn.Module, batch: Batch, micro: Sequence[int]) -> tuple[Tensor, Tensor]:
    rollouts = [batch.rollouts[s] for s in micro]
    return completion_logprobs(
        model,
        [r.prompt_ids for r in rollouts],
        [r.completion_ids for r in rollouts],
        [r.params.temperature for r in rollouts],
    )


def _packed(by_sample: dict[int, Tensor], micro: Sequence[int], like: Tensor) -> Tensor | None:
    return torch.cat([by_sample[s] for s in micro]).to(like.device) if by_sample else None


def _advantages(batch: Batch, micro: Sequence[int], options: GRPOOptions) -> Tensor:
    """[samples], or [tokens] where rewards of steps make tokens of a sample differ."""
    if not batch.token_advantages:
        return batch.advantages[micro]
    if options.loss_type == "vespo":
        raise UserError(
            "a reward function rewards steps of a completion, and loss.loss_type vespo takes one "
            "advantage a sample: choose another loss_type"
        )
    whole = batch.advantages.tolist()
    return torch.cat(
        [
            batch.token_advantages[s]
            if s in batch.token_advantages
            else torch.full((len(batch.rollouts[s].completion_ids),), whole[s])
            for s in micro
        ]
    )


def _offsets(lengths: Tensor, device: torch.device) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cat([zero, lengths.cumsum(0)]).to(device, torch.int32)


class _Totals:
    """Sums over the micro-batches, on the device until the step ends; means are over tokens."""

    SUMS = ("loss", "tokens", "nonfinite")
    MEANS = ("kl", "ratio_mean", "clip_low", "clip_high", "clip_region", "advantage_abs")
    PER_TOKEN = ("entropy", "logp_gap")

    def __init__(self) -> None:
        self.added: list[Tensor] = []

    def add(
        self, loss: Tensor, metrics: dict[str, Tensor], entropy: Tensor, logp_gap: Tensor
    ) -> None:
        tokens = metrics["tokens"]
        sums = loss, tokens, metrics["nonfinite"], *(metrics[name] * tokens for name in self.MEANS)
        sums = *sums, entropy.sum(), logp_gap.sum()
        self.added.append(torch.stack([x.float() for x in sums]))

    def metrics(self) -> dict[str, float]:
        names = *self.SUMS, *self.MEANS, *self.PER_TOKEN
        sums = torch.stack(self.added).sum(0).tolist() if self.added else [0.0] * len(names)
        totals = dict(zip(names, sums, strict=True))
        tokens = max(1.0, totals["tokens"])
        return {name: x if name in self.SUMS else x / tokens for name, x in totals.items()}


class _SampleKl:
    """The mean KL (k3) of each sample, on the device until the step ends."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.means: list[Tensor] = []

    def add(self, micro: Sequence[int], logp: Tensor, ref: Tensor, lengths: Tensor) -> None:
        x = (ref - logp).clamp(-20, 20)
        lengths = lengths.to(x.device)
        owner = torch.repeat_interleave(torch.arange(len(micro), device=x.device), lengths)
        sums = x.new_zeros(len(micro)).index_add_(0, owner, x.exp() - x - 1)
        self.samples += micro
        self.means.append(sums / lengths)

    def by_sample(self) -> dict[int, float]:
        means = torch.cat(self.means).tolist() if self.means else []
        return dict(zip(self.samples, means, strict=True))
