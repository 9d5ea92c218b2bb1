"""Which models can be served: a probe says no where a log-prob would be wrong."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .forward import causal_lm, context_length, decoder_hidden, evaluating, head_of
from .kernels.reference import head_logits
from .packed import PackedGroups, packed_hidden

KINDS = {"full_attention", "sliding_attention"}  # of layers
PROBE = 8  # tokens
PROBE_ERROR = 0.05  # of their size; bfloat16 and 8-bit linears round differently in another batch


def check_model(model: nn.Module) -> None:
    """Raises UserError for a model that can't be served: the message says which part of it."""
    name, config = type(causal_lm(model)).__name__, causal_lm(model).config.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} has layers without attention: not supported")
    # The probe is too short to see where chunked or sparse attention differs.
    if unknown := sorted(set(getattr(config, "layer_types", None) or []) - KINDS):
        raise UserError(f"{name} has layers of the kind {', '.join(unknown)}: not supported")
    check_head(model)
    check_attention(model)


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raises UserError for a model whose logits are not its head applied to its hidden states."""
    causal, head = causal_lm(model), head_of(model)
    count = min(8, context_length(model) or 8)
    ids = torch.arange(1, count + 1, device=head.weight.device)[None] % len(head.weight)
    with evaluating(causal):
        hidden = decoder_hidden(causal, input_ids=ids)
        own = head_logits(hidden[0], head.weight, head.bias, head.softcap, head.logit_scale)
        theirs = causal(input_ids=ids, use_cache=False).logits[0].float()
    if not torch.isfinite(theirs).all():
        raise UserError(f"the logits of {type(causal).__name__} are not finite: damaged weights?")
    if not torch.allclose(own, theirs, rtol=2e-2, atol=2e-2 * float(theirs.std())):
        raise UserError(
            f"{type(causal).__name__} computes its logits in a way that is not known here "
            "(not scale, bias or softcap of a linear head); its log-probs would be wrong"
        )


@torch.no_grad()
def check_attention(model: nn.Module) -> None:
    """Raises UserError for a model whose attention does not go the way of `group_attention`.

    Two completions that share a prompt, packed, are compared with the model's own forward of each.
    """
    causal, config = causal_lm(model), causal_lm(model).config.get_text_config()
    name, vocab = type(causal).__name__, len(head_of(model).weight)
    count = min(PROBE, context_length(model) or PROBE)
    up = [i % vocab for i in range(1, count + 1)]
    rows = up, [up[0], *up[:0:-1]]
    seen: list[tuple[int, int | None]] = []
    with evaluating(causal):
        try:
            ours = packed_hidden(
                causal, [(up[:1], [row[1:] for row in rows])], lambda layout: _Noting(layout, seen)
            )
        except (AttributeError, TypeError) as error:
            raise UserError(f"{name} does not pass on what attention needs: {error}") from error
        theirs = [
            decoder_hidden(causal, input_ids=torch.tensor([row], device=causal.device))[0, :-1]
            for row in rows
        ]
    if sorted(layer for layer, _ in seen) != list(range(config.num_hidden_layers)):
        raise UserError(
            f"{name} has {config.num_hidden_layers} layers, of which {len(dict(seen))} attend by "
            "transformers' attention interface: not supported (ALiBi? layers of another kind?)"
        )
    _check_windows(name, config, dict(seen))
    ours, theirs = ours.float(), torch.cat(theirs).float()
    if float((ours - theirs).norm()) > PROBE_ERROR * float(theirs.norm()):
        raise UserError(
            f"{name} attends in a way that is not known here (not causal, sliding window or "
            "softcap); its log-probs would be wrong"
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
