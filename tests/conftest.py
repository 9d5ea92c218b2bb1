"""Tiny random models of several families, tokenizers made here, and run folders."""

import json
import os
from pathlib import Path

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

torch.set_num_threads(1)  # tests run side by side, and one thread keeps float sums in one order

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
CHARS = "0123456789+=-*?. abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:#\n"
# In each, what tells it from Llama is on and large enough to matter; WINDOW is shorter than the
# prompts of the tests.
WINDOW = 8
GEMMA = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            **GEMMA,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": False,  # tied, it would say its last token again
        },
    ),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "phi3": (Phi3Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),  # the second layer is without RoPE
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
}


def make_tokenizer(bos: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token a character; with `bos`, raw text gets a BOS; with `chat`, a template that does."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, BOS, *CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        **({"bos_token": BOS} if bos else {}),
    )
    if chat:
        made.chat_template = (
            ("{{ bos_token }}" if bos else "")
            + "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}"
        )
    return made


def make_model(
    family: str = "llama", seed: int = 0, std: float = 0.3, **changes
) -> torch.nn.Module:
    """A random causal LM of 2 layers. `std`: large enough that its logits are not all alike."""
    config_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        **{
            "vocab_size": len(CHARS) + 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            "initializer_range": std,
            **extra,
            **changes,
        }
    )
    return AutoModelForCausalLM.from_config(config).eval()


def save_model_folder(folder: Path, family: str = "llama", **tokenizer_options: bool) -> Path:
    """A folder as `grpo train` takes it."""
    make_model(family).save_pretrained(folder)
    make_tokenizer(**tokenizer_options).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer; not to be written to."""
    return save_model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def poisoned_memory():
    """torch.empty is full of NaN: what is not written is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
