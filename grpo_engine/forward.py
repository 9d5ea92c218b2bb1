"""What a causal LM is made of: decoder, head without its module, and facts of its config."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import UserError


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: weight [V, D], bias [V] or None, softcap, scale."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers causal LM inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: nn.Module) -> Head:
    """The head of a causal LM, its softcap and scale read from the config."""
    causal = causal_lm(model)
    module, config = causal.get_output_embeddings(), causal.config.get_text_config()
    if module is None:
        raise UserError(f"{type(causal).__name__} has no output head")
    if hasattr(module, "lora_A") or hasattr(module, "token_adapter"):
        raise UserError(
            "an adapter on the output head (lm_head) is not supported, nor one on tokens of "
            "embeddings that are also the head: take it out of lora.targets, or merge the adapter"
        )
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return Head(module.weight, getattr(module, "bias", None), softcap, scale)


def context_length(model: nn.Module) -> int | None:
    """Tokens that the model's positions reach, prompt and completion together."""
    return getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)


def check_reach(model: nn.Module, prompt: int, completion: int) -> None:
    """Raises UserError where rotary factors would depend on the longest sequence of a batch.

    prompt, completion: tokens, of the longest of each that stand together.
    """
    config = causal_lm(model).config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    for kind in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        name, most = kind.get("rope_type") or "", None
        if name == "longrope":
            most = kind["original_max_position_embeddings"]
        elif "dynamic" in name:
            most = config.max_position_embeddings
        if most is not None and prompt + completion > most:
            raise UserError(
                f"{type(causal_lm(model)).__name__} has {name} rotary embeddings, whose factors "
                f"change beyond {most} tokens and then depend on what else is in the batch; a "
                f"prompt of {prompt} and {completion} of an answer pass that: set max_tokens to "
                f"at most {max(0, most - prompt)}, or shorten the prompts"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """eval() for a while; afterwards every module's training flag is exactly what it was.

    But for 8-bit linears: on a CPU those round in eval mode alone, and by what stands in the batch,
    so that neither ratios would begin at 1 nor samples have the log-probs of the trainer.
    """
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    for module in model.modules():
        module.training = type(module).__name__ == "Linear8bitLt"
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


def decoder_hidden(causal: nn.Module, **inputs: Any) -> Tensor:
    """Hidden states [B, T, D] before the head."""
    return causal.get_decoder()(**inputs, use_cache=False).last_hidden_state


def eos_ids(model: nn.Module, tokenizer: Any = None) -> frozenset[int]:
    """The ids that end a completion: those of the tokenizer and of the generation config."""
    generation = getattr(causal_lm(model), "generation_config", None)
    found: set[int] = set()
    for source in (tokenizer, generation, causal_lm(model).config):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def kv_bytes_per_token(model: nn.Module) -> int:
    """Bytes of keys and values that one token of one sample holds: 2 layers kv_heads head_dim."""
    config = causal_lm(model).config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * causal_lm(model).dtype.itemsize
