"""A model's hidden states by the sampler's route, its modules as they are or in C++."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_engine.attention import routed
from grpo_engine.forward import causal_lm, decoder_hidden
from grpo_engine.fused import fused
from grpo_engine.kernels import reference_decode

IDS = torch.tensor([[9, 3, 70, 4, 4, 12, 60, 33, 8, 51, 20, 7, 7, 41, 2, 5, 66, 11]])


@dataclass
class OneSequence:
    """The kwarg `group`: causal attention by its definition; which layers asked is kept."""

    layers: list

    def attend(self, layer, q, k, v, scale, softcap, window) -> Tensor:
        self.layers.append(layer)
        args = [len(q)], [[]], scale, softcap, window
        return reference_decode.grouped_attention(q, k, v, *args)


def by_route(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    """Hidden states [n, D] by the sampler's route, whatever runs the modules."""
    group = OneSequence([])
    with routed(causal_lm(model)):
        positions = torch.arange(ids.shape[1])[None]
        hidden = decoder_hidden(
            causal_lm(model), input_ids=ids, position_ids=positions, group=group
        )
    assert group.layers == [0, 1]
    return hidden[0]


def in_cpp(model: nn.Module) -> Tensor:
    with fused(causal_lm(model)):
        return by_route(model)


def replaced(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if "forward" in vars(m)}


def names_in_cpp(model: nn.Module) -> set[str]:
    with fused(causal_lm(model)):
        found = set(replaced(model))
    assert not replaced(model)
    return found


def assert_near(given: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """share: of the largest number."""
    assert given.dtype == wanted.dtype
    assert (given - wanted).abs().max() <= share * wanted.abs().max()
