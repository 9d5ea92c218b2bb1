"""Rewards on the text: exact match, fuzzy match, a pattern for the form."""

import re
from collections.abc import Callable
from decimal import Decimal
from difflib import SequenceMatcher
from typing import Literal, get_args

from ...errors import UserError
from .golds import Plain, golds_of
from .options import is_number, require_choice, require_option, text_of

DECIMAL = re.compile(
    r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE
)
Source = Literal["completions", "raw_completions", "with_prompt_tail"]


def exact(completions: list, answers: list) -> list[float | None]:
    """1 where the completion is the answer, white space at the ends aside, else 0.

    A gold answer that is a number, not a text, is any decimal of its value: 34.0 is "34" too.
    """
    return _best(lambda text, gold: float(_is_gold(text.strip(), gold)), completions, answers)


def fuzzy(
    completions: list, answers: list, *, threshold: float | None = None
) -> list[float | None]:
    """How like the answer the completion is, 0 to 1; with `threshold` 1 from there on, else 0.

    The ratio of Python's difflib, 2 * matching characters / characters of both; case is folded and
    runs of white space count as one blank. Of several gold answers the best counts, of one that is
    a number also its value, as in `exact`. It is for short answers: time grows with the product of
    the lengths.
    """
    if threshold is not None:
        ok = is_number(threshold) and 0 < threshold <= 1
        require_option("fuzzy", "threshold", threshold, ok, "null, or above 0 and at most 1")
    ratios = _best(_likeness, completions, answers)
    if threshold is None:
        return ratios
    return [None if ratio is None else float(ratio >= threshold) for ratio in ratios]


def format(
    completions: list,
    raw_completions: list | None = None,
    prompt_tail: list | None = None,
    *,
    pattern: str,
    source: Source = "completions",
) -> list[float]:
    """1 where the whole text matches the regular expression `pattern`, else 0.

    `.` matches line ends too. source: `completions` (decoded, special tokens dropped),
    `raw_completions` (special tokens kept), or `with_prompt_tail` for a chat template that writes
    the opening tag into the prompt: the match may then begin at any place of the prompt's tail, or
    at the start of the completion, and must reach to the end of the completion.
    """
    require_choice("format", "source", source, get_args(Source))
    compiled = _compiled(pattern)
    if source == "raw_completions":
        texts = _present(raw_completions, "raw_completions", source)
        return [float(compiled.fullmatch(t) is not None) for t in texts]
    if source == "with_prompt_tail":
        tails = _present(prompt_tail, "prompt_tail", source)
        pairs = zip(tails, completions, strict=True)
        return [float(_matches_from_tail(compiled, tail, text_of(c))) for tail, c in pairs]
    return [float(compiled.fullmatch(text_of(c)) is not None) for c in completions]


def _best(
    worth: Callable[[str, Plain], float], completions: list, answers: list
) -> list[float | None]:
    """The most that any of the gold answers gives; None where they can't be read."""
    results: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        try:
            golds = golds_of(answer)
        except ValueError:
            results.append(None)
        else:
            results.append(max(worth(text_of(completion), gold) for gold in golds))
    return results


def _is_gold(text: str, gold: Plain) -> bool:
    if isinstance(gold, str):
        return text == gold
    return DECIMAL.fullmatch(text) is not None and Decimal(text) == Decimal(repr(gold))


def _likeness(text: str, gold: Plain) -> float:
    if _is_gold(text.strip(), gold):
        return 1.0
    return SequenceMatcher(None, _folded(str(gold)), _folded(text), autojunk=False).ratio()


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise UserError(
            f"rewards: format: pattern must be a regular expression; given {pattern!r}: {error}"
        ) from error


def _present(values: list | None, name: str, source: str) -> list:
    if values is None:
        raise UserError(f"rewards: format: source {source} needs the argument {name}")
    return values


def _matches_from_tail(compiled: re.Pattern, tail: str, text: str) -> bool:
    # Slices, for with a start position ^ would not match there.
    return any(compiled.fullmatch(tail[start:] + text) for start in range(len(tail) + 1))
