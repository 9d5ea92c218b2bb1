"""The ops of sampling and of attention in plain PyTorch: their definition, valid in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeTables:
    """Where the keys and values of W slots lie; all int32, on one device.

    A live group has one of R rows. Keys stand in pages: token t of a prompt in page
    prefix_table[row, t // page] at t % page, an own token likewise in suffix_table[slot].
    """

    prefix_table: Tensor
    """[R, prefix_pages]; pages of the prompt of each row"""
    prefix_len: Tensor
    """[R]; tokens of the prompt of each row"""
    suffix_table: Tensor
    """[W, suffix_pages]; own pages of each slot"""
    suffix_len: Tensor
    """[W]; own tokens of each slot, with the one that is decoded now; 0: the slot is idle"""
    slot_group: Tensor
    """[W]; row of the group of each slot; -1: idle"""
    order: Tensor
    """[W]; the slots in the order of their rows, idle ones last"""
    cu_slots: Tensor
    """[R+1]; row r has the slots order[cu_slots[r] : cu_slots[r + 1]]"""


def group_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: DecodeTables,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One decode step: writes the new keys and values into their pages, then attends.

    q: [W, H, d]; k, v: [W, H_kv, d]; k_pages, v_pages: [pages, page, H_kv, d] of the same dtype.
    Query head h reads key head h // (H / H_kv). A slot's token stands at position
    prefix_len + suffix_len - 1 and sees the prompt of its group and its own tokens; with `window`
    only the last `window` positions, its own included. Scores: softcap tanh(scale q.k / softcap).
    Returns [W, H, d]; 0 for idle slots, for which nothing is written.
    """
    out = torch.zeros_like(q)
    page, repeat = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    for slot, row in enumerate(tables.slot_group.tolist()):
        own = int(tables.suffix_len[slot])
        if row < 0 or own == 0:
            continue
        last = int(tables.suffix_table[slot, (own - 1) // page])
        k_pages[last, (own - 1) % page] = k[slot]
        v_pages[last, (own - 1) % page] = v[slot]
        prompt = int(tables.prefix_len[row])
        spans = (tables.prefix_table[row], prompt), (tables.suffix_table[slot], own)
        keys, values = (
            torch.cat([pool[ids.long()].flatten(0, 1)[:length] for ids, length in spans])
            for pool in (k_pages, v_pages)
        )
        exact = torch.promote_types(q.dtype, torch.float32)
        keys, values = (
            x.to(exact).repeat_interleave(repeat, 1).transpose(0, 1) for x in (keys, values)
        )
        scores = scale * (keys @ q[slot].to(exact)[:, :, None]).squeeze(-1)  # [H, prompt + own]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[:, : max(0, prompt + own - window)] = -torch.inf
        out[slot] = (scores.softmax(-1)[:, None] @ values).squeeze(1).to(q.dtype)
    return out


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_len: list[int],
    completion_len: list[list[int]],
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of packed groups: each group's prompt once, then its completions.

    q: [N, H, d]; k, v: [N, H_kv, d], N = sum over groups of prompt_len + sum(completion_len).
    A completion token sees its group's prompt and, causally, its own completion, never a sibling;
    its position counts on from the prompt. Softcap and window as in group_decode.
    Returns [N, H, d], differentiable.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    out, start = [], 0
    for prompt, completions in zip(prompt_len, completion_len, strict=True):
        first = torch.arange(start, start + prompt)
        out.append(_causal(q, k, v, first, 0, scale, softcap, window))
        start += prompt
        for length in completions:
            at = torch.cat([first, torch.arange(start, start + length)])
            out.append(_causal(q, k, v, at, prompt, scale, softcap, window))
            start += length
    return torch.cat(out)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Tensor,
    skip: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention over the tokens `at`; the output of all but the first `skip` of them."""
    exact = torch.promote_types(q.dtype, torch.float32)
    at = at.to(q.device)
    queries, keys, values = (x[at].transpose(0, 1).to(exact) for x in (q, k, v))
    scores = scale * queries[:, skip:] @ keys.transpose(1, 2)  # [H, len - skip, len]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(at), device=q.device)
    behind = position[skip:, None] - position[None]
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).to(q.dtype)


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row: logits [B, V] f32, the others [B] (None: off), seen [B, V] bool.

    Order as in vLLM: penalty, temperature, min-p, top-k, top-p, then the inverse of the
    distribution function at `uniform` in [0, 1). Temperature 0 is greedy.
    Returns tokens [B], logp_sampler [B] (tempered, before penalty and truncation; at temperature 1
    for greedy rows) and logp_processed [B] (of the distribution that was drawn from).
    """
    greedy = temperature == 0
    t = torch.where(greedy, 1.0, temperature)[:, None]
    plain = (logits / t).log_softmax(-1)
    z = logits
    if repetition_penalty is not None:
        penalty = repetition_penalty[:, None]
        z = torch.where(seen, torch.where(z > 0, z / penalty, z * penalty), z)
    argmax = z.argmax(-1)
    z = _truncate((z / t).log_softmax(-1), top_k, top_p, min_p)
    processed = z.log_softmax(-1)
    cdf = processed.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cdf, uniform.double()[:, None] * cdf[:, -1:], right=True)
    tokens = torch.where(greedy, argmax, drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1))
    logp_processed = processed.gather(-1, tokens[:, None]).squeeze(-1)
    return (
        tokens,
        plain.gather(-1, tokens[:, None]).squeeze(-1),
        torch.where(greedy, 0.0, logp_processed),
    )


def _truncate(
    logp: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    if min_p is not None:
        least = logp.amax(-1, keepdim=True) + min_p[:, None].log()
        logp = logp.masked_fill(logp < least, -torch.inf)
    if top_k is None and top_p is None:
        return logp
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logp.shape[-1], device=logp.device)
        limit = torch.where(top_k > 0, top_k, logp.shape[-1])[:, None]
        ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    if top_p is not None:
        p = ordered.softmax(-1)
        # Rounding of the sum must not cut the tail of a row in which the filter is off.
        beyond = (p.cumsum(-1) - p >= top_p[:, None]) & (top_p < 1)[:, None]
        ordered = ordered.masked_fill(beyond, -torch.inf)
    return torch.empty_like(logp).scatter_(-1, order, ordered)
