"""Models that can't be served: a sampler is refused by one clear line before anything is drawn."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)

from conftest import FAMILIES, make_model, make_tokenizer
from erratic import erratic_model
from grpo_engine import GroupSampler, UserError

SIZES = {
    "vocab_size": 75,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GROUPED = {
    **SIZES,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "head_dim": 8,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# The windows and chunks are longer than the probe, as those of real models are.
REFUSED = {
    "sinks": (
        GptOssConfig,
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
        "GptOss.* attention sinks",
    ),
    "ALiBi, own attention": (BloomConfig, SIZES, "Bloom.*2 layers, of which 0.*ALiBi"),
    "ALiBi, from the mask": (FalconConfig, {**SIZES, "alibi": True}, "Falcon.*attention needs"),
    "ALiBi, from the shape of the mask": (
        MptConfig,
        {"vocab_size": 75, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 96},
        "Mpt.*attention needs",
    ),
    "no attention": (
        MambaConfig,
        {"vocab_size": 75, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
        "Mamba.*without attention",
    ),
    "linear attention": (
        Qwen3NextConfig,
        {
            **GROUPED,
            **SHARED,
            **LINEAR,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "Qwen3Next.*linear_attention",
    ),
    "convolutions": (
        Lfm2Config,
        {**GROUPED, "layer_types": ["conv", "full_attention"]},
        "Lfm2.*conv",
    ),
    "chunks": (
        Llama4TextConfig,
        {
            **GROUPED,
            "intermediate_size_mlp": 64,
            "num_local_experts": 1,
            "attention_chunk_size": 32,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "Llama4.*chunked_attention",
    ),
    "a window in the mask alone": (
        PhimoeConfig,
        {**GROUPED, "num_local_experts": 2, "sliding_window": 32},
        "Phimoe.*sliding window of 32",
    ),
    "a window in the mask of some layers": (
        Qwen2MoeConfig,
        {
            **GROUPED,
            **SHARED,
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "Qwen2Moe.*sliding window of 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_before_it_samples(name):
    config_class, options, message = REFUSED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**options)).eval()
    with pytest.raises(UserError, match=message) as caught:
        GroupSampler(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_is_taken_with_a_window_longer_than_the_probe(family, dtype):
    windowed = "sliding_window" in FAMILIES[family][1]
    model = make_model(family, **({"sliding_window": 32} if windowed else {}))
    GroupSampler(model.to(dtype))


def odd_attention(scores, past):
    """Attention whose scores [T, T] and mask of visible keys are changed by these functions."""

    def attend(module, query, key, value, attention_mask, *, scaling, **_):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        away = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
        z = scores(query.float() @ key.float().mT * scaling, away)
        p = z.masked_fill(~past(away), -1e9).softmax(-1).to(value.dtype)
        return (p @ value).transpose(1, 2), None

    return attend


ODD = {
    "not causal": odd_attention(lambda z, away: z, lambda away: away >= -99),
    "a window of 4": odd_attention(lambda z, away: z, lambda away: (away >= 0) & (away < 4)),
    "a softcap": odd_attention(lambda z, away: 2 * torch.tanh(z / 2), lambda away: away >= 0),
    "a bias by distance": odd_attention(lambda z, away: z - 0.25 * away, lambda away: away >= 0),
    "another scale": odd_attention(lambda z, away: 1.25 * z, lambda away: away >= 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokenizer", [None, make_tokenizer()], ids=["ids", "text"])
@pytest.mark.parametrize("make", [make_model, erratic_model])
@pytest.mark.parametrize("name", ODD)
def test_attention_of_an_unknown_kind_is_refused_in_every_dtype(name, make, tokenizer, dtype):
    model = make().to(dtype)
    AttentionInterface.register(f"odd {name}", ODD[name])
    model.config._attn_implementation = f"odd {name}"
    with pytest.raises(UserError, match=r"LlamaForCausalLM attends.* \d+% in float32.* 5%"):
        GroupSampler(model, tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_attention_written_otherwise_is_taken(dtype):
    model = erratic_model().to(dtype)
    AttentionInterface.register("plain", odd_attention(lambda z, away: z, lambda away: away >= 0))
    model.config._attn_implementation = "plain"
    GroupSampler(model)
