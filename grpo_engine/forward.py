"""From token ids to log-probs: the decoder's hidden states, and the head without its module."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .errors import UserError
from .ops import head_logits, token_logprob


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: weight [V, D], bias [V] or None, softcap, scale."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float

    def float(self) -> "Head":
        """The head in float32, in which logits are made: once for many calls."""
        bias = self.bias if self.bias is None else self.bias.float()
        return replace(self, weight=self.weight.float(), bias=bias)


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers causal LM inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: nn.Module) -> Head:
    """The head of a causal LM, its softcap and scale read from the config."""
    causal = causal_lm(model)
    module, config = causal.get_output_embeddings(), causal.config.get_text_config()
    if module is None:
        raise UserError(f"{type(causal).__name__} has no output head")
    if hasattr(module, "lora_A"):
        raise UserError(
            "LoRA on the output head (lm_head) is not supported: take it out of lora.targets"
        )
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return Head(module.weight, getattr(module, "bias", None), softcap, scale)


def context_length(model: nn.Module) -> int | None:
    """Tokens that the model's positions reach, prompt and completion together."""
    return getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)


def check_model(model: nn.Module) -> None:
    """Raises UserError for a model that can't be served: the message says which part of it."""
    causal = causal_lm(model)
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if not hasattr(config, "num_attention_heads") or any("attention" not in k for k in kinds):
        raise UserError(f"{type(causal).__name__} has layers without attention: not supported")
    if any("linear" in kind for kind in kinds):
        raise UserError(f"{type(causal).__name__} has linear-attention layers: not supported")
    check_head(model)


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


@contextmanager
def evaluating(model: nn.Module, *, as_trained: bool = False) -> Iterator[None]:
    """eval() for a while; afterwards every module's training flag is exactly what it was.

    `as_trained`: without dropout, but otherwise by the arithmetic of the training forward, so that
    a ratio of log-probs starts at exactly 1: 8-bit linears compute differently in eval mode.
    """
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    for module in model.modules() if as_trained else ():
        module.training = type(module).__name__ == "Linear8bitLt"
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


def decoder_hidden(causal: nn.Module, cache: object | None = None, **inputs: Tensor) -> Tensor:
    """Hidden states [B, T, D] before the head; `cache`: a transformers Cache that is extended."""
    decoder = causal.get_decoder()
    if cache is None:
        return decoder(**inputs, use_cache=False).last_hidden_state
    return decoder(
        **inputs, **{_cache_argument(type(decoder)): cache}, use_cache=True
    ).last_hidden_state


@functools.cache
def _cache_argument(decoder: type[nn.Module]) -> str:
    # transformers renamed it in 5.24.
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def completion_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperatures: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [N] of the completion tokens, sample after sample, differentiable.

    prompts, completions: token ids, one list a sample; temperatures: one a sample, 0 counts as 1.
    """
    causal = causal_lm(model)
    head = head_of(causal)
    hidden = _completion_hidden(causal, prompts, completions)
    lengths = torch.tensor([len(c) for c in completions])
    targets = torch.tensor([t for c in completions for t in c], dtype=torch.int64)
    tempered = torch.tensor([t or 1.0 for t in temperatures]).repeat_interleave(lengths)
    device = hidden.device
    return token_logprob(
        hidden.to(head.weight.dtype),
        head.weight,
        targets.to(device),
        bias=head.bias,
        temperature=tempered.to(device),
        softcap=head.softcap,
        logit_scale=head.logit_scale,
    )


def _completion_hidden(
    causal: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Tensor:
    """Hidden states [N, D]; row t predicts completion token t."""
    rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    # Padding stands on the right, where a causal model never sees it: no mask is needed.
    hidden = decoder_hidden(causal, input_ids=ids.to(causal.device))
    row = [i for i, c in enumerate(completions) for _ in c]
    at = [len(p) - 1 + t for p, c in zip(prompts, completions, strict=True) for t in range(len(c))]
    return hidden[row, at]
