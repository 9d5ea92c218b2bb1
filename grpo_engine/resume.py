"""What must hold before a run goes on: the same config, the same data, the same policy."""

import json
import os
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from .errors import UserError
from .forward import context_length, evaluating
from .packed import completion_logprobs
from .paths import map_paths

# Keys that may be changed on purpose in the middle of a run; a dot at the end: a whole section. A
# resume is bitwise if those that enter a step (steps under a schedule or warm-up, lr,
# max_grad_norm, token_budget) are not.
FREE = (
    "train.steps train.lr train.max_grad_norm train.eval_every train.checkpoint_every "
    "train.keep_checkpoints train.out train.token_budget train.gradient_checkpointing "
    "data.eval_path data.eval_limit data.regression_path model.device train.audit_every "
    "train.tensorboard scoring.workers scoring.max_failed early_stop.evaluations "
    "early_stop.min_gain guards."
).split()
PROBE_TOKENS = 64
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # nats, across machines


def check_same_config(stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises UserError naming the keys in which a resumed run would differ."""
    # Paths by their last part: a run may move, and what lies there is compared by what it holds.
    stored, given = (map_paths(values, os.path.basename) for values in (stored, given))
    # Both as JSON, which has texts alone as keys and no tuples; a NaN would not equal itself.
    stored, given = (
        _flat(json.loads(json.dumps(values), parse_constant=str)) for values in (stored, given)
    )
    changed = [
        key
        for key in sorted(stored.keys() | given.keys())
        if not _is_free(key) and stored.get(key) != given.get(key)
    ]
    if changed:
        key = changed[0]
        raise UserError(
            f"--resume with another {', '.join(changed)} ({key} was {stored.get(key)!r}, now "
            f"{given.get(key)!r}); put it back, or start a new run with another train.out"
        )


def _is_free(key: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in FREE)


def check_same_data(stored: str, given: str) -> None:
    """Raises UserError if the tasks are not those that the run began with."""
    if stored != given:
        raise UserError(
            "the data changed since the checkpoint was written; put it back, or start a new run "
            "with another train.out"
        )


def check_same_prompt(stored: str, given: str) -> None:
    """Raises UserError, with the difference, if the first prompt is another text than it was."""
    if stored != given:
        pairs = zip(stored, given, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        was, now = (text[max(0, same - 20) : same + 40] for text in (stored, given))
        raise UserError(
            f"the prompts are sent in another form than before: the first had {was!r} where it now "
            f"has {now!r}; did the chat template or the tokenizer change?"
        )


def probe(model: nn.Module, ids: Sequence[int]) -> list[float]:
    """Log-probs of a fixed sequence: what a policy must give again after it was loaded."""
    most = min(PROBE_TOKENS, context_length(model) or PROBE_TOKENS)
    sequence = [*ids, *ids][:most]
    with torch.no_grad(), evaluating(model):
        return completion_logprobs(model, [sequence[:1]], [sequence[1:]], [1.0])[0].tolist()


def check_same_policy(stored: list[float], given: list[float], dtype: torch.dtype) -> None:
    """Raises UserError if the loaded weights don't compute what the saved ones did."""
    gap = max(abs(a - b) for a, b in zip(stored, given, strict=True))
    if not gap <= PROBE_TOLERANCE[dtype]:
        raise UserError(
            f"the loaded policy differs from the saved one by {gap:.3g} nats on the same tokens; "
            "is model.path still the model that the run began with?"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value  # the steps of a schedule are numbers
    return flat
