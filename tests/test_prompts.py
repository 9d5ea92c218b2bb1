"""Prompts to token ids: one BOS and no EOS (fault 21), chat and system, room in the context."""

import copy

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conftest import BOS, CHARS, EOS, make_model, make_tokenizer
from grpo_engine.errors import UserError
from grpo_engine.prompts import (
    check_room,
    decode_all,
    encode_prompt,
    end_of_turn,
    prompt_tail,
    to_messages,
)
from grpo_engine.sampler import GroupSampler

PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
USER = [{"role": "user", "content": "1+1"}]
SYSTEM = [{"role": "system", "content": "Add."}]


def ids(text: str) -> list[int]:
    """Ids of the test tokenizer, which has one token a character, after three special ones."""
    return [3 + CHARS.index(c) for c in text]


def make_eos_appender(bos: bool):
    """A tokenizer that ends every text with EOS, as those of T5 and some Llamas do."""
    tokenizer = make_tokenizer(bos=bos)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}" if bos else f"$A {EOS}",
        special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)],
    )
    assert tokenizer("1")["input_ids"][-1] == EOS_ID
    return tokenizer


@pytest.mark.parametrize("text", ["1+1=", " 1", "x"])
def test_raw_text_gets_one_bos_where_the_tokenizer_adds_it(text):
    assert encode_prompt(make_tokenizer(bos=True), text) == [BOS_ID, *ids(text)]


def test_raw_text_gets_no_bos_where_the_tokenizer_has_none():
    assert encode_prompt(make_tokenizer(), "1+1=") == ids("1+1=")


def test_raw_text_that_begins_with_the_bos_text_gets_no_second_one():
    # A dataset that was rendered with a chat template beforehand.
    assert encode_prompt(make_tokenizer(bos=True), f"{BOS}1+1=") == [BOS_ID, *ids("1+1=")]


def test_raw_text_of_a_model_with_a_template_stays_raw():
    assert encode_prompt(make_tokenizer(bos=True, chat=True), "1+1=") == [BOS_ID, *ids("1+1=")]


@pytest.mark.parametrize("bos", [False, True])
def test_chat_has_the_bos_of_the_template_and_no_other(bos):
    tokenizer = make_tokenizer(bos=bos, chat=True)
    expected = [BOS_ID] * bos + ids("s:Add.\nu:1+1\na:")
    assert encode_prompt(tokenizer, SYSTEM + USER) == expected


def test_chat_whose_template_writes_no_bos_gets_none():
    # The template has the last word: some models are trained without BOS in a chat.
    tokenizer = make_tokenizer(bos=True, chat=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    assert encode_prompt(tokenizer, USER) == ids("u:1+1\na:")


def test_text_with_two_bos_is_an_error():
    with pytest.raises(UserError, match=f"two BOS tokens \\({BOS}\\)"):
        encode_prompt(make_tokenizer(bos=True), f"{BOS}{BOS}1+1=")


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ bos_token }}a:", "{{ bos_token }}{{ messages[0].content }}"]
)
def test_chat_with_two_bos_is_an_error(template):
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="two BOS tokens"):
        encode_prompt(tokenizer, [{"role": "user", "content": f"{BOS}1+1="}])


@pytest.mark.parametrize("bos", [False, True])
def test_eos_that_a_tokenizer_appends_is_taken_off(bos):
    # It would tell the model that the answer is over before it begins.
    assert encode_prompt(make_eos_appender(bos), "1+1=") == [BOS_ID] * bos + ids("1+1=")


def test_eos_that_the_prompt_holds_is_kept():
    # A conversation rendered by hand: "question<eos>" ends a turn on purpose.
    assert encode_prompt(make_tokenizer(), f"1{EOS}2") == [*ids("1"), EOS_ID, *ids("2")]
    assert encode_prompt(make_tokenizer(), f"1{EOS}") == [*ids("1"), EOS_ID]


def test_chat_without_a_template_is_an_error():
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(make_tokenizer(), USER)


