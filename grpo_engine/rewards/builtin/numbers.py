"""Numbers as people write them: signs, fractions, thousands, currency, percent, units."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from .notation import UNIT_WORDS, is_unit

INT = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)"
DECIMAL = rf"(?:{INT}(?:\.\d+)?|\.\d+)"
TIMES = r"\s*(?:\\times|\\cdot|\*|x)\s*"
NUMBER = re.compile(
    rf"""(?<![A-Za-z0-9_\\])(?<!\d[.,:])(?P<sign>[-+]\s?)?(?:
        (?:(?P<whole>\d+)\s*)?\\frac\{{\s*(?P<top>-?{DECIMAL})\s*\}}\{{\s*(?P<bottom>-?{DECIMAL})\s*\}}
      | (?:(?P<whole2>\d+)\s+)?(?P<top2>{DECIMAL})\s*/\s*(?P<bottom2>{DECIMAL})(?!\s*/)
      | (?P<decimal>{DECIMAL})(?:[eE](?P<e>[-+]?\d+)(?![A-Za-z0-9])
            |{TIMES}10\s*\^\s*(?:\{{\s*(?P<power>[-+]?\d+)\s*\}}|(?P<power2>[-+]?\d+)))?
        (?:_\{{?(?P<base>\d+)\}}?)?
    )""",
    re.VERBOSE,
)
TEN = re.compile(r"(?<![\w.\\])10\s*\^\s*(?=[{\d])")
NAME = re.compile(r"\s*(?P<name>[A-Za-z](?:_\{?\w+\}?|\([a-z]\))?)\s*=\s*")
SCALE = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6} | {
    "billion": 10**9,
    "trillion": 10**12,
}
PERCENT = re.compile(r"\s*(?:%|percent(?:age)?\b|pct\b)", re.IGNORECASE)
SCALED = re.compile(rf"\s*({'|'.join(SCALE)})s?\b", re.IGNORECASE)
# A sum, a product, a power, a function: what stands beside one of these is part of a calculation.
COMMANDS = "times|cdot|div|pm|mp|sqrt|frac|binom|sin|cos|tan|log|ln|pi|theta|alpha|sum|int"
BEFORE = re.compile(rf"(?:[-+*/^_{{]|\\(?:{COMMANDS})|[A-Za-z]\(|[\d)}}]\()\s*$")
AFTER = re.compile(
    rf"\s*(?:[+*/^_]|\\(?:{COMMANDS})\b|-\s*(?:[\d(\\]|[A-Za-z]\b)|[:,]\d|\(\s*-?\d|-\s*$)"
)
OPERAND = re.compile(r"(?:[\d)}%]|(?<![A-Za-z\\])[A-Za-z])\s*$")
GROUPED = re.compile(r"(?:\\\{|[(\[])[^()\[\]{}\n]*\d\s*,[^()\[\]{}\n]*(?:\\\}|[)\]])")
LONGEST = 400  # characters of a number
SIGNIFICANT = 6  # digits from which on a decimal stands for what it is a rounding of


@dataclass(frozen=True)
class Number:
    """A number that is written out, not one still to be worked out."""

    value: Fraction
    other: Fraction | None = None
    """what it may mean as well: 50% is 50 and 0.5, 5 million are 5000000 and 5"""
    places: int | None = None
    """digits after the point, if they are enough to be a rounding of something"""
    tags: tuple[str | None, str | None] = (None, None)
    """the variable before "=", and the base"""

    def equals(self, gold: "Number") -> bool:
        """Whether both are one number. A name or a base counts where both have one."""
        pairs = zip(self.tags, gold.tags, strict=True)
        if any(a is not None and b is not None and a != b for a, b in pairs):
            return False
        if _same(self.value, self.places, gold.value, gold.places):
            return True
        if self.other is not None and gold.other is None:
            return _same(self.other, None, gold.value, gold.places)
        if gold.other is not None and self.other is None:
            return _same(self.value, self.places, gold.other, None)
        return False

    def stands_for(self, exact: Fraction) -> bool:
        """Whether it is `exact`, or a rounding of it."""
        return _same(self.value, self.places, exact, 30)


def read_number(text: str) -> Number | None:
    """The number that the whole text is, in clean notation; None if it is anything else."""
    text = text.strip()
    named = NAME.match(text)
    body = text[named.end() :] if named else text
    if re.fullmatch(r"[-+]?\d{1,3}(?: \d{3})+", body):
        body = body.replace(" ", "")
    body = TEN.sub("1*10^", body) if TEN.match(body.lstrip("-+ ")) else body
    match = NUMBER.match(body)
    if match is None:
        return None
    number, end = _number(match, body, named["name"] if named else None)
    rest = body[end:].rstrip(". ")
    return number if number and (not rest.strip() or is_unit(rest)) else None


def numbers_in(text: str) -> list[Number]:
    """The numbers of a clean text that stand by themselves, in order.

    None that are part of a calculation ("5 + 4", "2^{10}", "3\\sqrt{13}", "2x"), of a tuple or
    a list in brackets, of a time of day.
    """
    text = GROUPED.sub(" ; ", text)
    found = []
    for match in NUMBER.finditer(text):
        before = text[: match.start()]
        sign = match["sign"] or ""
        negative = sign == "-" or (sign.startswith("-") and before.rstrip()[-1:] in tuple("=(:"))
        if (sign and OPERAND.search(before)) or BEFORE.search(before[-20:]):
            continue
        number, end = _number(match, text, None, negative)
        if number and not AFTER.match(text, end) and _ends(text, end):
            found.append(number)
    return found


def _number(
    match: re.Match, text: str, name: str | None, negative: bool | None = None
) -> tuple[Number | None, int]:
    """With where it ends, percent or scale and all; None for a division that gives an integer."""
    negative = match["sign"] is not None and "-" in match["sign"] if negative is None else negative
    if len(match[0]) > LONGEST:
        return None, match.end()
    sign = -1 if negative else 1
    places = None
    if match["decimal"] is None:
        top = _fraction(match["top"] or match["top2"])
        bottom = _fraction(match["bottom"] or match["bottom2"])
        if bottom == 0 or (top / bottom).denominator == 1:
            return None, match.end()
        value = int(match["whole"] or match["whole2"] or 0) + top / bottom
    else:
        value, places = _decimal(match)
    value *= sign
    other, end = None, match.end()
    if after := PERCENT.match(text, end):
        other, end = value / 100, after.end()
    elif after := SCALED.match(text, end):
        value, other, end = value * SCALE[after[1].lower()], value, after.end()
    return Number(value, other, places, (name, match["base"])), end


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _decimal(match: re.Match) -> tuple[Fraction, int | None]:
    text = match["decimal"].replace(",", "")
    exponent = int(match["e"] or match["power"] or match["power2"] or 0)
    if abs(exponent) > 10_000:  # as long a number as it takes to fill the memory
        exponent = 10_000 if exponent > 0 else -10_000
    digits = text.replace(".", "").lstrip("0")
    if "." in text and len(digits) > 15:  # of a float: 0.30000000000000004
        text = f"{Decimal(text):.15g}"
    places = len(text.partition(".")[2]) - exponent
    value = Fraction(Decimal(text)) * Fraction(10) ** exponent
    return value, places if places > 0 and len(digits) >= SIGNIFICANT else None


def _same(a: Fraction, a_places: int | None, b: Fraction, b_places: int | None) -> bool:
    """Equal, or the one with fewer decimals is the other's rounding."""
    if a == b:
        return True
    if a_places is not None and (b_places is None or b_places > a_places):
        return b.denominator != 1 and 2 * abs(a - b) <= Fraction(1, 10**a_places)
    if b_places is not None and (a_places is None or a_places > b_places):
        return a.denominator != 1 and 2 * abs(a - b) <= Fraction(1, 10**b_places)
    return False


def _ends(text: str, end: int) -> bool:
    """Whether no letters that are variables follow at once."""
    word = re.compile(r"[A-Za-z]+").match(text, end)
    return word is None or word[0] in UNIT_WORDS or len(word[0]) > 2
