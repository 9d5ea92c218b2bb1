"""A model that stands in for real weights, of which random ones have no trait."""

import torch
from torch import nn

from conftest import make_model

RARE = list(range(1, 9))


def erratic_model() -> nn.Module:
    """Hardly trained embeddings of its first ids among large ones, 16 layers of sharp attention.

    As SmolLM2 does, it doubles on the first ids in every few layers what bfloat16 has rounded, and
    is calm on others.
    """
    model = make_model(num_hidden_layers=16)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[: len(RARE) + 1] *= 0.02
        embeddings[len(RARE) + 1 :] *= 50
        for layer in model.get_decoder().layers:
            layer.self_attn.q_proj.weight *= 3
            layer.self_attn.k_proj.weight *= 3
    return model