@pytest.mark.parametrize(
    ("prompt", "as_chat", "system", "sent"),
    [
        ("1+1", False, None, "1+1"),
        ("1+1", True, None, USER),
        ("1+1", True, "Add.", SYSTEM + USER),
        (USER, False, None, USER),
        (USER, True, None, USER),
        (USER, False, "Add.", SYSTEM + USER),
        (SYSTEM + USER, False, "Subtract.", SYSTEM + USER),
        # There is no place for a system message in a raw string.
        ("1+1", False, "Add.", "1+1"),
    ],
)
def test_prompt_as_it_is_sent(prompt, as_chat, system, sent):
    before = copy.deepcopy(prompt)
    assert to_messages(prompt, as_chat, system) == sent
    assert prompt == before


def test_prompt_of_context_less_one_token_leaves_room_for_an_answer():
    check_room([[3] * 9], context=10, vocab=5, source="data")
    check_room([[3] * 1000], context=None, vocab=5, source="data")
    for length in (10, 11):
        with pytest.raises(UserError, match=f"data row 1: the prompt has {length} tokens.* 10"):
            check_room([[3], [3] * length], context=10, vocab=5, source="data")


def test_prompt_without_tokens_is_an_error_by_row():
    with pytest.raises(UserError, match="data row 2: the prompt has no tokens"):
        check_room([[3], [4], []], context=10, vocab=5, source="data")


def test_token_id_outside_of_the_vocabulary_is_an_error_by_row():
    check_room([[0, 4]], context=10, vocab=5, source="data")
    with pytest.raises(UserError, match="data row 1: token id 5 is outside the model's 5"):
        check_room([[4], [5, 0]], context=10, vocab=5, source="data")


def test_tail_is_what_the_model_saw_special_tokens_kept():
    tokenizer = make_tokenizer(bos=True, chat=True)
    assert prompt_tail(tokenizer, encode_prompt(tokenizer, USER)) == f"{BOS}u:1+1\na:"
    long = encode_prompt(tokenizer, "x" * 100 + "think")
    assert prompt_tail(tokenizer, long) == "x" * 27 + "think"


def make_sentencepiece():
    """As of Llama 2: a blank is part of the word, and a decoder takes the first one off."""
    words = ["<unk>", "\u2581a", "\u2581", "7", "\u25817", "\u2581is", "."]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("sequence", "text"),
    [([4], " 7"), ([3], "7"), ([5, 4, 6], " is 7."), ([2, 2, 3], "  7"), ([], ""), ([6], ".")],
)
def test_a_completion_keeps_the_blank_that_it_begins_with(sequence, text):
    tokenizer = make_sentencepiece()
    assert tokenizer.decode(sequence) == text.removeprefix(" ")
    assert decode_all(tokenizer, [sequence], skip_special_tokens=True) == [text]


def test_special_tokens_are_kept_or_skipped_in_the_text_of_a_completion():
    sequence = [*ids(" 7"), EOS_ID]
    for skip, text in ((True, " 7"), (False, f" 7{EOS}")):
        assert decode_all(make_tokenizer(), [sequence] * 2, skip_special_tokens=skip) == [text] * 2


TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}@@{% endfor %}"


@pytest.mark.parametrize(
    ("end", "special"),
    [
        ("<|im_end|>\n", True),  # ChatML on a base model, whose EOS is another
        (" <|im_end|>", True),
        (EOS, True),
        ("\n", False),
        ("", False),
        ("x", False),  # a word may also stand inside an answer
    ],
)
def test_an_answer_ends_where_the_template_ends_a_turn(end, special):
    tokenizer = make_tokenizer()
    added = AddedToken("<|im_end|>", special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [added]})
    tokenizer.chat_template = TURNS.replace("@@", end)
    name = end.strip()
    expected = {tokenizer.convert_tokens_to_ids(name)} if special else set()
    assert end_of_turn(tokenizer) == expected
    model = make_model(vocab_size=len(tokenizer))
    assert GroupSampler(model, tokenizer).eos_ids == expected | {EOS_ID}


def test_a_template_that_refuses_a_plain_conversation_ends_it_as_it_may():
    tokenizer = make_tokenizer()
    assert end_of_turn(tokenizer) == frozenset()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    assert end_of_turn(tokenizer) == frozenset()
