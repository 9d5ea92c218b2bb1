"""The reward for a right answer in mathematics."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ...errors import require
from .math_gold import Gold, is_prose, limit, parsed, read_golds, verifier_module
from .notation import clean, folded, latex, unwrapped
from .numbers import Number, numbers_in, read_number
from .options import is_number, require_option, require_share, text_of
from .spans import boxed, hashed, said, tagged

DISPLAYED = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<![\\\d])\$([^$\n]+?)\$|\\\((.+?)\\\)"
    r"|(\\begin\{(\w+)\}.+?\\end\{\6\})",
    re.DOTALL,
)
SENTENCE = re.compile(r"[.;!](?:\s|$)|,?\s(?:because|since|which)\s|\n")
CHOSEN = re.compile(r"(?<![A-Za-z\\(])(?:\(([A-Z])\)|([A-Z]))(?![A-Za-z'])")
ALONE = re.compile(r"(?:\(([A-Z])\)|([A-Z])(?:[.):]|$))")
LAST_CHOSEN = re.compile(r"\(([A-Z])\)|\b(?:option|choice)\s+([A-Z])\b", re.IGNORECASE)
PROSE = re.compile(
    r"(?!(?:sqrt|sin|cos|tan|log|ln|pi)\b)[A-Za-z]{2,}[.,:;]?|.*[^\W\dA-Za-z_]{2,}.*"
)


def math(
    completions: list,
    answers: list,
    *,
    near: float = 0.0,
    near_tolerance: float = 0.05,
    format_credit: float = 0.0,
) -> list[float | None]:
    """1 where the completion's answer equals the gold one as mathematics, else 0.

    The answer is the last <answer></answer>, else the last closed \\boxed{} (boxes that only "and"
    or "," part are a list), else what follows the last "####" or "the answer is", else the last
    number that stands by itself; of an expression the last formula, or the end of the last line.
    What a cut \\boxed{ holds is no answer.

    Where the gold answer is a number, so must the answer be: a fraction, 50\\%, 1.5e3, 3\\frac12,
    $1,234 and 5 cm are numbers, and units are not compared; 39+69, 6/3, 2^{10} and \\sqrt{4} are
    still to be worked out, and are wrong. 6 digits of a decimal stand for what it is rounded from.
    Other gold answers are LaTeX, bare or in $ or \\boxed, compared through math-verify; letters of
    a choice; or words, compared as text without case. A list means any of them, in GSM8K's form
    what follows the "####". A gold answer that can't be read gives None (a run refuses such rows at
    its start), and so does a comparison that takes more than 5 s (outside the main thread there is
    no such limit, and a big power like 9^9^9^9 can overrun it: call this in a process that can be
    killed).

    near: what a wrong number earns that lies within `near_tolerance` of a gold number, as a share
    of it (nothing is near to 0); 0.3 is usual. format_credit: what a wrong answer in a \\boxed{}
    earns, beside `near`. Both together stay below 1, the reward of a right answer.
    """
    require_share("math", "near", near)
    ok = is_number(near_tolerance) and 0 < near_tolerance < 1
    require_option("math", "near_tolerance", near_tolerance, ok, "above 0 and below 1")
    require_share("math", "format_credit", format_credit)
    most = near + format_credit
    require_option(
        "math", "near + format_credit", most, most < 1, "below 1, what a right one earns"
    )
    late = verifier_module().errors.TimeoutException
    results: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        text = clean(text_of(completion).rpartition("</think>")[2])
        try:
            golds = read_golds(answer)
        except ValueError:
            results.append(None)
            continue
        try:
            if any(_is_right(text, gold) for gold in golds):
                results.append(1.0)
            else:
                is_near = near > 0 and any(_is_near(text, gold, near_tolerance) for gold in golds)
                results.append(near * is_near + format_credit * (boxed(text) is not None))
        except late:
            results.append(None)
    return results


def _is_right(text: str, gold: Gold) -> bool:
    if gold.number is not None:
        found = answered_number(text)
        return found is not None and found.equals(gold.number)
    if gold.choice is not None:
        return _chosen(text) == gold.choice
    spans = list(_spans(text))
    if any(folded(span) == gold.text for span in spans):
        return True
    return gold.expression is not None and any(_equals(span, gold) for span in spans)


def _is_near(text: str, gold: Gold, tolerance: float) -> bool:
    found = answered_number(text)
    if gold.number is None or found is None:
        return False
    target = gold.number.value
    return abs(found.value - target) <= tolerance * abs(target)


@lru_cache(maxsize=64)
def answered_number(text: str) -> Number | None:
    """The number that a clean text gives as its answer."""
    marked = _marked(text)
    if marked is not None:
        plain = unwrapped(marked)
        found = read_number(plain) or read_number(plain.rpartition("=")[2])
        alone = numbers_in(plain)
        return found or (alone[0] if len(alone) == 1 else None)
    if (rest := said(text)) is not None:
        return next(iter(numbers_in(_first_part(rest))), None)
    plain = unwrapped(_without_cut_box(text))
    whole = read_number(plain) if "=" in plain else None  # with its name
    return whole or next(reversed(numbers_in(plain)), None)


def _marked(text: str) -> str | None:
    """The answer where it is marked off at both ends."""
    if (inside := tagged(text)) is not None:
        return boxed(inside) or inside
    if (inside := boxed(text)) is not None:
        return inside
    inside = hashed(text)
    last = inside is not None and text.rstrip().endswith(inside)
    return inside if inside and (last or read_number(unwrapped(inside))) else None


def _first_part(rest: str) -> str:
    """The first formula or line of what follows "the answer is"."""
    shown = DISPLAYED.match(rest)
    return unwrapped(shown[0] if shown else rest.partition("\n")[0])


def _without_cut_box(text: str) -> str:
    return re.split(r"\\(?:boxed|fbox)\s*\{", text)[0]


def _chosen(text: str) -> str | None:
    """The letter of the choice."""
    span = _marked(text) or said(text)
    if span is not None:
        found = CHOSEN.search(_first_part(span))
    else:
        lines = unwrapped(text).strip().splitlines() or [""]
        found = ALONE.match(lines[0]) or ALONE.fullmatch(lines[-1].strip())
        found = found or next(reversed(list(LAST_CHOSEN.finditer(text))), None)
    return None if found is None else (found[1] or found[2]).upper()


def _spans(text: str) -> Iterator[str]:
    """The texts that may be the answer, where it is no number."""
    marked = _marked(text)
    if marked is not None:
        yield marked
        return
    rest = said(text)
    text = _without_cut_box(text) if rest is None else rest
    shown = [match[0] for match in DISPLAYED.finditer(text)]
    if shown:
        yield shown[-1] if rest is None else shown[0]
        return
    if rest is not None:
        yield SENTENCE.split(rest, maxsplit=1)[0]
        return
    line = text.strip().rpartition("\n")[2]
    yield line
    words = line.split()
    prose = [number for number, word in enumerate(words) if PROSE.fullmatch(word)]
    yield " ".join(words[prose[-1] + 1 :] if prose else words)


def _equals(span: str, gold: Gold) -> bool:
    """As math-verify's own verify, which counts a time-out as "not equal"."""
    if gold.exact is not None and (number := read_number(unwrapped(span))) is not None:
        return number.stands_for(gold.exact)
    found = None if is_prose(span) else parsed(latex(span))
    return found is not None and _verified(gold.expression, found)


def _verified(gold: Any, found: Any) -> bool:
    verifier = require("math_verify", "tasks", "the reward math")
    try:
        return verifier.verify(gold, found, timeout_seconds=limit(), raise_on_error=True)
    except verifier.errors.TimeoutException:
        raise
    except Exception:  # sympy can't compare these two
        return False
