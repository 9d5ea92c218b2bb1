"""A gold answer of mathematics, read once: a number, a choice, words, or an expression."""

import re
import threading
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

from ...errors import require
from .golds import gold_texts
from .notation import clean, folded, latex, unwrapped
from .numbers import Number, read_number
from .spans import boxed, said

# math-verify's own default. Its clock is an alarm signal, which only the main thread may set.
TIMEOUT_S = 5
LONGEST = 60  # characters of an answer that is compared as text
MOST_WORDS = 6
CHOICE = re.compile(r"\s*(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[.)]?)\s*")
WORD = re.compile(r"[^\W\d_]{3,}|\b[Nn]o\b")
# What LaTeX and its reader take for more than a product of letters.
COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w*\}|\\[a-zA-Z]+")
TIME = re.compile(r"\s*\d{1,2}:\d\d\b.*")


@dataclass(frozen=True)
class Gold:
    """One right answer; None where it isn't of that kind."""

    text: str
    """folded, for a comparison as text"""
    number: Number | None = None
    choice: str | None = None
    words: bool = False
    expression: Any = None
    exact: Fraction | None = None
    """the value of an expression that is a real number, to 30 digits"""


def read_golds(answer: Any) -> list[Gold]:
    """Raises ValueError, which says why, if one of them can't be read."""
    return [read_gold(text) for text in gold_texts(answer)]


@lru_cache(maxsize=4096)
def read_gold(text: str) -> Gold:
    """Raises ValueError for what is no number, expression, choice or short text."""
    text = clean(text)
    answer = boxed(text) or (said(text) if WORD.search(text) else None) or text
    plain = unwrapped(answer).strip()
    if re.search(r"[^\W_]|\\[a-z]", plain) is None:
        raise ValueError("it has no letter and no digit")
    if number := read_number(plain):
        return Gold(folded(answer), number=number)
    if chosen := CHOICE.fullmatch(plain):
        return Gold(folded(answer), choice=chosen[1] or chosen[2])
    expression = None if is_prose(answer) else parsed(latex(answer))
    if expression is not None:
        return Gold(folded(answer), expression=expression, exact=_exact(expression))
    if len(plain) <= LONGEST and len(plain.split()) <= MOST_WORDS and "\n" not in plain:
        return Gold(folded(answer), words=True)
    raise ValueError("it is no number, no expression, and too long for an answer in words")


def is_prose(text: str) -> bool:
    """Whether it has words, which LaTeX would read as products of letters, or is a time."""
    bare = COMMAND.sub(" ", latex(text))
    return WORD.search(bare) is not None or TIME.fullmatch(unwrapped(text)) is not None


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """The expression that the whole of a LaTeX text is, unevaluated; None if it is none."""
    verifier = verifier_module()
    config = verifier.LatexExtractionConfig(boxed_match_priority=0)
    try:
        found = verifier.parse(
            f"\\boxed{{{text}}}",
            [config],
            fallback_mode="no_fallback",
            parsing_timeout=limit(),
            raise_on_error=True,
        )
    except Exception:  # whatever a parser says of a text that is no mathematics
        return None
    return found[0] if found else None


def verifier_module() -> ModuleType:
    """math-verify, which is imported late: it takes a while."""
    return require("math_verify", "tasks", "the reward math")


def limit() -> int | None:
    """Seconds that math-verify may take."""
    main = threading.current_thread() is threading.main_thread()
    return TIMEOUT_S if main else None


def _exact(expression: Any) -> Fraction | None:
    if getattr(expression, "free_symbols", True) or not getattr(expression, "is_real", False):
        return None
    timed = require("math_verify.utils", "tasks", "the reward math").timeout(limit())
    try:
        return Fraction(str(timed(expression.evalf)(40)))
    except Exception:  # no finite number
        return None
