"""The settings that decide who counts, together."""

from dataclasses import dataclass, field

from ..kernels.options import GRPOOptions
from ..sample_config import GroupsConfig, ScoringConfig


@dataclass(frozen=True)
class Rules:
    """What decides who counts and what they are worth."""

    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    options: GRPOOptions = field(default_factory=GRPOOptions)
