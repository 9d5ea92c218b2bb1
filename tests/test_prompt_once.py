"""The training forward that runs a prompt once for its group, against one forward a sample."""

from collections.abc import Sequence

import peft
import pytest
import torch
from torch import Tensor, nn

from conftest import FAMILIES, make_model
from grpo_engine import group_hidden
from grpo_engine.forward import causal_lm
from grpo_engine.packed import completion_logprobs
from oracles import stock_logprobs

# Around the window of 8 that some families have: prompts shorter, longer and of one token,
# completions of one token, of none, longer than the window, and two that are the same.
PROMPTS = [[9], list(range(20, 29)), list(range(30, 60))]
COMPLETIONS = [
    [list(range(40, 52)), [12]],
    [[0, 1, 0, 1, 1], [], list(range(3, 13))],
    [list(range(50, 70)), [70, 8, 9], [70, 8, 9]],
]
SAMPLES = [(p, c) for p, many in zip(PROMPTS, COMPLETIONS, strict=True) for c in many]
TEMPERATURES = [1.0, 0.625, 1.75, 0.5, 1.0, 0.75, 1.0, 2.0]
TOKENS = sum(len(c) for _, c in SAMPLES)
# Of each token its own, or errors of two tokens might cancel.
WEIGHTS = torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def in_training(family: str, lora: bool) -> nn.Module:
    """Float64, in training mode; with a LoRA on every linear layer that is not 0."""
    model = make_model(family)
    if lora:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    return model.double().train()


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """By backward(): reentrant checkpoints know no other way."""
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_near(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To what float32 resolves: in it the models' norms (and gemma2's softmax) compute whatever the
    dtype, and the gradient of a shared row is rounded as a sum, not by summand."""
    assert given.keys() == wanted.keys()
    for name, a in given.items():
        b = wanted[name]
        assert b.abs().max() > 1e-4, name
        assert (a - b).abs().max() <= 1e-6 * b.abs().max(), name


def packed_logprobs(model: nn.Module, samples: Sequence[tuple] = SAMPLES) -> Tensor:
    prompts, completions = zip(*samples, strict=True)
    return completion_logprobs(model, prompts, completions, TEMPERATURES)[0]


def count_tokens(model: nn.Module) -> list[int]:
    """The tokens of each forward from now on."""
    passed: list[int] = []
    causal_lm(model).get_decoder().register_forward_pre_hook(
        lambda _, args, inputs: passed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    return passed


@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "not reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_forward_a_sample(family, lora, checkpointing):
    model = in_training(family, lora)
    stock = [stock_logprobs(model, *s, t) for s, t in zip(SAMPLES, TEMPERATURES, strict=True)]
    wanted = gradients(model, (WEIGHTS * torch.cat(stock)).sum())
    layer_runs = []
    if checkpointing != "off":
        causal_lm(model).gradient_checkpointing_enable({"use_reentrant": checkpointing[0] == "r"})
        causal_lm(model).enable_input_require_grads()  # what reentrant checkpoints of a LoRA need
        causal_lm(model).model.layers[0].self_attn.register_forward_pre_hook(
            lambda *_: layer_runs.append(1)
        )
    passed = count_tokens(model)
    attention = causal_lm(model).config._attn_implementation
    given = gradients(model, (WEIGHTS * packed_logprobs(model)).sum())
    assert_near(given, wanted)
    assert passed == [sum(map(len, PROMPTS)) + TOKENS]
    assert len(layer_runs) == (0 if checkpointing == "off" else 2)  # it was run again
    # And the model's own forward is as it was.
    assert causal_lm(model).config._attn_implementation == attention
    again = [stock_logprobs(model, *s, t) for s, t in zip(SAMPLES, TEMPERATURES, strict=True)]
    assert_near(gradients(model, (WEIGHTS * torch.cat(again)).sum()), wanted)


@pytest.mark.parametrize("shared", [True, False, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_their_gradients_shared_or_not(family, shared):
    model = in_training(family, lora=False)
    decoder, weights = model.get_decoder(), torch.outer(WEIGHTS, torch.linspace(-1, 1, 32))

    def of_decoder(value: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        value.backward()
        return {name: p.grad.clone() for name, p in decoder.named_parameters()}

    rows = [
        decoder(torch.tensor([[*p, *c]]), use_cache=False).last_hidden_state[0, len(p) - 1 : -1]
        for p, c in SAMPLES
    ]
    hidden, index = group_hidden(model, PROMPTS, COMPLETIONS, shared)
    coarse = family in ("gemma2", "gemma3")
    torch.testing.assert_close(hidden, torch.cat(rows), atol=1e-5 if coarse else 1e-10, rtol=0)
    wanted = of_decoder((weights * torch.cat(rows)).sum())
    assert_near(of_decoder((weights * hidden).sum()), wanted)
    assert index.cu_seqlens.diff().tolist() == [len(c) for _, c in SAMPLES]
    assert index.cu_groups.diff().tolist() == [2, 3, 3]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_changes_no_bit_of_another(family):
    model = make_model(family)
    lengths = [len(c) for _, c in SAMPLES]
    before = packed_logprobs(model).split(lengths)
    for i, (prompt, completion) in enumerate(SAMPLES):
        changed = list(SAMPLES)
        changed[i] = prompt, [(7 * token + 5) % 75 for token in completion]
        after = packed_logprobs(model, changed).split(lengths)
        for j, (x, y) in enumerate(zip(after, before, strict=True)):
            assert torch.equal(x, y) == (j != i or not lengths[i])


@torch.no_grad()
@pytest.mark.parametrize(
    ("own", "passed"),
    [(7, 6 + 2 * 7), (8, 2 * (6 + 8))],  # 2 (6 + 7) / (6 + 2 * 7) is 1.3, 28 / 22 is less
)
@pytest.mark.parametrize("family", FAMILIES)
def test_below_a_gain_of_1_3_every_sample_has_its_own_prompt(family, own, passed):
    model = make_model(family)
    prompts, completions = [PROMPTS[2][:6]], [[list(range(9, 9 + own)), list(range(own))]]
    tokens = count_tokens(model)
    auto, _ = group_hidden(model, prompts, completions)
    shared, _ = group_hidden(model, prompts, completions, True)
    plain, _ = group_hidden(model, prompts, completions, False)
    assert tokens == [passed, 6 + 2 * own, 2 * (6 + own)]
    assert torch.equal(auto, shared if own == 7 else plain)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
