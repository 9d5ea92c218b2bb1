"""Rewards on the length and the repetition of the token ids."""

from collections import defaultdict
from typing import Literal, get_args

from .math_answer import math
from .options import is_number, require_choice, require_int, require_option
from .text import exact

Compare = Literal["math", "exact"]


def length_penalty(completion_ids: list, *, target: int, most: int) -> list[float]:
    """0 up to `target` tokens, from there down in a line to -1 at `most` tokens and beyond."""
    require_int("length_penalty", "target", target, 0)
    require_int("length_penalty", "most", most, 1)
    require_option("length_penalty", "most", most, most > target, f"above target ({target})")
    return [_ramp(len(ids), target, most) for ids in completion_ids]


def soft_overlong(completion_ids: list, *, max_length: int, buffer: int) -> list[float]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).

    0 up to max_length - buffer tokens, (max_length - buffer - length) / buffer up to max_length,
    -1 beyond.
    """
    require_int("soft_overlong", "max_length", max_length, 1)
    require_int("soft_overlong", "buffer", buffer, 1)
    ok = buffer <= max_length
    require_option("soft_overlong", "buffer", buffer, ok, f"at most max_length ({max_length})")
    return [_ramp(len(ids), max_length - buffer, max_length) for ids in completion_ids]


def length_normalized(
    completions: list,
    completion_ids: list,
    answers: list,
    groups: list,
    *,
    compare: Compare = "math",
) -> list[float | None]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), to be added to another.

    In each group lambda = 0.5 - (length - shortest) / (longest - shortest); a right answer earns
    lambda, a wrong one min(0, lambda); where all are of one length, 0. groups: the number of each
    sample's group. compare: whether right is judged as by the reward `math` or `exact`; a sample
    that can't be judged gets None and is not among the lengths.
    """
    require_choice("length_normalized", "compare", compare, get_args(Compare))
    right = {"math": math, "exact": exact}[compare](completions, answers)
    lengths = [len(ids) for ids in completion_ids]
    members = defaultdict(list)
    for i, group in enumerate(groups):
        if right[i] is not None:
            members[group].append(i)
    results: list[float | None] = [None] * len(completions)
    for indices in members.values():
        shortest = min(lengths[i] for i in indices)
        spread = max(lengths[i] for i in indices) - shortest
        for i in indices:
            value = 0.5 - (lengths[i] - shortest) / spread if spread else 0.0
            results[i] = value if right[i] else min(0.0, value)
    return results


def repetition(completion_ids: list, *, ngram: int = 3, most: float = 1.0) -> list[float]:
    """Minus the share of n-grams that came before in the completion, times `most`.

    As in Yeo et al. (arXiv 2502.03373, appendix C.2): 1 - different / all. Completions shorter
    than an n-gram repeat nothing.
    """
    require_int("repetition", "ngram", ngram, 1)
    ok = is_number(most) and most > 0
    require_option("repetition", "most", most, ok, "a number above 0")
    return [-most * _repeated(ids, ngram) for ids in completion_ids]


def _ramp(length: int, start: int, end: int) -> float:
    if length <= start:
        return 0.0
    return max(-1.0, (start - length) / (end - start))


def _repeated(ids: list[int], n: int) -> float:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
