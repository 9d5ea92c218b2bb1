"""What an answer earns: reward functions, where they run, and what is made of their numbers.

Importing this imports no torch: the processes that run reward functions come through here. What
the trainer's side needs comes when its name is used.
"""

import importlib
from typing import TYPE_CHECKING

from .builtin import BUILTIN
from .process import StepReward
from .protocol import EnvFailed

if TYPE_CHECKING:
    from .load import Reward, load_rewards, reward_of
    from .score import Scorer, Scores

__all__ = [
    "BUILTIN",
    "EnvFailed",
    "Reward",
    "Scorer",
    "Scores",
    "StepReward",
    "load_rewards",
    "reward_of",
]
_MODULES = {
    "Reward": "load",
    "Scorer": "score",
    "Scores": "score",
    "load_rewards": "load",
    "reward_of": "load",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
