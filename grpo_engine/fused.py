"""Sampling on a CPU: modules of the model that C++ does in fewer and faster ops.

A decode step of a small model is mostly Python and small ops, and a CPU without units for bfloat16
makes its products slowly. For the time of a `generate`, modules whose results C++ reproduces run
by it: each kind of module is tried against its own forward first, and stays as it is if it differs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from . import _C
from .attention import GroupState, routed
from .cpu_layers import DTYPES, gated, linear, rms_norm, rotate

Forward = Callable[..., Any]
Maker = Callable[[nn.Module], Forward] | None
# By module: what it was like, and what makes its forward, None if C++ gave other results.
_tried: WeakKeyDictionary[nn.Module, tuple[Any, Maker]] = WeakKeyDictionary()
# The rows of a trial differ in size: an epsilon in another place shows in small ones, numbers that
# are clipped in large ones.
SIZES = (0.1, 1.0, 10.0, 100.0)
NORM_SIZES = (0.001, 0.1, 1.0, 100.0)
# Of the largest number of a row: by how much sums in another order may differ.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@contextmanager
def fused(causal: nn.Module) -> Iterator[None]:
    """Modules of the decoder run in C++ where they can; without gradient, on the CPU alone."""
    decoder, replaced = causal.get_decoder(), []
    try:
        if decoder.device.type == "cpu" and not _has_any_global_hook():
            # Parents come first: they are tried while their parts are still what they were.
            with torch.random.fork_rng(devices=[]), routed(causal):
                for module in decoder.modules():
                    if (forward := _forward_of(module)) is not None:
                        replaced.append((module, forward))
        for module, forward in replaced:
            module.forward = forward
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


def _forward_of(module: nn.Module) -> Forward | None:
    """What gives the results of the module's own forward; None: nothing here does."""
    if "forward" in vars(module):  # someone else's
        return None
    if type(module) is nn.Linear:
        return _linear(module)
    like = [p.dtype for p in module.parameters()], getattr(module, "act_fn", None)
    if module not in _tried or _tried[module][0] != like:
        try:
            _tried[module] = like, _try(module)
        except Exception:  # it, or what stands in for it, takes no such inputs
            _tried[module] = like, None
    maker = _tried[module][1]
    return None if maker is None else maker(module)


def _try(module: nn.Module) -> Maker:
    if type(module).__name__.endswith("RMSNorm"):
        return _try_norm(module)
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return _try_mlp(module)
    if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
        return _try_attention(module)
    return None


def _direct(module: nn.Module) -> Forward:
    """Calls the module, past its hooks if it has none."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module
    return _forward_of(module) or module


def _linear(module: nn.Linear) -> Forward | None:
    weight, bias = module.weight.detach(), module.bias
    slow_in_torch = weight.dtype != torch.bfloat16 or not _C.has_bfloat16_units()
    if weight.dtype not in DTYPES or not weight.is_contiguous() or not slow_in_torch:
        return None
    return partial(linear, weight=weight, bias=bias)


def _try_norm(module: nn.Module) -> Maker:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1 or weight.dtype not in DTYPES:
        return None
    x = _rows(len(weight), weight.dtype, NORM_SIZES)
    variants = [partial(_norm, gemma=gemma) for gemma in (False, True)]
    return next((v for v in variants if _same(module(x), v(module)(x))), None)


def _norm(module: nn.Module, gemma: bool) -> Forward:
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return partial(rms_norm, weight=module.weight.detach(), epsilon=epsilon, gemma=gemma)


def _try_mlp(module: nn.Module) -> Maker:
    x = _inputs(module.gate_proj)
    if x is None:
        return None
    # In float32: half precision can't tell the forms of GELU apart.
    z = torch.linspace(-8, 8, 102).view(2, -1)
    known = {False: functional.silu(z), True: functional.gelu(z, approximate="tanh")}
    variants = [partial(_mlp, gelu=g) for g, y in known.items() if _same(module.act_fn(z), y)]
    return next((v for v in variants if _same(module(x), v(module)(x))), None)


def _mlp(module: nn.Module, gelu: bool) -> Forward:
    gate, up, down = map(_direct, (module.gate_proj, module.up_proj, module.down_proj))
    return lambda x: down(gated(gate(x), up(x), gelu))


class _Trial:
    """Stands in for the attention itself: results that tell q, k and v apart."""

    arguments: tuple[int, float, float | None, int | None]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        self.arguments = layer, scale, softcap, window
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return q + 2 * k + 3 * v


def _try_attention(module: nn.Module) -> Maker:
    x = _inputs(module.q_proj)
    if x is None or not hasattr(module, "head_dim"):
        return None
    turns = torch.randn(2, 1, len(x), module.head_dim).to(x.dtype)
    inputs = {
        "hidden_states": x[None],
        "position_embeddings": (turns[0], turns[1]),
        "attention_mask": None,
    }
    trial = _Trial()
    wanted = module(**inputs, group=trial)[0]
    variants = [
        partial(_attention, arguments=trial.arguments, rotates=rotates) for rotates in (True, False)
    ]
    return next(
        (v for v in variants if _same(wanted, v(module)(**inputs, group=_Trial())[0])), None
    )


def _attention(
    module: nn.Module,
    arguments: tuple[int, float, float | None, int | None],
    rotates: bool,
) -> Forward:
    layer, *scores = arguments
    dim, stock = module.head_dim, type(module).forward
    project_q, project_k, project_v, project_out = map(
        _direct, (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    )
    norm_q, norm_k = (
        _direct(norm) if (norm := getattr(module, name, None)) is not None else None
        for name in ("q_norm", "k_norm")
    )

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        group: GroupState,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = (x[0] for x in position_embeddings)
        if cos.shape[-1] != dim or cos.dtype != hidden_states.dtype:
            return stock(module, hidden_states, position_embeddings, group=group, **rest)
        tokens = hidden_states.shape[1]
        q, k, v = (
            project(hidden_states).view(tokens, -1, dim)
            for project in (project_q, project_k, project_v)
        )
        if norm_q is not None:
            q, k = norm_q(q), norm_k(k)
        if rotates:
            rotate(q, cos, sin)
            rotate(k, cos, sin)
        out = group.attend(layer, q, k, v, *scores)
        return project_out(out.reshape(1, tokens, -1)), None

    return forward


def _inputs(projection: nn.Module) -> Tensor | None:
    """[n, K] for a linear layer or what is wrapped around one; None for unknown dtypes."""
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dtype not in DTYPES:
        return None
    return _rows(projection.in_features, weight.dtype, SIZES)


def _rows(width: int, dtype: torch.dtype, sizes: tuple[float, ...]) -> Tensor:
    return (torch.tensor(sizes)[:, None] * torch.randn(len(sizes), width)).to(dtype)


def _same(wanted: Tensor, given: Tensor) -> bool:
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    finite = wanted.isfinite().all(-1)  # large rows of float16 may not be
    wanted, given, tolerance = (
        wanted[finite].float(),
        given[finite].float(),
        TOLERANCE[wanted.dtype],
    )
    sizes = wanted.abs().amax(-1)
    near = (wanted - given).abs().amax(-1) <= tolerance * sizes
    return bool(len(sizes) > 1 and (near & (sizes > 0)).all())  # zeros tell nothing
