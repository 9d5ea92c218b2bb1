"""What an answer earns: reward functions, where they run, and what is made of their numbers.

Importing this imports no torch: the processes that run reward functions come through here.
"""

from .process import StepReward
from .protocol import EnvFailed

__all__ = ["EnvFailed", "StepReward"]
