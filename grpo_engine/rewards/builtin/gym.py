"""Tasks of reasoning-gym and the reward by its scorers, whose traps are kept out."""

import json
from functools import lru_cache
from types import ModuleType
from typing import Any

from ...errors import UserError, require
from .options import require_bool, require_int, text_of
from .spans import boxed, said, tagged

ENTRY_COLUMN = "gym_entry"
PROBED_ROWS = 16
# No answer to anything: a scorer that gives it full marks would teach nothing.
PROBE = "qqq no answer qqq"


def reasoning_gym(
    completions: list, gym_entry: list, *, partial: bool = False
) -> list[float | None]:
    """1 where reasoning-gym's scorer gives full marks to the answer of the completion, else 0.

    The answer is the last <answer>...</answer>, else the last \\boxed{...}, else what follows the
    last "answer is" or "answer:", to the end of the line or of the text, else the whole text or its
    last line; of two the one that scores higher. An answer that the scorer fails on is wrong,
    unless it fails on the gold one too: then None.

    gym_entry: the column of that name which reasoning_gym_tasks makes.
    partial: the scorer's own number instead. Beware: many pay for a gold answer inside a longer
    text, some pay 0.01 to 0.05 for any text; only an empty answer is 0 here in any case.
    """
    require_bool("reasoning_gym", "partial", partial)
    _gym()
    results: list[float | None] = []
    for completion, packed in zip(completions, gym_entry, strict=True):
        name, config, entry = _unpacked(packed)
        dataset = _dataset(name, json.dumps(config, sort_keys=True))
        scores = [_score(dataset, a, entry) for a in _answers(text_of(completion))]
        known = [s for s in scores if s is not None]
        best = max(known) if len(known) == len(scores) else None
        results.append(best if partial or best is None else float(best >= 1))
    return results


def reasoning_gym_tasks(name: str, size: int, seed: int, **config: Any) -> list[dict]:
    """`size` tasks of the reasoning-gym data set `name`, a function of `seed` and `config` alone.

    config: options of the data set, plain values. Returns rows with `prompt` (str), `answer` (the
    gold one; None where many are right) and `gym_entry` (JSON: what the reward needs). UserError
    for a name or an option that reasoning-gym doesn't have, and for a data set whose scorer gives
    full marks to any text.
    """
    require_int("reasoning_gym", "size", size, 1)
    require_int("reasoning_gym", "seed", seed, 0)
    gym = _gym()
    if name not in gym.factory.DATASETS:
        near = ", ".join(sorted(gym.factory.DATASETS))
        raise UserError(f"reasoning-gym has no data set {name!r}; there are {near}")
    try:
        dataset = gym.create_dataset(name, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym can't make {name} with {config}: {error}") from error
    rows = []
    for number in range(size):
        entry = dataset[number]
        if number < PROBED_ROWS and _pays(dataset, PROBE, entry):
            raise UserError(
                f"the scorer of reasoning-gym's {name} gives full marks to any text (task "
                f"{number}); use another data set, or a reward of your own"
            )
        packed = {"dataset": name, "config": _plain(config), "entry": _plain(entry)}
        column = json.dumps(packed)
        rows.append({"prompt": entry["question"], "answer": entry["answer"], ENTRY_COLUMN: column})
    return rows


def _gym() -> ModuleType:
    return require("reasoning_gym", "gym", "reasoning-gym")


@lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    """The scorer; some read the configuration. Of size 1, for the entries come with the rows."""
    return _gym().create_dataset(name, size=1, seed=0, **json.loads(config))


def _answers(text: str) -> list[str]:
    """The answer, or where nothing marks it the texts that may be it."""
    marked = tagged(text)
    marked = boxed(text) if marked is None else marked
    if marked is not None:
        return [marked]
    rest = said(text)
    if rest is not None:
        line = rest.partition("\n")[0]
        return [line.strip("*$ ").removesuffix(".").rstrip("*$ "), rest.lstrip("*$ ")]
    whole = text.strip()
    return [whole, whole.rpartition("\n")[2].strip()]


def _score(dataset: Any, answer: str, entry: dict) -> float | None:
    if not answer:
        return 0.0
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # some scorers raise on an answer they can't read
        return None if _fails_on_gold(dataset, entry) else 0.0


def _fails_on_gold(dataset: Any, entry: dict) -> bool:
    try:
        dataset.score_answer(answer=entry["answer"], entry=entry)
    except Exception:
        return True
    return False


def _pays(dataset: Any, answer: str, entry: dict) -> bool:
    try:
        return float(dataset.score_answer(answer=answer, entry=entry)) >= 1
    except Exception:
        return False


def _plain(value: Any) -> Any:
    """JSON that keeps tuples and the keys that are no strings: scorers compare with them."""
    if isinstance(value, tuple):
        return {"__tuple__": [_plain(v) for v in value]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(k, str) for k in value):
        return {k: _plain(v) for k, v in value.items()}
    return {"__pairs__": [[_plain(k), _plain(v)] for k, v in value.items()]}


def _unplain(value: dict) -> Any:
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__pairs__"}:
        return {k: v for k, v in value["__pairs__"]}
    return value


def read_entry(packed: Any) -> list:
    """The entry of a row; ValueError, which says why, for what the reward can't use."""
    try:
        return list(_unpacked(packed))
    except UserError as error:
        raise ValueError("reasoning_gym_tasks never wrote it; take the rows it returns") from error


def _unpacked(packed: str) -> tuple[str, dict, dict]:
    try:
        row = json.loads(packed, object_hook=_unplain)
        return row["dataset"], row["config"], row["entry"]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"rewards: reasoning_gym: the column {ENTRY_COLUMN} holds {str(packed)[:40]!r}, which "
            "reasoning_gym_tasks never wrote; take the rows it returns"
        ) from error
