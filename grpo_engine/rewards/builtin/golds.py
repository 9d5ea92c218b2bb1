"""What a gold answer may be, for every built-in that reads one."""

import math
import re
from typing import Any

Plain = str | int | float

GSM8K = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*([^\n]*)\Z")


def golds_of(answer: Any) -> list[Plain]:
    """The gold answers of a row: a list means any of them, a text in GSM8K's form what follows its
    "####" in the last line. Other texts are stripped.

    Raises ValueError, which says why, for what is no text or number, and for what is empty.
    """
    if not isinstance(answer, list | tuple):
        return [_plain(answer)]
    if not answer:
        raise ValueError("it is an empty list")
    return [_plain(item) for item in answer]


def gold_texts(answer: Any) -> list[str]:
    """`golds_of` as texts."""
    return [str(gold) for gold in golds_of(answer)]


def first_gold(answer: Any) -> str | None:
    """The first of `gold_texts`; None where there is none."""
    try:
        return gold_texts(answer)[0]
    except ValueError:
        return None


def _plain(value: Any) -> Plain:
    if isinstance(value, bool):
        raise ValueError('write true and false as texts, "True" or "yes"')
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("it is no finite number")
        return value
    if not isinstance(value, str):
        raise ValueError("it must be a text, a number, or a list of these")
    text = value.strip()
    marked = GSM8K.search(text)
    text = marked[1].strip() if marked else text
    if not text:
        raise ValueError("it is empty")
    return text
