"""AdamW against torch's, bfloat16 weights that move, state that survives a checkpoint."""

import math

import pytest
import torch
from torch import Tensor, nn

from grpo_engine.checkpoint import load_checkpoint, save_checkpoint
from grpo_engine.config import TrainConfig
from grpo_engine.optim import Optimizer, learning_rate

DECAY = TrainConfig(weight_decay=0.1)


def tensors(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def parameters(values: dict[str, Tensor], dtype=torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(x.detach().clone().to(dtype)) for name, x in values.items()}


def step(optimizer: Optimizer, gradients: dict[str, Tensor], lr: float) -> None:
    optimizer.zero_grad()
    for name, gradient in gradients.items():
        parameter = optimizer.parameters[name]
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step(lr)


SHAPES = {"layer.0.weight": (5, 3), "layer.1.bias": (4,)}
# Blocks of fewer than 4096 elements stay in 32 bits with bitsandbytes.
LARGE = {"layer.0.weight": (96, 64), "layer.1.bias": (7,)}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_float32_steps_are_those_of_torch(decay):
    values = tensors(0, **SHAPES)
    ours = Optimizer(parameters(values), TrainConfig(weight_decay=decay))
    theirs = parameters(values)
    reference = torch.optim.AdamW(theirs.values(), weight_decay=decay)
    for i in range(8):
        gradients, lr = tensors(10 + i, **SHAPES), 1e-2 / (i + 1)
        step(ours, gradients, lr)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        for name in SHAPES:
            assert torch.equal(ours.parameters[name], theirs[name])


def test_first_step_is_worked_out_by_hand():
    # Adam's first step is lr * g / (|g| + 1e-8), after the decay by lr * 0.1.
    optimizer = Optimizer({"w": nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))}, DECAY)
    step(optimizer, {"w": torch.tensor([0.5, -4.0, 0.0])}, 0.01)
    expected = torch.tensor([1 - 0.001 - 0.01, -2 + 0.002 + 0.01, 3 - 0.003])
    torch.testing.assert_close(optimizer.parameters["w"].detach(), expected, rtol=1e-6, atol=0)


