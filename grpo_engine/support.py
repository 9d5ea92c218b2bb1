"""Which models can be served: a probe says no where a log-prob would be wrong.

It computes in float32 (`exact.py`): what rounding does to a real model is no reason to refuse it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .exact import in_float32
from .forward import causal_lm, context_length, decoder_hidden, evaluating, head_of
from .kernels.reference import head_logits
from .packed import PackedGroups, packed_hidden

KINDS = {"full_attention", "sliding_attention"}  # of layers
TEXT = "The quick brown fox jumps over a lazy dog, while seven wise owls look on from tall trees."
PROBE = 16  # tokens
# Of their size. Right ones differ by 1e-6 on a text, by 1e-4 on the most erratic ids of a model.
PROBE_ERROR = 0.05


def check_model(model: nn.Module, tokenizer: Any = None) -> None:
    """Raises UserError for a model that can't be served: the message says which part of it.

    tokenizer: makes the probe of a text; without it, of ids from all over the vocabulary.
    """
    name, config = type(causal_lm(model)).__name__, causal_lm(model).config.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} has layers without attention: not supported")
    # The probe is too short to see where chunked or sparse attention differs.
    if unknown := sorted(set(getattr(config, "layer_types", None) or []) - KINDS):
        raise UserError(f"{name} has layers of the kind {', '.join(unknown)}: not supported")
    ids = _probe_ids(model, tokenizer)
    check_head(model, ids)
    check_attention(model, ids)


def _probe_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    vocab = len(head_of(model).weight)
    count = min(PROBE, context_length(model) or PROBE)
    text = [] if tokenizer is None else tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    text = [token for token in text if token < vocab][:count]
    if len(set(text)) > count // 2:
        return text
    return [vocab * (2 * i + 1) // (2 * count) for i in range(count)]


@torch.no_grad()
def check_head(model: nn.Module, probe: list[int]) -> None:
    """Raises UserError for a model whose logits are not its head applied to its hidden states."""
    causal, head = causal_lm(model), head_of(model)
    hidden: list[Tensor] = []
    hook = causal.get_decoder().register_forward_hook(
        lambda _, __, out: hidden.append(out.last_hidden_state[0])
    )
    try:
        with evaluating(causal):
            ids = torch.tensor([probe], device=causal.device)
            theirs = causal(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    if not torch.isfinite(theirs).all():
        raise UserError(f"the logits of {type(causal).__name__} are not finite: damaged weights?")
    own = head_logits(hidden[-1], head.weight, head.bias, head.softcap, head.logit_scale)
    if not torch.allclose(own, theirs, rtol=2e-2, atol=2e-2 * float(theirs.std())):
        raise UserError(
            f"{type(causal).__name__} computes its logits in a way that is not known here "
            f"(not scale, bias or softcap of a linear head): they differ by up to "
            f"{float((own - theirs).abs().max()):.3g}, and its log-probs would be wrong"
        )


@torch.no_grad()
def check_attention(model: nn.Module, probe: list[int]) -> None:
    """Raises UserError for a model whose attention does not go the way of `group_attention`.

    Two completions that share a prompt, packed, are compared with the model's own forward of both.
    """
    causal, config = causal_lm(model), causal_lm(model).config.get_text_config()
    name, shared = type(causal).__name__, max(1, len(probe) // 4)
    prompt, completion = probe[:shared], probe[shared:]
    completions = [completion, completion[::-1]]
    seen: list[tuple[int, int | None]] = []
    with evaluating(causal), in_float32(causal.get_decoder()):
        try:
            ours = packed_hidden(
                causal, [(prompt, completions)], lambda layout: _Noting(layout, seen)
            )
        except (AttributeError, TypeError) as error:
            raise UserError(f"{name} does not pass on what attention needs: {error}") from error
        rows = torch.tensor([prompt + row for row in completions], device=causal.device)
        theirs = decoder_hidden(causal, input_ids=rows)[:, shared - 1 : -1].flatten(0, 1)
    if sorted(layer for layer, _ in seen) != list(range(config.num_hidden_layers)):
        raise UserError(
            f"{name} has {config.num_hidden_layers} layers, of which {len(dict(seen))} attend by "
            "transformers' attention interface: not supported (ALiBi? layers of another kind?)"
        )
    _check_windows(name, config, dict(seen))
    gap = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not gap <= PROBE_ERROR:
        raise UserError(
            f"{name} attends in a way that is not known here (not causal, sliding window or "
            f"softcap): its hidden states differ by {gap:.0%} in float32, where {PROBE_ERROR:.0%} "
            "are allowed, and its log-probs would be wrong; take another model"
        )


def _check_windows(name: str, config: Any, windows: dict[int, int | None]) -> None:
    """Some models window their mask alone: longer texts than the probe would be attended whole."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    if window and any(
        kind == "sliding_attention" and not windows[i] for i, kind in enumerate(kinds)
    ):
        raise UserError(
            f"{name} does not tell its attention of the sliding window of {window} tokens that its "
            "config has: not supported"
        )


@dataclass(frozen=True)
class _Noting(PackedGroups):
    """Writes down which layers came, and their windows."""

    seen: list[tuple[int, int | None]]

    def attend(self, layer: int, *args: Any) -> Tensor:
        self.seen.append((layer, args[-1]))
        return super().attend(layer, *args)
