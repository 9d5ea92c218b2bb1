"""A group as a person reads it: ids, masks, texts, components, rewards, advantages."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..groups.batch import Batch

FIRST_IDS, LAST_IDS = 48, 8
MOST_TEXT = 2000  # characters


def group_lines(batch: Batch, tokenizer: Any, group: int = 0) -> Iterator[str]:
    """One group of a batch, whole."""
    first, last = batch.cu_groups[group].item(), batch.cu_groups[group + 1].item()
    prompt, origin = batch.rollouts[first].prompt_ids, batch.origins[group]
    yield f"group of row {origin.row}, {last - first} samples, {_signal(batch, group)}"
    yield f"  prompt {len(prompt)} tokens"
    yield f"    ids  {_ids(prompt)}"
    yield f"    text {_text(tokenizer.decode(prompt))}"
    for i in range(first, last):
        yield from _sample_lines(batch, tokenizer, i, i - first)


def _sample_lines(batch: Batch, tokenizer: Any, i: int, number: int) -> Iterator[str]:
    rollout = batch.rollouts[i]
    length = len(rollout.completion_ids)
    cause = "" if batch.causes[i] is None else f" ({batch.causes[i]})"
    anchor = ", an anchor: deliberately wrong" if batch.anchors[i] else ""
    yield (
        f"  sample {number}: reward {batch.rewards[i].item():.4f}, advantage "
        f"{batch.advantages[i].item() + 0.0:+.4f}, {batch.states[i]}{cause}{anchor}"
    )
    components = "  ".join(
        f"{name} {'none' if column[i] is None else format(column[i], '.4g')}"
        for name, column in batch.components.items()
    )
    yield f"    components {components or 'none'}"
    yield (
        f"    {length} tokens, finish {rollout.finish_reason}; in the statistics: "
        f"{_yes(batch.valid[i])}, tokens in the loss: {length if batch.in_loss[i] else 0}"
    )
    if i in batch.token_advantages:
        values = batch.token_advantages[i].tolist()
        yield f"    token advantages {_shortened([f'{x:+.3f}' for x in values])}"
    yield f"    ids  {_ids(rollout.completion_ids)}"
    yield f"    text {_text(tokenizer.decode(rollout.completion_ids))}"


def _signal(batch: Batch, group: int) -> str:
    if batch.signal[group]:
        return "with signal"
    return f"without signal: {batch.signal_causes[group] or 'no spread after preprocessing'}"


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _ids(ids: Sequence[int]) -> str:
    return _shortened([str(i) for i in ids])


def _shortened(items: Sequence[str]) -> str:
    if len(items) <= FIRST_IDS + LAST_IDS:
        return " ".join(items)
    left = len(items) - FIRST_IDS - LAST_IDS
    return " ".join([*items[:FIRST_IDS], f"...({left} more)...", *items[-LAST_IDS:]])


def _text(text: str) -> str:
    half = MOST_TEXT // 2
    if len(text) <= MOST_TEXT:
        return repr(text)
    return f"{text[:half]!r} ...({len(text) - 2 * half} more)... {text[-half:]!r}"
