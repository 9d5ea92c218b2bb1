"""What goes into a sample and what ends it: prompts, EOS ids, stop strings, limits, refusals."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import CHARS, make_model, make_tokenizer
from grpo_engine import GroupSampler, Rollout, SamplingParams, UserError
from oracles import script_model, stock_logprobs

EOS, HASH = 1, 3 + CHARS.index("#")


def char_ids(text: str) -> list[int]:
    """The ids of make_tokenizer by its definition: three specials, then the characters."""
    return [3 + CHARS.index(c) for c in text]


def follow(script: list[int], tokenizer=None, model=None, prompt=(5,), **params) -> Rollout:
    """The greedy sample of a model that says `script` after a prompt of one token."""
    model = script_model(script) if model is None else model
    params = SamplingParams(**{"temperature": 0, "max_tokens": 50, **params})
    return GroupSampler(model, tokenizer).generate([list(prompt)], 1, params)[0][0]


@pytest.mark.parametrize(
    ("token", "ends"), [(1, True), (7, True), (HASH, True), (0, False), (8, False)]
)
def test_every_eos_of_generation_config_and_tokenizer_ends_a_completion(token, ends):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "#"
    script = [20, 21, token, 22, 23]
    model = script_model(script)
    model.generation_config.eos_token_id = [1, 7]
    rollout = follow(script, tokenizer, model)
    wanted = ([20, 21, token], "stop") if ends else (script, "length")
    assert (rollout.completion_ids, rollout.finish_reason) == wanted


def test_the_eos_belongs_to_the_completion_also_when_it_is_the_pad_token():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = make_model(pad_token_id=EOS)
    prompts = [[EOS, 5, EOS, EOS, 6, EOS], [0, 9, 0], char_ids("what comes next?")]
    sampler = GroupSampler(model, tokenizer)
    groups = sampler.generate(prompts, 40, SamplingParams(temperature=1.5, seed=0, max_tokens=30))
    ended = 0
    for r in (r for group in groups for r in group):
        assert EOS not in r.completion_ids[:-1]
        assert (r.completion_ids[-1] == EOS) == (r.finish_reason == "stop")
        ended += r.completion_ids[-1] == EOS
        with torch.no_grad():
            wanted = stock_logprobs(model, r.prompt_ids, r.completion_ids, 1.5)
        torch.testing.assert_close(r.logp_sampler.double(), wanted, atol=1e-5, rtol=0)
    assert ended > 20


def test_ignore_eos_goes_on_for_that_sample_alone():
    script = [20, EOS, 21, EOS, 22]
    both = [SamplingParams(temperature=0, ignore_eos=flag, max_tokens=4) for flag in (True, False)]
    sampler = GroupSampler(script_model(script), make_tokenizer())
    goes_on, stops = sampler.generate([[5]], 2, both)[0]
    assert (goes_on.completion_ids, goes_on.finish_reason) == ([20, EOS, 21, EOS], "length")
    assert (stops.completion_ids, stops.finish_reason) == ([20, EOS], "stop")


@pytest.mark.parametrize(("last", "reason"), [(22, "length"), (EOS, "stop")])
def test_max_tokens_cuts_and_an_eos_in_the_last_place_still_counts(last, reason):
    rollout = follow([20, 21, last, 23], make_tokenizer(), max_tokens=3)
    assert (rollout.completion_ids, rollout.finish_reason) == ([20, 21, last], reason)


def test_the_context_cuts_each_sample_where_its_own_prompt_leaves_no_room():
    prompts = [[5] * 95, [6] * 90, [7] * 3]  # of a context of 96
    params = SamplingParams(max_tokens=20, seed=0, ignore_eos=True)
    groups = GroupSampler(make_model()).generate(prompts, 2, params)
    assert [len(r.completion_ids) for g in groups for r in g] == [1, 1, 6, 6, 20, 20]
    assert {r.finish_reason for g in groups for r in g} == {"length"}


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (("XY",), "abcXY"),
        (("d", "cX"), "abcX"),
        (("bcXYd",), "abcXYd"),
        (("a",), "a"),
        (("?a",), "abcXYdef"),  # half of it is the prompt's
        (("YX", "fa"), "abcXYdef"),
    ],
)
def test_a_stop_string_ends_the_completion_with_it(stop, said):
    script = char_ids("abcXYdef")
    rollout = follow(script, make_tokenizer(), stop=stop, prompt=char_ids("?"))
    assert rollout.completion_ids == char_ids(said)
    assert rollout.finish_reason == ("length" if said == "abcXYdef" else "stop")


def test_a_stop_string_is_of_its_sample_alone():
    params = [SamplingParams(temperature=0, max_tokens=8, stop=stop) for stop in (("b",), (), "e")]
    sampler = GroupSampler(script_model(char_ids("abcdef")), make_tokenizer())
    rollouts = sampler.generate([[5]], 3, params)[0]
    assert [r.completion_ids for r in rollouts] == list(map(char_ids, ("ab", "abcdef", "abcde")))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, as byte-level tokenizers have it for rare scripts."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("stop", ["答案", "答案到此结束了", "🏁🏁🏁"])
def test_a_stop_string_of_many_bytes_a_character_is_found(stop):
    tokenizer = byte_tokenizer()
    script = tokenizer(f"so {stop}. and on")["input_ids"]
    rollout = follow(script, tokenizer, script_model(script, vocab=256), stop=[stop])
    assert tokenizer.decode(rollout.completion_ids) == f"so {stop}"


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Letters a to d and all their pairs: text of two letter tokens is read as one pair token."""
    letters = "abcd"
    merges = [(x, y) for x in letters for y in letters]
    vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_completion_ids_are_the_drawn_tokens_never_those_of_the_text():
    tokenizer, model = merging_tokenizer(), make_model(vocab_size=22)
    prompt = tokenizer("abcda")["input_ids"]
    # A stop string, though it never comes, so that texts are looked at.
    params = SamplingParams(temperature=0, max_tokens=20, stop=["abcdabcd"])
    rollout = GroupSampler(model, tokenizer).generate([prompt], 1, params)[0][0]
    row = torch.tensor([prompt])
    whole = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20)
    drawn = whole[0, len(prompt) :].tolist()
    assert tokenizer(tokenizer.decode(drawn))["input_ids"] != drawn  # the text would not give them
    assert rollout.completion_ids == drawn

    params = SamplingParams(temperature=1.5, max_tokens=20, seed=0)
    rollouts = GroupSampler(model, tokenizer).generate(["abcda"], 20, params)[0]
    differ = [tokenizer(tokenizer.decode(r.completion_ids))["input_ids"] for r in rollouts]
    assert sum(a != r.completion_ids for a, r in zip(differ, rollouts, strict=True)) > 10
    for r in rollouts:
        assert r.prompt_ids == prompt
        with torch.no_grad():
            wanted = stock_logprobs(model, prompt, r.completion_ids, 1.5)
        torch.testing.assert_close(r.logp_sampler.double(), wanted, atol=1e-5, rtol=0)


