"""Small tensors of the types that the ops take."""

import torch


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def f32(x):
    return torch.tensor(x, dtype=torch.float32)
