"""Old samples in the loss: a KL, or behaviour cloning. They never join a group."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .curriculum.config import ReplayConfig
from .curriculum.replay import OldSample
from .forward import evaluating
from .kernels.options import GRPOOptions
from .model import ReferenceScope
from .ops import grpo_loss, pack_groups
from .packed import completion_logprobs


def accumulate_replay(
    model: nn.Module,
    reference: ReferenceScope | None,
    samples: Sequence[OldSample],
    config: ReplayConfig,
    token_budget: int,
) -> float:
    """Adds the gradient of old samples, which have no advantage; returns their loss.

    clone: -weight times the mean log-prob of their tokens (behaviour cloning). kl: weight times the
    mean KL (k3) to the reference on them.
    """
    if not samples:
        return 0.0
    cloning = config.mode == "clone"
    options = GRPOOptions(loss_type="bnpo", beta=0.0 if cloning else 1.0)
    tokens = sum(len(s.completion_ids) for s in samples)
    total = 0.0
    for micro in _micro_batches(samples, token_budget):
        ref = None if cloning else _reference_logp(reference, micro)
        model.train()
        logp = _logp(model, micro)
        out = grpo_loss(
            logp,
            None,
            ref,
            # With an advantage of 1 on policy the gradient is that of -log p.
            advantages=torch.full((len(micro),), float(cloning), device=logp.device),
            cu_seqlens=_offsets(micro, logp.device),
            options=options,
            normalizer=tokens / config.weight,
        )
        out.loss.backward()
        mean = -logp.detach().sum() * config.weight / tokens if cloning else out.loss.detach()
        total += float(mean)
    return total


def _micro_batches(samples: Sequence[OldSample], token_budget: int) -> list[list[OldSample]]:
    packed = pack_groups(
        [len(s.prompt_ids) for s in samples],
        [len(s.completion_ids) for s in samples],
        list(range(len(samples) + 1)),
        token_budget,
        shared_prompt=True,
    )
    return [[samples[i] for _, a, b in micro for i in range(a, b)] for micro in packed]


@torch.no_grad()
def _reference_logp(reference: ReferenceScope, samples: Sequence[OldSample]) -> Tensor:
    with reference() as model, evaluating(model):
        return _logp(model, samples)


def _logp(model: nn.Module, samples: Sequence[OldSample]) -> Tensor:
    """[tokens] f32."""
    logp, _ = completion_logprobs(
        model,
        [s.prompt_ids for s in samples],
        [s.completion_ids for s in samples],
        [s.temperature for s in samples],
    )
    return logp


def _offsets(samples: Sequence[OldSample], device: torch.device) -> Tensor:
    lengths = torch.tensor([0, *(len(s.completion_ids) for s in samples)])
    return lengths.cumsum(0).to(device, torch.int32)