def test_prompts_are_ids_strings_or_chat():
    sampler = GroupSampler(make_model(), make_tokenizer(bos=True, chat=True))
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi?"}]
    params = SamplingParams(max_tokens=4, seed=0)
    groups = sampler.generate([[9, 8, 7], "hi?", chat], [1, 2, 3], params)
    assert [len(group) for group in groups] == [1, 2, 3]
    wanted = [[9, 8, 7], [2, *char_ids("hi?")], [2, *char_ids("s:be\nu:hi?\na:")]]
    for number, (group, prompt) in enumerate(zip(groups, wanted, strict=True)):
        assert [r.prompt_ids for r in group] == [prompt] * len(group)
        assert [(r.group, r.sample) for r in group] == [(number, i) for i in range(len(group))]
    as_ids = sampler.generate(wanted, [1, 2, 3], params)
    for a, b in zip(groups, as_ids, strict=True):
        assert [r.completion_ids for r in a] == [r.completion_ids for r in b]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "row 1.*no tokens"),
        ([[5], [6], [7] * 96], "row 2.*96 tokens.*context is 96"),
        ([[5], [6] * 200], "row 1.*200 tokens.*context is 96"),
        ([[5, 75]], "row 0.*75"),
        ([[5], [-1]], "row 1.*-1"),
        (["hi", ""], "row 1.*no tokens"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_by_row_before_anything_runs(prompts, message):
    model = make_model()
    sampler = GroupSampler(model, make_tokenizer())
    model.get_input_embeddings().register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(UserError, match=message) as caught:
        sampler.generate(prompts, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "group_size", "params", "message"),
    [
        ([[5]], 1, SamplingParams(stop=["x"]), "stop.*tokenizer"),
        (["hi"], 1, SamplingParams(), "text.*tokenizer"),
        ([[{"role": "user", "content": "hi"}]], 1, SamplingParams(), "text.*tokenizer"),
        ([[5]], 0, SamplingParams(), "group_size"),
        ([[5], [6]], [1], SamplingParams(), "group_size"),
        ([[5]], 2, [], "params"),
    ],
)
def test_calls_that_make_no_sense_are_refused(prompts, group_size, params, message):
    with pytest.raises(ValueError, match=message):
        GroupSampler(make_model()).generate(prompts, group_size, params)


@pytest.mark.parametrize("slots", [0, -1, "all"])
def test_slots_are_auto_or_at_least_one(slots):
    with pytest.raises(ValueError, match="slots"):
        GroupSampler(make_model(), slots=slots)


def test_rollouts_carry_the_policy_version():
    sampler = GroupSampler(make_model())

    def versions() -> set[int]:
        groups = sampler.generate([[5], [6]], 2, SamplingParams(max_tokens=2))
        return {r.policy_version for group in groups for r in group}

    assert versions() == {0}
    sampler.update_policy()
    sampler.update_policy()
    assert versions() == {2}
