"""The group as an experiment: all of its samples were made under the same conditions."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import UserError


@dataclass(frozen=True)
class Fingerprint:
    """The conditions of one sample; what may differ inside a group is not in it."""

    prompt: str
    """hash of the token ids"""
    task: str
    """where the task comes from, and its row"""
    policy_version: int
    adapter: str
    """hash of the trained weights"""
    reward_version: str
    sampling: str
    """the settings that the samples of a group are drawn with, as a group"""
    budget: int
    """tokens that a completion may have"""
    environment: str = ""
    tools: str = ""


def check_groups(
    fingerprints: Sequence[Fingerprint],
    cu_groups: Sequence[int],
    exempt: Sequence[bool] | None = None,
) -> None:
    """Raises UserError, naming the field, if a group mixes conditions.

    fingerprints: [S]. cu_groups: [P+1] offsets. exempt: [S], samples that are marked as made
    otherwise (anchors).
    """
    for group, (first, last) in enumerate(pairwise(cu_groups)):
        counted = [i for i in range(first, last) if exempt is None or not exempt[i]]
        for i in counted[1:]:
            _check_same(fingerprints[counted[0]], fingerprints[i], group, i - first)


def _check_same(first: Fingerprint, other: Fingerprint, group: int, sample: int) -> None:
    if first is other or first == other:
        return
    names = [f.name for f in dataclasses.fields(Fingerprint)]
    differ = [name for name in names if getattr(first, name) != getattr(other, name)]
    name = differ[0]
    raise UserError(
        f"group {group} can't be normalised: sample {sample} has another {', '.join(differ)} "
        f"({name} {getattr(other, name)!r}, the first sample's is {getattr(first, name)!r}); "
        "a group is drawn at once, under one set of conditions"
    )
