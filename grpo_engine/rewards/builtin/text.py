"""Rewards on the text: exact match, fuzzy match, a pattern for the form."""

import re
from difflib import SequenceMatcher
from typing import Literal, get_args

from ...errors import UserError
from .options import is_number, require_choice, require_option, text_of

Source = Literal["completions", "raw_completions", "with_prompt_tail"]


def exact(completions: list, answers: list) -> list[float]:
    """1 where the completion is the answer, white space at the ends aside, else 0."""
    return [
        float(text_of(c).strip() == str(a).strip())
        for c, a in zip(completions, answers, strict=True)
    ]


def fuzzy(completions: list, answers: list, *, threshold: float | None = None) -> list[float]:
    """How like the answer the completion is, 0 to 1; with `threshold` 1 from there on, else 0.

    The ratio of Python's difflib, 2 * matching characters / characters of both; case is folded and
    runs of white space count as one blank. It is for short answers: time grows with the product of
    the lengths.
    """
    if threshold is not None:
        ok = is_number(threshold) and 0 < threshold <= 1
        require_option("fuzzy", "threshold", threshold, ok, "null, or above 0 and at most 1")
    ratios = [
        SequenceMatcher(None, _folded(str(a)), _folded(text_of(c)), autojunk=False).ratio()
        for c, a in zip(completions, answers, strict=True)
    ]
    return ratios if threshold is None else [float(r >= threshold) for r in ratios]


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