def test_bfloat16_weights_move_although_no_single_step_is_visible():
    # Between 0.5 and 1 neighbours in bfloat16 are 1 / 256 apart: 3900 steps of 1e-6.
    start = 0.5 + torch.arange(128) / 256
    low = Optimizer(parameters({"w": start}, torch.bfloat16), TrainConfig())
    full = Optimizer(parameters({"w": start}), TrainConfig())
    gradient = {"w": torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)}
    for _ in range(200):
        step(low, gradient, 1e-6)
        step(full, gradient, 1e-6)
        assert torch.equal(low.parameters["w"], full.parameters["w"].bfloat16())
    # 2e-4 is less than half of the distance, so nothing is to be seen, but nothing is lost:
    assert torch.equal(low.parameters["w"], start.bfloat16())
    torch.testing.assert_close(low.masters["w"].detach(), start - 2e-4 * gradient["w"])
    # with 28 steps of 1e-4 more it is 3e-3, and every weight is nearer to its neighbour.
    for _ in range(28):
        step(low, gradient, 1e-4)
        step(full, gradient, 1e-4)
    assert torch.equal(low.parameters["w"], full.parameters["w"].bfloat16())
    assert bool((low.parameters["w"] != start.bfloat16()).all())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameter_without_gradient_is_not_touched(optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, weight_decay=0.5)
    values = tensors(0, used=(80, 64), frozen=(80, 64))
    ours = Optimizer(parameters(values, dtype), config)
    step(ours, tensors(1, used=(80, 64), frozen=(80, 64)), 1e-2)
    before = {name: p.detach().clone() for name, p in ours.parameters.items()}
    # With a momentum from before and a weight decay, a gradient of zero would move it.
    step(ours, tensors(2, used=(80, 64)), 1e-2)
    assert torch.equal(ours.parameters["frozen"], before["frozen"])
    assert not torch.equal(ours.parameters["used"], before["used"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_state_survives_a_checkpoint_bit_for_bit(tmp_path, optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1)
    ours = Optimizer(parameters(tensors(0, **LARGE), dtype), config)
    for i in range(3):
        step(ours, tensors(10 + i, **LARGE), 1e-2)
    saved, values = ours.state()
    folder = save_checkpoint(tmp_path, 3, {"optimizer": values}, saved, lambda _: None, keep=1)

    weights = {name: p.detach().clone() for name, p in ours.parameters.items()}
    again = Optimizer(parameters(weights, dtype), config)
    checkpoint = load_checkpoint(folder)
    again.load(checkpoint.tensors, checkpoint.values["optimizer"])
    for i in range(2):
        for each in (ours, again):
            step(each, tensors(20 + i, **LARGE), 1e-2)
        for name in LARGE:
            assert torch.equal(again.parameters[name], ours.parameters[name])
            if dtype == torch.bfloat16:
                assert torch.equal(again.masters[name], ours.masters[name])
            assert not torch.equal(again.parameters[name], weights[name])


def test_state_is_taken_over_in_memory_and_does_not_alias():
    ours = Optimizer(parameters(tensors(0, **LARGE), torch.bfloat16), TrainConfig())
    step(ours, tensors(1, **LARGE), 1e-3)
    saved, values = ours.state()
    copies = {name: x.clone() for name, x in saved.items()}
    step(ours, tensors(2, **LARGE), 1e-3)
    assert all(torch.equal(saved[name], copies[name]) for name in saved)
    assert not torch.equal(ours.state()[0]["layer.1.bias/master"], saved["layer.1.bias/master"])
    # Loading puts the earlier state back: the same step leads to the same place.
    second = ours.masters["layer.0.weight"].detach().clone()
    ours.load(saved, values)
    step(ours, tensors(2, **LARGE), 1e-3)
    assert torch.equal(ours.masters["layer.0.weight"], second)


def test_moments_of_8_bit_are_stored_in_8_bits():
    ours = Optimizer(parameters(tensors(0, **LARGE)), TrainConfig(optimizer="adamw8bit"))
    step(ours, tensors(1, **LARGE), 1e-3)
    saved, _ = ours.state()
    moments = [x for name, x in saved.items() if name.startswith("layer.0.weight/")]
    stored = [x for x in moments if x.numel() == 96 * 64]
    assert [x.dtype for x in stored] == [torch.uint8, torch.uint8]


def test_8_bit_steps_follow_those_of_32_bits():
    ours = Optimizer(parameters(tensors(0, **LARGE)), TrainConfig(optimizer="adamw8bit"))
    exact = Optimizer(parameters(tensors(0, **LARGE)), TrainConfig())
    for i in range(10):
        for each in (ours, exact):
            step(each, tensors(10 + i, **LARGE), 1e-3)
    start = tensors(0, **LARGE)["layer.0.weight"]
    moved, should = (x.parameters["layer.0.weight"].detach() - start for x in (ours, exact))
    # Dynamic 8-bit codes are about 2 digits; a step in a wrong direction would be off by 1 or 2.
    assert float((moved - should).norm() / should.norm()) < 0.1


def test_clip_returns_the_norm_before_and_scales_to_the_limit():
    ours = Optimizer(parameters({"a": torch.zeros(2), "b": torch.zeros(1)}), TrainConfig())
    ours.parameters["a"].grad = torch.tensor([3.0, 0.0])
    ours.parameters["b"].grad = torch.tensor([4.0])
    assert float(ours.clip(1.0)) == 5.0
    clipped = torch.cat([p.grad for p in ours.parameters.values()])
    torch.testing.assert_close(clipped, torch.tensor([0.6, 0.0, 0.8]), rtol=1e-5, atol=0)
    assert float(ours.clip(2.0)) == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(clipped, torch.cat([p.grad for p in ours.parameters.values()]))
    ours.parameters["b"].grad[0] = math.nan
    assert math.isnan(float(ours.clip(1.0)))


@pytest.mark.parametrize(
    ("step", "expected"),
    # 3 % of 200 steps: 6 steps of warm-up.
    [(0, 1 / 6), (1, 2 / 6), (4, 5 / 6), (5, 1.0), (6, 1.0), (100, 1.0), (199, 1.0)],
)
def test_rate_rises_over_the_warm_up_and_stays(step, expected):
    assert learning_rate(step, 2e-5, TrainConfig()) == pytest.approx(2e-5 * expected, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "expected"),
    # 20 steps of warm-up, then half a cosine over 80: cos(pi / 4), cos(pi / 2), cos(3 pi / 4).
    [
        (0, 0.05),
        (19, 1.0),
        (20, 1.0),
        (40, 0.5 + math.sqrt(0.5) / 2),
        (60, 0.5),
        (80, 0.5 - math.sqrt(0.5) / 2),
        (100, 0.0),
        (150, 0.0),
    ],
)
def test_rate_falls_with_the_cosine(step, expected):
    config = TrainConfig(steps=100, warmup=0.2, schedule="cosine")
    rate = learning_rate(step, 4e-6, config)
    assert rate == pytest.approx(4e-6 * expected, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(10, 0.03, [1.0] * 10), (4, 0.0, [1.0] * 4), (4, 1.0, [0.25, 0.5, 0.75, 1.0])],
)
def test_warm_up_of_no_step_and_of_all(steps, warmup, expected):
    config = TrainConfig(steps=steps, warmup=warmup)
    assert [learning_rate(k, 1.0, config) for k in range(steps)] == expected
