"""The training forward and backward with the prompt of a group once, against G whole sequences."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import grpo_engine as ge

from . import models
from .harness import Case, Expected, Provider, Step

if TYPE_CHECKING:
    from .sampler_suite import Shape

TOLERANCE = 1e-4
MIB = 1 << 20

Forward = Callable[[nn.Module], Tensor]


class Problem:
    """Prompts, completions and a fixed random factor [N, D] of the hidden states in the loss."""

    def __init__(self, shape: "Shape", device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = models.build(shape.model, shape.dtype, device)
        words = partial(models.random_prompts, shape.model)
        self.prompts = words(shape.prompts, shape.prompt)
        samples = words(shape.prompts * shape.group, shape.new, seed=1)
        self.completions = [
            samples[i : i + shape.group] for i in range(0, len(samples), shape.group)
        ]
        generator = torch.Generator().manual_seed(2)
        size = (len(samples) * shape.new, models.MODELS[shape.model].hidden)
        self.factor = torch.randn(size, generator=generator).to(device)

    @cached_property
    def batch(self) -> Tensor:
        """[samples, prompt + new] every sample with its prompt before it."""
        pairs = zip(self.prompts, self.completions, strict=True)
        rows = [prompt + sample for prompt, group in pairs for sample in group]
        return torch.tensor(rows, device=self.device)

    def whole(self, model: nn.Module) -> Tensor:
        """Hidden states [N, D] by the model's own forward; row t predicts completion token t."""
        hidden = model.get_decoder()(input_ids=self.batch, use_cache=False).last_hidden_state
        return hidden[:, self.shape.prompt - 1 : -1].flatten(0, 1)

    def expected(self) -> dict[str, Expected]:
        """In float64. Errors of hidden states by row, of a gradient by its parameter's largest."""
        model = models.build(self.shape.model, "float64", self.device)
        hidden = self.whole(model)
        gradients = torch.autograd.grad(
            (hidden * self.factor.double()).sum(), list(model.parameters())
        )
        hidden = hidden.detach()
        largest = [g.abs().max().expand(g.numel()) for g in gradients]
        return {
            "hidden": Expected(hidden, TOLERANCE, hidden.norm(dim=-1)),
            "gradient": Expected(flat(gradients), TOLERANCE, torch.cat(largest)),
        }


def cases(shape: "Shape", device: torch.device) -> list[Case]:
    """One: the gradient of all parameters. `whole` is the model's own forward."""
    problem = cache(lambda: Problem(shape, device))
    ways = {
        "ours-prompt-once": partial(_ours, True),
        "ours-packed": partial(_ours, False),
        "whole": _whole,
    }
    return [
        Case(
            suite="sampler",
            name="prompt-once",
            shape=shape.used(),
            device=device,
            inputs=problem,
            expected=lambda: problem().expected(),
            providers=tuple(_provider(name, forward) for name, forward in ways.items()),
            # What the longer way puts through the model, whatever way it goes.
            work=shape.prompts * shape.group * (shape.prompt + shape.new),
            rate_unit="tokens/s",
            rate_scale=1.0,
            figures=("saved_mib", "saved_of_whole"),
            most_rounds=models.MODELS[shape.model].most_rounds,
        )
    ]


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> tuple[Tensor, int]:
    """The result of `forward`, and the bytes that autograd keeps for it beside the parameters.

    Tensors that are views of one storage count once, with all of it.
    """
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return result, sum(storage.nbytes() for storage in saved.values())


def flat(tensors: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    """All elements one after the other."""
    return torch.cat([x.flatten() for x in tensors])


def _provider(name: str, forward: Callable[[Problem], Forward]) -> Provider:
    missing = name.startswith("ours") and not hasattr(ge, "group_hidden")
    return Provider(
        name,
        partial(_step, forward),
        check=partial(_check, forward),
        unavailable="this version has no group_hidden" if missing else "",
    )


def _ours(shared: bool, problem: Problem) -> Forward:
    def forward(model: nn.Module) -> Tensor:
        hidden, _ = ge.group_hidden(
            model, problem.prompts, problem.completions, shared_prompt=shared
        )
        return hidden

    return forward


def _whole(problem: Problem) -> Forward:
    return problem.whole


def _step(forward: Callable[[Problem], Forward], problem: Problem) -> Step:
    model, hidden_of = problem.model, forward(problem)
    parameters = list(model.parameters())

    def step() -> dict[str, Tensor]:
        hidden = hidden_of(model)
        torch.autograd.grad((hidden * problem.factor).sum(), parameters)
        return {}

    return step


def _check(forward: Callable[[Problem], Forward], problem: Problem) -> Step:
    model, hidden_of = problem.model, forward(problem)

    def step() -> dict[str, Tensor]:
        _, whole = saved_bytes(lambda: problem.whole(model), model)
        hidden, saved = saved_bytes(lambda: hidden_of(model), model)
        gradients = torch.autograd.grad((hidden * problem.factor).sum(), list(model.parameters()))
        return {
            "hidden": hidden,
            "gradient": flat(gradients),
            "saved_mib": torch.tensor(saved / MIB),
            "saved_of_whole": torch.tensor(saved / whole),
        }

    return step
