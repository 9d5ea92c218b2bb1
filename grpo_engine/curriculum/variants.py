"""Other wordings of a prompt: templates around it, and rewordings that the data brings."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from .randomness import generator

Prompt = str | list[dict[str, Any]]
PLACE = "{prompt}"


def check_templates(templates: Sequence[str]) -> None:
    """UserError for one without the place for the prompt."""
    for template in templates:
        if PLACE not in template:
            raise UserError(
                f"variants.templates: {template[:60]!r} has no {PLACE}, the place for the prompt"
            )


class Variants:
    """The wordings of each task, numbered; the number goes into the record.

    A task has its prompt and the rewordings of `column` (a string or a list; none where the column
    is missing or null), each in every template. Number `wording * len(templates) + template`: 0 is
    the prompt as it is, or in the first template where there are some. Templates are filled by
    plain replacement, since prompts may hold braces.
    """

    def __init__(self, templates: Sequence[str] = (), column: str | None = None) -> None:
        check_templates(templates)
        self.templates, self.column = list(templates) or [PLACE], column

    def count(self, columns: Mapping[str, Any]) -> int:
        """Wordings of a task; `columns`: of its row."""
        return (1 + len(self._rewordings(columns))) * len(self.templates)

    def choose(self, task: int, columns: Mapping[str, Any], seed: int, step: int) -> int:
        """The number of the wording that all samples of a group get."""
        return int(generator("variant", seed, task, step).integers(self.count(columns)))

    def apply(self, prompt: Prompt, columns: Mapping[str, Any], number: int) -> Prompt:
        """The prompt in wording `number`; of chat messages, only the last of the user changes.

        Raises UserError if there is no such wording any more, or no text to change.
        """
        if not 0 <= number < self.count(columns):
            raise UserError(
                f"there is no variant {number} of {str(prompt)[:60]!r}: it has "
                f"{self.count(columns)}; were variants.templates or the data changed?"
            )
        wording, template = divmod(number, len(self.templates))
        if wording == 0 and self.templates[template] == PLACE:
            return prompt
        if isinstance(prompt, str):
            return self._worded(prompt, columns, wording, template)
        at = _last_of_user(prompt)
        text = self._worded(prompt[at]["content"], columns, wording, template)
        return [*prompt[:at], {**prompt[at], "content": text}, *prompt[at + 1 :]]

    def _worded(self, text: str, columns: Mapping[str, Any], wording: int, template: int) -> str:
        if wording > 0:
            text = self._rewordings(columns)[wording - 1]
        return self.templates[template].replace(PLACE, text)

    def _rewordings(self, columns: Mapping[str, Any]) -> list[str]:
        return [] if self.column is None else texts_of(columns, self.column, "variants.column")


def texts_of(columns: Mapping[str, Any], column: str, key: str) -> list[str]:
    """The texts of a column that holds a string, a list of them, or null for none.

    Raises UserError naming the config's `key` for anything else, and for an empty text.
    """
    value = columns.get(column)
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) and text for text in texts):
        return texts
    raise UserError(
        f"{key}: the column {column!r} must hold a string or a list of strings, none empty; a row "
        f"holds {str(value)[:60]!r}"
    )


def _last_of_user(prompt: list[dict[str, Any]]) -> int:
    users = [at for at, message in enumerate(prompt) if message["role"] == "user"]
    if users and isinstance(prompt[users[-1]]["content"], str):
        return users[-1]
    raise UserError(
        f"variants: the chat prompt {str(prompt)[:60]!r} has no user message, or one that is no "
        "text, to put into other words; leave out variants, or change the row"
    )
