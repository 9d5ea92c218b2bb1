"""Figures of a step that the guards watch and the loss doesn't give, from plain lists."""

from collections.abc import Hashable, Iterable, Sequence
from math import isfinite, sqrt


def repetition(ids: Sequence[Hashable], n: int = 4) -> float:
    """Share of the n-grams of one completion that were there before: 1 - distinct / all.

    `ids`: tokens or words. 0 for a completion with no n-gram, and where all n-grams differ.
    """
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def unique_share(completions: Iterable[str | Sequence[int]]) -> float:
    """Distinct completions of one group over all of them; 1 / G if all are equal.

    `completions`: texts or token ids. Raises ValueError for an empty group.
    """
    kept = [c if isinstance(c, str) else tuple(c) for c in completions]
    if not kept:
        raise ValueError("a group without completions has no share of distinct ones")
    return len(set(kept)) / len(kept)


def reward_length_correlation(
    rewards: Sequence[Sequence[float | None]], lengths: Sequence[Sequence[int]]
) -> float | None:
    """Pearson correlation of reward and length inside the groups, all groups pooled; -1 to 1.

    `rewards`, `lengths`: by group, by sample, tokens. A sample without a finite reward is left out.
    None where no group has both rewards that differ and lengths that differ.
    """
    both = xx = yy = 0.0
    for group, tokens in zip(rewards, lengths, strict=True):
        pairs = [
            (r, n) for r, n in zip(group, tokens, strict=True) if r is not None and isfinite(r)
        ]
        if not pairs or min(pairs)[0] == max(pairs)[0]:
            continue
        mean_r, mean_n = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
        both += sum((r - mean_r) * (n - mean_n) for r, n in pairs)
        xx += sum((r - mean_r) ** 2 for r, _ in pairs)
        yy += sum((n - mean_n) ** 2 for _, n in pairs)
    return both / sqrt(xx * yy) if xx > 0 and yy > 0 else None


def length_bucket(tokens: int) -> str:
    """The bucket of a length, by powers of two: `1-1`, `2-3`, `4-7`, ...; `0` for none."""
    if tokens < 1:
        return "0"
    low = 1 << (tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def mean_by(keys: Sequence[str], values: Sequence[float], weights: Sequence[float]) -> dict:
    """Weighted mean of `values` for each key, keys sorted; e.g. a sample's KL by its length bucket.

    `weights`: tokens of a sample, so that the parts add up to the token mean of the whole. A key
    whose weights sum to 0 is left out.
    """
    sums: dict[str, list[float]] = {}
    for key, value, weight in zip(keys, values, weights, strict=True):
        entry = sums.setdefault(key, [0.0, 0.0])
        entry[0] += value * weight
        entry[1] += weight
    return {key: total / weight for key, (total, weight) in sorted(sums.items()) if weight > 0}
