"""Deliberately wrong samples, so that a group has something to differ from."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from ..errors import UserError
from .config import MOST_ANCHORS
from .randomness import apportion, generator
from .variants import texts_of


def choose_groups(groups: int, samples: int, share: float, seed: int, step: int) -> list[int]:
    """The groups of a step that get an anchor, in rising order; other ones from step to step.

    `samples`: of the whole step, the anchors among them. Their number is `share` of it, rounded up
    or down so that the mean over the steps holds, yet at most a tenth of the samples and at most
    one a group. Raises UserError if the step is too small for one.
    """
    if share == 0:
        return []
    if not 0 < share <= MOST_ANCHORS:
        raise UserError(f"anchors.share must be from 0 to {MOST_ANCHORS}; given {share}")
    most = min(int(samples * MOST_ANCHORS), groups)
    if most == 0:
        raise UserError(
            f"anchors.share is {share}, but a step of {samples} samples has no room for an anchor "
            "(at most one in ten): raise train.prompts_per_step or the group size, or set it to 0"
        )
    chance = generator("anchors", seed, step)
    count = min(apportion([share, 1 - share], samples, chance)[0], most)
    return sorted(chance.choice(groups, size=count, replace=False).tolist())


def anchor_text(
    columns: Mapping[str, Any],
    column: str | None,
    answer_column: str,
    others: Sequence[Any],
    *,
    seed: int,
    step: int,
    task: int,
) -> str:
    """A wrong answer to a task.

    `columns`: of its row; `column`: the one with wrong answers, a string or a list, or None: then
    it is one of `others`, the answers of other tasks, that differs from this one's in
    `answer_column`. Raises UserError where there is none. Whether it is wrong, its
    reward says.
    """
    chance = generator("anchor", seed, step, task)
    if column is not None:
        texts = texts_of(columns, column, "anchors.column")
        if not texts:
            raise UserError(
                f"anchors.column: a row has no wrong answer in the column {column!r}; give it one, "
                "or leave out the column"
            )
        return texts[int(chance.integers(len(texts)))]
    own = str(columns.get(answer_column)).strip()
    start = int(chance.integers(max(1, len(others))))
    for other in chain(islice(others, start, None), islice(others, start)):
        if other is not None and str(other).strip() != own:
            return str(other)
    raise UserError(
        f"anchors: no other task has an answer that differs from {own[:60]!r}; name a column with "
        "wrong answers in anchors.column, or set anchors.share to 0"
    )
