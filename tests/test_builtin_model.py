"""The reward of a reward model, against the forward of the same classifier written out."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from grpo_engine.errors import UserError
from grpo_engine.rewards.builtin import reward_model

WORDS = ["<pad>", "<bos>", *"abcdefgh", "user:", "assistant:"]
IDS = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
ROOM = 12


def save(folder, *, labels=1, pad=0, template=TEMPLATE) -> LlamaForSequenceClassification:
    """A tiny classifier with weights large enough to tell texts apart, and its tokenizer."""
    torch.manual_seed(labels)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=ROOM,
        num_labels=labels,
        pad_token_id=pad,
        bos_token_id=1,
        initializer_range=0.5,
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return model


def ids_of(words: str) -> torch.Tensor:
    return torch.tensor([[IDS[w] for w in words.split()]])


def by_hand(model, words: str) -> list[float]:
    """The logits at the last token of one text: backbone, then the score layer, nothing padded."""
    with torch.no_grad():
        return model.score(model.model(ids_of(words)).last_hidden_state[0, -1]).tolist()


def test_strings_are_joined_and_padding_changes_nothing(tmp_path):
    model = save(tmp_path)
    prompts, completions = ["a b ", "c", "d "], ["c d e f g", " d", ""]
    wanted = [by_hand(model, f"<bos> {t}")[0] for t in ("a b c d e f g", "c d", "d")]
    assert max(wanted) - min(wanted) > 0.1  # the texts do differ
    for size in (1, 2, 8):
        got = reward_model(prompts, completions, path=str(tmp_path), batch_size=size, device="cpu")
        assert got == pytest.approx(wanted, abs=1e-5)


def test_an_encoder_does_not_see_the_padding(tmp_path):
    save(tmp_path)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
        initializer_range=0.5,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    got = reward_model(["a "] * 2, ["b", "c d e f"], path=str(tmp_path), device="cpu")
    with torch.no_grad():
        pooled = [model.bert(ids_of(f"<bos> a {t}")).pooler_output for t in ("b", "c d e f")]
        wanted = [model.classifier(p).item() for p in pooled]
    assert got == pytest.approx(wanted, abs=1e-5)


def test_chats_go_through_the_template_with_one_bos(tmp_path):
    model = save(tmp_path)
    prompt = [{"role": "user", "content": "a b"}]
    completions = ["c", [{"role": "assistant", "content": "d e"}]]
    got = reward_model([prompt] * 2, completions, path=str(tmp_path), device="cpu")
    wanted = [by_hand(model, f"<bos> user: a b assistant: {t}")[0] for t in ("c", "d e")]
    assert got == pytest.approx(wanted, abs=1e-5)


def test_the_label_says_which_logit(tmp_path):
    model = save(tmp_path, labels=3)
    for label in range(3):
        got = reward_model(["a "], ["b"], path=str(tmp_path), label=label, device="cpu")
        assert got == pytest.approx([by_hand(model, "<bos> a b")[label]], abs=1e-5)
    with pytest.raises(UserError, match="label must be one of 0 to 2; given None"):
        reward_model(["a "], ["b"], path=str(tmp_path), device="cpu")
    with pytest.raises(UserError, match="label must be below the model's 3; given 3"):
        reward_model(["a "], ["b"], path=str(tmp_path), label=3, device="cpu")


def test_a_model_without_a_pad_token_judges_one_text_at_a_time(tmp_path):
    model = save(tmp_path, pad=None)
    got = reward_model(["a ", "a "], ["b c d", "e"], path=str(tmp_path), device="cpu")
    wanted = [by_hand(model, f"<bos> a {t}")[0] for t in ("b c d", "e")]
    assert got == pytest.approx(wanted, abs=1e-5)


def test_a_text_beyond_the_context_gives_none(tmp_path):
    model = save(tmp_path)
    fits = " ".join("a" * (ROOM - 2))  # and <bos>, and b
    got = reward_model(["b "] * 2, [fits, f"{fits} a"], path=str(tmp_path), device="cpu")
    assert got == [pytest.approx(by_hand(model, f"<bos> b {fits}")[0], abs=1e-5), None]


def test_it_is_loaded_once(tmp_path, monkeypatch):
    save(tmp_path)
    first = reward_model(["a "], ["b"], path=str(tmp_path), device="cpu")
    monkeypatch.setattr(LlamaForSequenceClassification, "from_pretrained", None)
    assert reward_model(["a "], ["b"], path=str(tmp_path), device="cpu") == first


def test_weights_that_are_no_classifiers_are_refused(tmp_path):
    model = save(tmp_path)
    (tmp_path / "base").mkdir()
    model.model.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"can't load .* it lacks the weights score\.weight"):
        reward_model(["a "], ["b"], path=str(tmp_path / "base"), device="cpu")


def test_chats_without_a_template_are_refused(tmp_path):
    save(tmp_path, template=None)
    with pytest.raises(UserError, match="has no chat template; give one that has"):
        reward_model([[{"role": "user", "content": "a"}]], ["b"], path=str(tmp_path), device="cpu")
