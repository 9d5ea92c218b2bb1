"""From components to totals: bounds, length, weights, gates. Plain arrays, no torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..sample_config import ComponentConfig
from .process import StepReward

StepRows = list[list[StepReward] | None]


@dataclass
class Components:
    """The components of a step as numbers that can be summed."""

    names: list[str]
    values: np.ndarray
    """[C, S] float64, after bounds and length; NaN where a component does not apply"""
    configs: list[ComponentConfig]
    gate_failed: list[str | None]
    """[S] the first gate that a sample failed"""
    refused: list[str | None]
    """[S] the first component that made a sample invalid"""
    lengths: Sequence[int]
    steps: dict[str, StepRows]
    """[S] each: the rewards of steps of the components that have them"""
    bounded: np.ndarray
    """[C, S] float64, after bounds alone"""

    def decided(self, name: str | None, floor: float) -> np.ndarray:
        """[S] float64: what the component `name` says of whether an answer is right.

        `floor` behind a failed gate; NaN where the component does not apply, or there is none.
        """
        if name not in self.names:
            return np.full(len(self.lengths), np.nan)
        found = self.bounded[self.names.index(name)]
        return np.where(self._gate_failed() & ~np.isnan(found), floor, found)

    def weight(self, name: str) -> float:
        """The factor of a component in its sum."""
        return self.configs[self.names.index(name)].weight

    def total(self, floor: float) -> np.ndarray:
        """[S] float64: weighted sums, `floor` behind a failed gate, NaN where nothing applies.

        What a sample earned in all: of rewards of steps it counts the mean.
        """
        return self._sum(self.values, [c.weight for c in self.configs], floor)

    def outcome(self, values: np.ndarray, floor: float) -> np.ndarray:
        """The same of `values` [C, S] in place of these, without rewards of steps: they reach the
        loss as advantages of tokens, and once is enough."""
        pairs = zip(self.names, self.configs, strict=True)
        return self._sum(values, [0.0 if n in self.steps else c.weight for n, c in pairs], floor)

    def steps_differ(self, samples: Iterable[int]) -> bool:
        """Whether rewards of steps of these samples differ, so that there is something to learn
        from them; of those behind a failed gate none count."""
        counted = [i for i in samples if self.gate_failed[i] is None]
        return any(
            len({step.reward for i in counted for step in rows[i] or []}) > 1
            for name, rows in self.steps.items()
            if self.weight(name)
        )

    def _sum(self, values: np.ndarray, factors: Sequence[float], floor: float) -> np.ndarray:
        weights = np.array(factors, np.float64).reshape(-1, 1)
        applies = ~np.isnan(values)
        sums = np.where(applies, values, 0.0) * weights
        total = np.where(applies.any(0), sums.sum(0), np.nan)
        return np.where(self._gate_failed() & ~np.isnan(total), floor, total)

    def _gate_failed(self) -> np.ndarray:
        return np.array([gate is not None for gate in self.gate_failed], bool)


def prepare_components(
    components: dict[str, list[float | None]],
    steps: dict[str, StepRows],
    configs: dict[str, ComponentConfig],
    lengths: Sequence[int],
) -> Components:
    """components: [S] each, as the functions returned them; of one with rewards of steps, which are
    in `steps` as well, their mean. configs: by the same names.

    lengths: [S] tokens of the completions. A gate is judged on the number as it was returned; one
    that does not apply is passed.
    """
    samples = len(lengths)
    names = list(components)
    raw = np.array(
        [[np.nan if x is None else x for x in components[name]] for name in names], np.float64
    ).reshape(len(names), samples)
    chosen = [configs[name] for name in names]
    bounded = _each(_bounded, raw, chosen)
    values = _each(lambda row, config: _per_tokens(row, config, lengths), bounded, chosen)
    return Components(
        names,
        values,
        chosen,
        _first_below(names, raw, [c.gate for c in chosen]),
        _first_below(names, raw, [c.valid_from for c in chosen]),
        lengths,
        steps,
        bounded,
    )


def _each(
    change: Callable[[np.ndarray, ComponentConfig], np.ndarray],
    rows: np.ndarray,
    configs: Sequence[ComponentConfig],
) -> np.ndarray:
    changed = [change(row, config) for row, config in zip(rows, configs, strict=True)]
    return np.array(changed).reshape(rows.shape)


def _bounded(row: np.ndarray, config: ComponentConfig) -> np.ndarray:
    if config.bounds is None:
        return row
    low, high = config.bounds
    return np.clip((row - low) / (high - low), 0.0, 1.0)


def _per_tokens(row: np.ndarray, config: ComponentConfig, lengths: Sequence[int]) -> np.ndarray:
    if config.per_tokens is None:
        return row
    return row / np.maximum(1.0, np.asarray(lengths, np.float64) / config.per_tokens)


def _first_below(
    names: Sequence[str], raw: np.ndarray, least: Sequence[float | None]
) -> list[str | None]:
    found: list[str | None] = [None] * raw.shape[1]
    for name, row, bound in zip(names, raw, least, strict=True):
        if bound is None:
            continue
        for i in np.flatnonzero(row < bound):  # NaN is not below
            found[i] = found[i] or name
    return found
