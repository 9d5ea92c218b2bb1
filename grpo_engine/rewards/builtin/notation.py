"""One notation for what people and models write: clean text, units, LaTeX."""

import re

WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
SIGNS = {
    **{c: "-" for c in "\u2212\u2013\u2010\u2011"},
    **{c: " " for c in "\u3000\u00a0"},
    **dict.fromkeys("\u2009\u202f\u200b", r"\,"),
    **{"。": ".", "、": ",", "¥": "$", "€": "$", "£": "$", "₹": "$", "°": r"^\circ "},
    **{
        "\u00d7": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "±": r"\pm ",
    },
    **{
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "\u222a": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
    },
    **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
}
TABLE = str.maketrans(SIGNS) | WIDE
SUBSTITUTIONS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ]|~)+(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\frac\s*(\{[^{}]*\})\s*\{", r"\\frac\1{"),
        (r"√\s*(?:\(([^()]*)\)|(\w+))", r"\\sqrt{\1\2}"),
        (r"(?<!\w)\*\*(\S(?:[^*\n]*\S)?)\*\*(?!\w)", r"\1"),
        (r"(?<![\w*)])\*(\S(?:[^*\n]*\S)?)\*(?![\w*])", r"\1"),
        (r"\\%", "%"),
        (r"\\(?=\$)", ""),
        (r"-\s*\$\s*(?=[\d.])", "-"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", " degrees "),
    )
]
WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mbox|hbox|operatorname)"
    r"\s*\{([^{}]*)\}"
)
DELIMITERS = re.compile(r"\$+|\\[()\[\]]")
# Abbreviations, which may follow a number at once.
UNIT_WORDS = frozenset(
    "m cm mm km nm g kg mg s ms h hr hrs min mins ml mL l L lb lbs oz ft in yd mi mph kph Hz W kW "
    "V A J N K C F am pm AM PM st nd rd th B GB MB KB sq c ct cc".split()
)
# Words that say that it is no plain number with its unit.
NO_UNITS = frozenset(
    "and or to plus minus times divided over by squared cubed factorial pi sqrt sin cos tan log ln "
    "inf infinity choose mod not if is are equals half third thirds quarter quarters".split()
)
UNIT = re.compile(r"[A-Za-z]+")
FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp"
PLAIN = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<!\\)\b({FUNCTIONS})(?![a-zA-Z])", r"\\\1"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\*\*", "^"),
        (r"\s*\*\s*", r" \\cdot "),
        (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
    )
]


def clean(text: str) -> str:
    """One spelling for signs, spaces, fractions, thousands and degrees; nothing is worked out."""
    text = text.translate(TABLE)
    for pattern, new in SUBSTITUTIONS:
        text = pattern.sub(new, text)
    return text


def unwrapped(text: str) -> str:
    """Without \\text{} and the like around what it is about, and without $ and \\( \\)."""
    return DELIMITERS.sub(" ", WRAPPED.sub(r" \1 ", text))


def is_unit(text: str) -> bool:
    """Whether what follows a number is its unit, in words or as abbreviation: "cm^2", "dollars"."""
    if re.fullmatch(r"\s*[A-Za-z][A-Za-z\s./'-]*(?:\^\{?[23]\}?)?[.\s]*", text) is None:
        return False
    words = UNIT.findall(text)
    if len(words) > 5 or any(word.lower() in NO_UNITS for word in words):
        return False
    apart = text[0].isspace()
    return all(word in UNIT_WORDS or (len(word) > 2 - apart) for word in words)


def latex(text: str) -> str:
    """A clean expression, in LaTeX or as one types it, as LaTeX."""
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    text = text.replace(" degrees ", r"^{\circ}").replace(r"\varnothing", r"\emptyset")
    return DELIMITERS.sub(" ", text).strip().rstrip(".,;").strip()


def folded(text: str) -> str:
    """A clean answer as letters to be compared: no case, no spaces, no $ and \\text{}."""
    text = re.sub(r"\s+", "", unwrapped(text)).casefold().strip(".,;:!\"'`*")
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text
