"""Where in a completion its answer stands."""

import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SAID = re.compile(
    r"(?:\banswer\b(?:[^.:=\n]{0,60}?\bis\b\s*:?|\s*(?:\*\*)?\s*[:=])|答案(?:是|为)?\s*[::]?)[\s*]*",
    re.IGNORECASE,
)
HASHED = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# What may stand between boxes that are parts of one answer.
JOINT = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\band\b|\bor\b)*")


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{} that is closed and not empty; of nested ones the innermost.

    Boxes with nothing but "," or "and" between them are one list: "\\boxed{1}, \\boxed{2}".
    """
    found = _boxes(text)
    if not found:
        return None
    run = [found.pop()]
    while found and JOINT.fullmatch(text, found[-1][1], run[0][0]):
        run.insert(0, found.pop())
    return ", ".join(dict.fromkeys(content for _, _, content in run))


def tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def hashed(text: str) -> str | None:
    """What stands after the last "####" of the form of GSM8K, to the end of the line."""
    found = HASHED.findall(text)
    return found[-1] if found else None


def said(text: str) -> str | None:
    """What follows the last "the answer is" or "answer:" that anything follows, to the end."""
    ends = [match.end() for match in SAID.finditer(text)]
    rests = (text[end:].strip() for end in reversed(ends))
    return next((rest for rest in rests if rest.strip("*$. \n")), None)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of the closed boxes that hold no other box, in order."""
    open_braces: list[tuple[bool, int, int]] = []
    found: list[tuple[int, int, str]] = []
    for match in BRACES.finditer(text):
        token = match[0]
        if token == "}":
            is_box, start, inside = open_braces.pop() if open_braces else (False, 0, 0)
            content = text[inside : match.start()].strip()
            if is_box and content and not (found and found[-1][0] > start):
                found.append((start, match.end(), content))
        elif token.endswith("{") and token != r"\{":
            open_braces.append((token != "{", match.start(), match.end()))
    return found
