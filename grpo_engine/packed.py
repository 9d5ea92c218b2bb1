"""The training forward: groups packed without padding, each prompt once or once a completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from .attention import GroupState, routed, routed_in_backward
from .forward import causal_lm, check_reach, decoder_hidden, head_of
from .kernels.grouped_attention import GroupLayout, grouped_attention
from .ops import token_logprob

SHARED_FROM = 1.3  # times fewer tokens through the model, below which sharing does not pay

Tokens = Sequence[int]


@dataclass(frozen=True)
class GroupIndex:
    """Where the rows of `group_hidden` belong; int32, on the device of the model."""

    cu_seqlens: Tensor
    """[S+1]; offsets of the samples in the rows"""
    cu_groups: Tensor
    """[P+1]; offsets of the groups in the samples"""


def group_hidden(
    model: nn.Module,
    prompts: Sequence[Tokens],
    completions: Sequence[Sequence[Tokens]],
    shared_prompt: bool | str = "auto",
) -> tuple[Tensor, GroupIndex]:
    """Hidden states that predict the completion tokens, each prompt run once for its group.

    prompts: P lists of token ids; completions: for each prompt the lists of its samples.
    shared_prompt: True, False (every sample runs with a prompt of its own), or auto: shared if
    that takes at most 1/1.3 of the tokens through the model.
    Returns hidden [N, D] in the model's dtype, differentiable, row t of a sample predicting its
    token t, samples in order; and the GroupIndex. The gradients are those of separate forwards.
    Raises ValueError for a prompt without tokens, and where prompts and completions differ in
    number; UserError for lengths at which rotary factors depend on the batch.
    Reference: kernels/reference_decode.py::grouped_attention.
    """
    if shared_prompt not in (True, False, "auto"):
        raise ValueError(f"shared_prompt must be True, False or 'auto'; given {shared_prompt!r}")
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts, but completions for {len(completions)}")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{number}] has no tokens")
    causal = causal_lm(model)
    if shared_prompt == "auto":
        shared_prompt = sharing_gain(prompts, completions) >= SHARED_FROM
    groups = list(zip(prompts, completions, strict=True))
    # Not shared: the prompt of a sample is the prompt of a group of one.
    parts = groups if shared_prompt else [(p, [c]) for p, many in groups for c in many]
    parts = [(p, many) for p, many in parts if any(map(len, many))]
    lengths = [len(c) for _, many in groups for c in many]
    index = GroupIndex(
        _offsets(lengths, causal.device), _offsets(map(len, completions), causal.device)
    )
    return packed_hidden(causal, parts), index


def sharing_gain(prompts: Sequence[Tokens], completions: Sequence[Sequence[Tokens]]) -> float:
    """Tokens through the model with a prompt a sample, against one a group."""
    own = sum(len(c) for many in completions for c in many)
    once = sum(map(len, prompts)) + own
    each = sum(len(p) * len(many) for p, many in zip(prompts, completions, strict=True)) + own
    return each / max(1, once)


@dataclass(frozen=True)
class PackedGroups:
    """The kwarg `group` of a packed forward."""

    layout: GroupLayout

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        return grouped_attention(q, k, v, self.layout, scale, softcap, window)


def packed_hidden(
    causal: nn.Module,
    parts: Sequence[tuple[Tokens, Sequence[Tokens]]],
    state: Callable[[GroupLayout], GroupState] = PackedGroups,
) -> Tensor:
    """Hidden states [N, D] that predict the completions of (prompt, completions) parts."""
    if not parts:
        size = causal.config.get_text_config().hidden_size
        return torch.empty(0, size, dtype=causal.dtype, device=causal.device, requires_grad=True)
    for prompt, many in parts:
        check_reach(causal, len(prompt), max(map(len, many), default=0))
    layout = GroupLayout.make(
        [len(p) for p, _ in parts], [[len(c) for c in many] for _, many in parts], causal.device
    )
    ids = [token for p, many in parts for sequence in (p, *many) for token in sequence]
    with routed(causal):
        hidden = decoder_hidden(
            causal,
            input_ids=torch.tensor([ids], device=causal.device),
            position_ids=layout.positions[None],
            group=state(layout),
        )
    return routed_in_backward(causal, hidden[0])[layout.predicts]


def completion_logprobs(
    model: nn.Module,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    temperatures: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [N] of the completion tokens, sample after sample, differentiable.

    prompts, completions: token ids, one list a sample; neighbours with equal prompts share one run
    of it. temperatures: one a sample, 0 counts as 1.
    """
    head = head_of(model)
    pairs = zip(map(list, prompts), completions, strict=True)
    groups = [(p, [c for _, c in same]) for p, same in groupby(pairs, key=itemgetter(0))]
    hidden, _ = group_hidden(model, [p for p, _ in groups], [many for _, many in groups], True)
    device = hidden.device
    lengths = torch.tensor([len(c) for c in completions])
    targets = torch.tensor([t for c in completions for t in c], dtype=torch.int64)
    tempered = torch.tensor([t or 1.0 for t in temperatures]).repeat_interleave(lengths)
    return token_logprob(
        hidden.to(head.weight.dtype),
        head.weight,
        targets.to(device),
        bias=head.bias,
        temperature=tempered.to(device),
        softcap=head.softcap,
        logit_scale=head.logit_scale,
    )


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    lengths = torch.tensor([0, *lengths], dtype=torch.int64)
    return lengths.cumsum(0).to(device, torch.int32)
