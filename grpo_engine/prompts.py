"""Prompts to token ids: chat templates, the rules on BOS, room in the context."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .data import Messages
from .errors import UserError

TAIL_TOKENS = 32
CLOCK = re.compile(r"""\bstrftime_now\s*\(\s*("[^"]*"|'[^']*')\s*\)""")


def to_messages(prompt: str | Messages, as_chat: bool, system: str | None) -> str | Messages:
    """The prompt as it is sent: wrapped as a user's message if asked, with its system message."""
    if isinstance(prompt, str):
        if not as_chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if system is not None and prompt[0]["role"] != "system":
        return [{"role": "system", "content": system}, *prompt]
    return prompt


def encode_prompt(tokenizer: Any, prompt: str | Messages, now: str | None = None) -> list[int]:
    """Token ids of a string or of chat messages, with one BOS where the tokenizer has one.

    A chat template writes its own special tokens, so none are added to it; a string that already
    begins with the BOS text gets no second one. Raises UserError for a doubled BOS.
    now: ISO date and time that the template may write; None: that of the clock.
    """
    if isinstance(prompt, str):
        rendered = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = tokenizer(prompt, add_special_tokens=not rendered)["input_ids"]
        eos = tokenizer.eos_token_id
        if len(ids) > 1 and ids[-1] == eos and not prompt.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # a tokenizer that ends every text would end the answer before it begins
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the prompts are chat messages, but the tokenizer has no chat template; "
                "give strings, or a tokenizer with a template"
            )
        try:
            text = tokenizer.apply_chat_template(
                prompt,
                chat_template=_at(tokenizer.get_chat_template(), now),
                tokenize=False,
                add_generation_prompt=True,
            )
        except UserError:
            raise
        except Exception as error:  # the template is a program of the model's maker
            raise UserError(
                f"the chat template refuses the prompt {str(prompt)[:60]!r}: {error}"
            ) from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(
            f"the prompt {str(prompt)[:60]!r} begins with two BOS tokens ({tokenizer.bos_token}); "
            "remove the one in the text"
        )
    return list(ids)


def _at(template: str, now: str | None) -> str:
    """The template with the date `now` in place of its calls of the clock."""
    if now is None:
        return template
    moment = datetime.fromisoformat(now)
    dated = CLOCK.sub(lambda call: moment.strftime(call[1]), template)
    if re.search(r"\bstrftime_now\b(?!\s+is\b)", dated):
        raise UserError(
            "the chat template asks strftime_now for the date in a way that is not known here, so "
            "that a resumed run would have other prompts; write the date into the template"
        )
    return dated


def check_room(
    encoded: Sequence[Sequence[int]],
    context: int | None,
    vocab: int,
    source: str,
    first_row: int = 0,
) -> None:
    """Raises UserError for a prompt that is empty, fills the context, or has an unknown id."""
    for number, ids in enumerate(encoded, start=first_row):
        if not ids:
            raise UserError(f"{source} row {number}: the prompt has no tokens")
        if context is not None and len(ids) >= context:
            raise UserError(
                f"{source} row {number}: the prompt has {len(ids)} tokens and the model's context "
                f"is {context}: no room for one token of an answer; shorten or drop the row"
            )
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise UserError(
                f"{source} row {number}: token id {max(ids)} is outside the model's {vocab}: "
                "this tokenizer belongs to another model"
            )


def decode_all(
    tokenizer: Any, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
) -> list[str]:
    """The text of each sequence; equal ones, of which groups have many, are decoded once."""
    keys = [tuple(ids) for ids in sequences]
    # After another token, for decoders of SentencePiece take a blank off the beginning.
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = len(tokenizer.decode(before, skip_special_tokens=skip_special_tokens))
    texts = {
        ids: tokenizer.decode([*before, *ids], skip_special_tokens=skip_special_tokens)[start:]
        for ids in set(keys)
    }
    return [texts[ids] for ids in keys]


def end_of_turn(tokenizer: Any) -> frozenset[int]:
    """The special token with which the chat template ends an answer, which may be no EOS."""
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template that wants a system message, say: it ends as it may
        return frozenset()
    _, answered, rest = text.rpartition("answer")
    ids = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if answered else []
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return frozenset(ids[:1]).intersection(special)


def prompt_tail(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """The end of the prompt as the model saw it, special tokens kept."""
    return tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
