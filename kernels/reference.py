"""Every op in plain PyTorch: the definition. Valid in float64; the oracle of every test.

Samples are packed: `cu_seqlens` [S+1] are the token offsets of the samples, `cu_groups` [P+1] the
sample offsets of the groups. Padding may hold anything, NaN included: values are selected under
the mask, never multiplied by it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from .options import CLIPPED_LOSSES, GRPOOptions

LOG_RATIO_BOUND = 20.0  # e^20: beyond it a ratio is an accident, and exp must not overflow
VESPO_LOG_MIN = math.log(1e-8)


@dataclass
class LossOutput:
    """`loss`: differentiable scalar; `metrics`: detached scalar tensors on the loss's device."""

    loss: Tensor
    make_metrics: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """By name; made when asked for, since a dozen tensors cost more than a small loss."""
        return self.make_metrics()


def group_advantages(
    rewards: Tensor, cu_groups: Tensor, valid: Tensor | None, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """rewards [S], cu_groups [P+1], valid [S] bool -> advantages [S], signal [P] bool."""
    valid = is_valid(rewards, valid)
    r = rewards.double()
    advantages = torch.zeros_like(r)
    signal = torch.zeros(len(cu_groups) - 1, dtype=torch.bool, device=r.device)
    batch_std = _std(r[valid], options.ddof)
    for g, (start, end) in enumerate(pairwise(cu_groups.tolist())):
        member = torch.arange(start, end, device=r.device)[valid[start:end]]
        x = r[member]
        # Equal rewards are compared as values: rounding of the mean must not become an advantage.
        if len(x) < 2 or x.max() == x.min() or _std(x, options.ddof) <= options.min_std:
            continue
        signal[g] = True
        a = x - _baseline(x, options.baseline)
        if options.scale_rewards != "none":
            std = batch_std if options.scale_rewards == "batch" else _std(x, options.ddof)
            a = a / (std + options.epsilon_std)
        if options.advantage_clip is not None:
            a = a.clamp(-options.advantage_clip, options.advantage_clip)
        advantages[member] = a
    return advantages.to(rewards.dtype), signal


def is_valid(rewards: Tensor, valid: Tensor | None) -> Tensor:
    """[S] bool: the samples that enter the statistics; a reward that is not finite never does."""
    finite = torch.isfinite(rewards)
    return finite if valid is None else finite & valid.bool()


def _std(x: Tensor, ddof: int) -> Tensor:
    if len(x) <= ddof:
        return x.new_zeros(())
    return ((x - x.mean()).square().sum() / (len(x) - ddof)).sqrt()


def _baseline(x: Tensor, kind: str) -> Tensor:
    if kind == "mean":
        return x.mean()
    if kind == "median":
        ordered, n = x.sort().values, len(x)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return (x.sum() - x) / (len(x) - 1)


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """hidden [N, D], weight [V, D], targets [N] -> log-prob [N] and entropy [N] (no gradient)."""
    z = head_logits(hidden, weight, bias, softcap, logit_scale)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = z.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return logp.gather(-1, targets.long()[:, None]).squeeze(-1), entropy


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Logits [N, V] before temperature, in float32 (float64 for float64 inputs).

    Rounded to bfloat16 they would move a ratio by 6 %: one ulp at |z| >= 16 is 0.125.
    """
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    z = hidden.to(exact) @ weight.to(exact).T
    if bias is not None:
        z = z + bias.to(exact)
    z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    *,
    options: GRPOOptions,
    rewards: Tensor | None = None,
    cu_groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: Tensor | None = None,
    valid: Tensor | None = None,
    in_loss: Tensor | None = None,
    mask: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Packed: logp [N] with cu_seqlens [S+1]. Padded: logp [S, T] with mask [S, T]."""
    sample = _sample_of_token(logp, cu_seqlens)
    n_samples = len(logp) if cu_seqlens is None else len(cu_seqlens) - 1
    signal = None
    if advantages is None:
        advantages, signal = group_advantages(rewards, cu_groups, valid, options)
        valid = is_valid(rewards, valid)
    in_loss = _flags(in_loss if in_loss is not None else valid, n_samples, logp.device)
    # A sample outside the statistics has no advantage, so it has no place in the loss either.
    in_loss = in_loss if valid is None else in_loss & valid.bool()

    m = in_loss[sample] if mask is None else in_loss[sample] & mask.reshape(-1).bool()
    if options.beta == 0:
        ref_logp = None
    given = (logp, old_logp, ref_logp, importance_ratio)
    flat = [x if x is None else x.reshape(-1) for x in given]
    lp, old, ref = (x if x is None else torch.where(m, x, 0.0) for x in flat[:3])
    old = lp.detach() if old is None else old.detach()
    ref = None if ref is None else ref.detach()
    per_sample = advantages.shape == (n_samples,)
    per_token = advantages[sample] if per_sample else advantages.reshape(-1)
    checked = [x for x in (*flat, per_token) if x is not None]
    nonfinite = sum((~torch.isfinite(x) & m).sum() for x in checked)
    a = torch.where(m, per_token.to(lp.dtype), 0.0)
    correction = None
    if importance_ratio is not None:
        correction = torch.where(m, flat[3].detach(), 1.0)

    terms = _Terms(lp, old, a, m, sample, n_samples, correction, options)
    policy, ratio = terms.policy()
    kl = torch.zeros_like(lp) if ref is None else terms.kl(ref)
    per_token_loss = torch.where(m, policy + options.beta * kl, 0.0)

    tokens = torch.zeros(n_samples, dtype=lp.dtype, device=lp.device).index_add_(
        0, sample, m.to(lp.dtype)
    )
    if normalizer is None:
        normalizer = default_normalizer(options, in_loss.sum(), tokens.sum())
    weight = 1 / tokens.clamp(min=1) if options.loss_type in ("grpo", "sapo") else None
    weighted = per_token_loss if weight is None else per_token_loss * weight[sample]
    loss = weighted.sum() / normalizer
    with torch.no_grad():
        metrics = _metrics(options, a, m, ratio.detach(), kl.detach())
        metrics |= {"tokens": tokens.sum(), "samples": in_loss.sum(), "nonfinite": nonfinite}
        if signal is not None:
            metrics["no_signal"] = (~signal).to(lp.dtype).mean()
    return LossOutput(loss, lambda: metrics)


def default_normalizer(options: GRPOOptions, samples: Tensor, tokens: Tensor) -> Tensor:
    """What the summed loss is divided by, from the counts of in-loss samples and tokens."""
    if options.loss_type in ("grpo", "sapo", "luspo"):
        return samples.clamp(min=1)
    if options.loss_type == "dr_grpo":
        return samples.clamp(min=1) * options.max_completion_length
    return tokens.clamp(min=1)


def _sample_of_token(logp: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        n_samples, length = logp.shape
        return torch.arange(n_samples, device=logp.device).repeat_interleave(length)
    lengths = cu_seqlens.long().diff()
    return torch.arange(len(lengths), device=logp.device).repeat_interleave(lengths)


def _flags(flags: Tensor | None, n: int, device: torch.device) -> Tensor:
    return torch.ones(n, dtype=torch.bool, device=device) if flags is None else flags.bool()


@dataclass
class _Terms:
    """The token terms of the loss over flat tokens; masked tokens hold zeros."""

    logp: Tensor  # [N]
    old: Tensor  # [N]
    advantage: Tensor  # [N]
    mask: Tensor  # [N] bool
    sample: Tensor  # [N] the sample of a token
    n_samples: int
    correction: Tensor | None  # [N] sampler/trainer importance ratio
    options: GRPOOptions

    def log_ratio(self) -> Tensor:
        return (self.logp - self.old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def policy(self) -> tuple[Tensor, Tensor]:
        """The policy term [N] and the ratio [N] that it used."""
        o, a = self.options, self.advantage
        ratio = self.log_ratio().exp()
        if o.importance_sampling_level == "sequence":
            count = self._sum_by_sample(self.mask.to(self.logp.dtype)).clamp(min=1)
            ratio = (self._sum_by_sample(self.log_ratio()) / count).exp()[self.sample]
        if o.loss_type in CLIPPED_LOSSES:
            free = ratio if o.delta is None else ratio.clamp(max=o.delta)
            clipped = ratio.clamp(1 - o.epsilon, 1 + o.clip_high)
            term = -torch.minimum(free * a, clipped * a)
        elif o.loss_type == "cispo":
            term = -ratio.detach().clamp(max=o.epsilon_high) * a * self.logp
        elif o.loss_type == "sapo":
            tau = _pick(a > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, a)
            term = -a * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
        else:
            return -self._vespo_weight().detach() * a * self.logp, ratio
        return (term if self.correction is None else term * self.correction), ratio

    def kl(self, ref: Tensor) -> Tensor:
        """The estimated KL to the reference, per token [N]."""
        x = (ref - self.logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - x - 1}[self.options.kl_estimator]
        return kl * self.log_ratio().exp() if self.options.use_bias_correction_kl else kl

    def _vespo_weight(self) -> Tensor:
        o = self.options
        log_w = self._sum_by_sample(self.log_ratio())
        if self.correction is not None:
            log_c = self.correction.log().clamp(VESPO_LOG_MIN, LOG_RATIO_BOUND)
            log_w = log_w + self._sum_by_sample(log_c)
        log_w = log_w.clamp(VESPO_LOG_MIN, LOG_RATIO_BOUND)[self.sample]
        positive = self.advantage >= 0
        k = _pick(positive, o.vespo_k_pos, o.vespo_k_neg, log_w)
        lam = _pick(positive, o.vespo_lambda_pos, o.vespo_lambda_neg, log_w)
        return (lam + k * log_w - lam * log_w.exp()).exp()

    def _sum_by_sample(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, 0.0)
        return torch.zeros(self.n_samples, dtype=x.dtype, device=x.device).index_add(
            0, self.sample, x
        )


def _pick(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # torch.where of two floats would be float32 and cost float64 callers their digits.
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


def _metrics(o: GRPOOptions, a: Tensor, m: Tensor, ratio: Tensor, kl: Tensor) -> dict[str, Tensor]:
    count = m.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(m, x.to(a.dtype), 0.0).sum() / count

    if o.loss_type == "cispo":
        low, high = torch.zeros_like(m), (ratio > o.epsilon_high) & (a > 0)
    else:
        low, high = (ratio < 1 - o.epsilon) & (a < 0), (ratio > 1 + o.clip_high) & (a > 0)
    any_token = m.any()
    inside = ratio[m] if any_token else ratio.new_ones(1)
    return {
        "kl": mean(kl),
        "ratio_mean": mean(ratio) if any_token else ratio.new_ones(()),
        "ratio_min": inside.min(),
        "ratio_max": inside.max(),
        "clip_low": mean(low),
        "clip_high": mean(high),
        "clip_region": mean(low | high),
        "advantage_abs": mean(a.abs()),
    }
