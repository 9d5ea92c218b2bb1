"""Log-probs for training against plain forwards of each sequence alone, and the check of heads."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaForCausalLM,
    PhiConfig,
)

from conftest import FAMILIES, make_model
from grpo_engine import UserError
from grpo_engine.forward import head_of
from grpo_engine.packed import completion_logprobs
from grpo_engine.support import check_head
from oracles import stock_logprobs

# Prompts and completions of length 1, around gemma3's window of 8, and well beyond it; one of the
# completions holds the pad and EOS ids, one is empty.
PROMPTS = [[9], list(range(3, 10)), list(range(20, 29)), list(range(30, 60)), [4, 4], [7, 8]]
COMPLETIONS = [list(range(40, 60)), [12], [0, 1, 0, 1, 1], list(range(3, 11)), [], [70, 0]]
# Exact in float32, so that float64 comparisons see no rounding of them.
TEMPERATURES = [1.0, 0.625, 1.75, 0.5, 1.0, 0.0]

PROBE = [*range(3, 19)]

HEADS = {
    "gemma2-softcap": (Gemma2Config, {"final_logit_softcapping": 3.0, "sliding_window": 8}),
    "granite-scale": (GraniteConfig, {"logits_scaling": 4.0}),
    "cohere-scale": (CohereConfig, {"logit_scale": 0.25}),
    "phi-bias": (PhiConfig, {}),
    "gpt2-tied": (GPT2Config, {}),
}


def headed_model(name: str) -> nn.Module:
    """A random model of a family whose logits are more than weight times hidden state."""
    config_class, extra = HEADS[name]
    torch.manual_seed(3)
    config = config_class(
        vocab_size=75,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.3,
        **({"head_dim": 8} if config_class is Gemma2Config else {}),
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        nn.init.normal_(bias)
    return model


def separate_logprobs(model: nn.Module) -> torch.Tensor:
    """[N] by one forward a sample, in the order of the samples."""
    rows = zip(PROMPTS, COMPLETIONS, TEMPERATURES, strict=True)
    return torch.cat([stock_logprobs(model, p, c, t or 1.0) for p, c, t in rows])


def assert_logprobs_are_those_of_separate_forwards(model: nn.Module) -> None:
    with torch.no_grad():
        logp, _ = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURES)
        wanted = separate_logprobs(model)
    torch.testing.assert_close(logp.double(), wanted, atol=2e-5, rtol=0)
    assert logp.dtype == torch.float32 and len(logp) == sum(map(len, COMPLETIONS))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_separate_forwards(family):
    assert_logprobs_are_those_of_separate_forwards(make_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_separate_forwards(family):
    model = make_model(family).double()
    # Each token has its own weight, or errors of two tokens might cancel.
    weights = torch.randn(sum(map(len, COMPLETIONS)), dtype=torch.float64)
    parameters = dict(model.named_parameters())
    logp, _ = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURES)
    wanted_logp = separate_logprobs(model)
    # gemma2's own attention takes its softmax in float32 whatever the model's dtype.
    coarse = family == "gemma2"
    torch.testing.assert_close(logp, wanted_logp, atol=1e-5 if coarse else 1e-10, rtol=0)
    given = torch.autograd.grad((weights * logp).sum(), list(parameters.values()))
    wanted = torch.autograd.grad((weights * wanted_logp).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, given, wanted, strict=True):
        assert b.abs().max() > 1e-3, name
        # So are the norms' weights of both gemmas applied.
        coarse_here = coarse or (family == "gemma3" and "norm" in name)
        tolerance = 1e-6 if coarse_here else 1e-10
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1), name


@torch.no_grad()
def test_entropy_is_that_of_the_tempered_distribution():
    model = make_model()
    _, entropy = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURES)
    wanted = []
    for prompt, completion, temperature in zip(PROMPTS, COMPLETIONS, TEMPERATURES, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].double()
        p = (logits[len(prompt) - 1 : -1] / (temperature or 1.0)).softmax(-1)
        wanted.append(-(p * p.log()).sum(-1))
    torch.testing.assert_close(entropy.double(), torch.cat(wanted), atol=2e-5, rtol=0)


def test_an_empty_completion_adds_nothing_and_takes_no_place():
    model = make_model().double()
    alone, _ = completion_logprobs(model, PROMPTS[:2], COMPLETIONS[:2], [1.0, 1.0])
    prompts = [[5] * 40, PROMPTS[0], [6], PROMPTS[1], [8]]
    completions = [[], COMPLETIONS[0], [], COMPLETIONS[1], []]
    among, _ = completion_logprobs(model, prompts, completions, [1.0] * 5)
    torch.testing.assert_close(among, alone, atol=1e-10, rtol=0)
    nothing, entropy = completion_logprobs(model, [[5, 6], [7]], [[], []], [1.0, 0.5])
    assert nothing.tolist() == entropy.tolist() == []
    nothing.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_other_rows_of_the_batch_change_no_logprob(family):
    model = make_model(family)
    with torch.no_grad():
        alone, _ = completion_logprobs(model, PROMPTS[:1], COMPLETIONS[:1], TEMPERATURES[:1])
        batch, _ = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURES)
    torch.testing.assert_close(batch[: len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_scale_softcap_and_bias_of_a_head_are_those_of_the_stock_model(name):
    model = headed_model(name)
    check_head(model, PROBE)
    assert_logprobs_are_those_of_separate_forwards(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2-softcap", "granite-scale", "cohere-scale", "phi-bias"])
def test_these_heads_would_be_wrong_without_their_extra(name):
    model = headed_model(name)
    wanted, head = separate_logprobs(model), head_of(model)
    config = model.config
    if name == "phi-bias":
        head.bias.zero_()
    off = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
    for field in off.keys() & vars(config).keys():
        setattr(config, field, off[field])
    logp, _ = completion_logprobs(model, PROMPTS, COMPLETIONS, TEMPERATURES)
    assert (logp - wanted).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_heads_pass_the_check_in_every_dtype(family, dtype):
    model = make_model(family).to(dtype).train()
    check_head(model, PROBE)
    assert all(module.training for module in model.modules())


class OddLlama(LlamaForCausalLM):
    """Changes its logits in a way that no config says."""

    change = staticmethod(lambda logits: logits)

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.change(out.logits)
        return out


CHANGES = {
    "scaled": lambda z: z * 1.1,
    "softcapped": lambda z: 2 * torch.tanh(z / 2),
    "shifted": lambda z: z + torch.linspace(0, 3, z.shape[-1]),
    "one token forbidden": lambda z: z.index_fill(-1, torch.tensor([30]), -1e9),
    "not finite": lambda z: z * float("nan"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_check_refuses_logits_that_are_computed_in_an_unknown_way(name, monkeypatch):
    model = OddLlama(make_model().config)
    check_head(model, PROBE)
    monkeypatch.setattr(OddLlama, "change", staticmethod(CHANGES[name]))
    with pytest.raises(UserError, match="OddLlama") as caught:
        check_head(model, PROBE)
    assert "\n" not in str(caught.value)


def test_the_check_refuses_a_config_that_the_model_does_not_follow():
    model = make_model()
    model.config.logit_scale = 0.5  # Llama reads no such field
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        check_head(model, PROBE)
