"""Llama models of random weights in given shapes, and folders of them for `grpo train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import require

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, FIRST_WORD = 0, 1, 2  # token ids
POSITIONS = 8192
# Larger than the usual 0.02, so that logits are not all alike and a wrong prefix shows in them.
INITIALIZER_RANGE = 0.05


@dataclass(frozen=True)
class ModelShape:
    """A decoder with tied embeddings; its heads are of hidden / heads.

    most_rounds: of timing, where a call takes minutes.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float = 10_000.0
    most_rounds: int | None = None

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that a token holds in all layers."""
        head_dim = self.hidden // self.heads
        return 2 * self.layers * self.kv_heads * head_dim * getattr(torch, dtype).itemsize


# 135m: config.json of HuggingFaceTB/SmolLM2-135M; 135m-4: four of its thirty layers.
MODELS = {
    "tiny": ModelShape(96, 32, 64, 2, 4, 2),
    "4m": ModelShape(4096, 256, 688, 4, 4, 2),
    "135m-4": ModelShape(49_152, 576, 1536, 4, 9, 3, 100_000.0, most_rounds=3),
    "135m": ModelShape(49_152, 576, 1536, 30, 9, 3, 100_000.0, most_rounds=3),
}


def build(
    name: str, dtype: str = "float32", device: torch.device | str = "cpu", eos: int | None = None
) -> "LlamaForCausalLM":
    """A model of MODELS with seeded weights, in eval mode; without `eos` nothing ends a completion.

    Raises UserError without transformers.
    """
    transformers = require("transformers", "train", "a benchmark with a model")
    shape = MODELS[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    return model.to(device, getattr(torch, dtype)).eval()


def random_prompts(name: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` words each, of uniformly drawn token ids, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    words = (FIRST_WORD, MODELS[name].vocab)
    return torch.randint(*words, (count, length), generator=generator).tolist()


def save_folder(name: str, folder: Path) -> None:
    """The model, float32, with a tokenizer of one word a token: `w17` is token 17."""
    build(name, eos=EOS).save_pretrained(folder)
    make_tokenizer(MODELS[name].vocab).save_pretrained(folder)


def text_of(ids: list[int]) -> str:
    """What the tokenizer of `save_folder` encodes as these ids."""
    return " ".join(f"w{i}" for i in ids)


def make_tokenizer(vocab: int) -> "PreTrainedTokenizerFast":
    """Words apart by spaces, PAD and EOS."""
    tokenizers = require("tokenizers", "train", "a benchmark with a model")
    transformers = require("transformers", "train", "a benchmark with a model")
    special = {"<pad>": PAD, "<eos>": EOS}
    words = special | {f"w{i}": i for i in range(FIRST_WORD, vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
