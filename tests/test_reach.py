"""Rotary factors that depend on the longest sequence of a batch: refused where they can."""

import pytest
import torch

from conftest import make_model, make_tokenizer
from grpo_engine import GroupSampler, SamplingParams, UserError, group_hidden
from grpo_engine.packed import completion_logprobs
from grpo_engine.trainer import Trainer
from oracles import stock_logprobs
from runs import tiny_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 5.0, 6.0, 7.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
# Each turns 24 tokens by the same factors whatever stands beside them.
LIMITED = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 24}),
}
PROMPT, FITS = [10, 11, 12, 13], list(range(20, 40))
TOO_LONG = [*FITS, 40]


def limited_model(kind: str) -> torch.nn.Module:
    family, changes = LIMITED[kind]
    return make_model(family, **changes)


@pytest.mark.parametrize("kind", LIMITED)
def test_up_to_the_limit_logprobs_are_those_of_each_sequence_alone(kind):
    model = limited_model(kind)
    with torch.no_grad():
        logp, _ = completion_logprobs(model, [PROMPT] * 2, [FITS[:3], FITS], [1.0] * 2)
        wanted = [stock_logprobs(model, PROMPT, c, 1.0) for c in (FITS[:3], FITS)]
    torch.testing.assert_close(logp.double(), torch.cat(wanted), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", LIMITED)
def test_a_packed_forward_that_passes_the_limit_is_refused(kind):
    with pytest.raises(UserError, match=f"{kind}.*beyond 24 .*prompt of 4 and 21 .*at most 20"):
        group_hidden(limited_model(kind), [PROMPT], [[FITS, TOO_LONG]])


def test_sampling_that_can_pass_the_limit_is_refused_before_it_draws():
    sampler = GroupSampler(limited_model("longrope"))
    fitting, passing = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 21))
    assert len(sampler.generate([PROMPT], 1, fitting)[0][0].completion_ids) == 20
    with pytest.raises(UserError, match=r"longrope.*beyond 24 .*at most 20"):
        sampler.generate([PROMPT], 2, [fitting, passing])


def test_a_context_that_ends_at_the_limit_bounds_the_answers():
    sampler = GroupSampler(limited_model("dynamic"))
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    assert len(sampler.generate([PROMPT], 1, params)[0][0].completion_ids) == 20


def test_factors_that_never_change_are_served_to_the_end_of_the_context():
    group_hidden(make_model(rope_parameters=YARN), [PROMPT], [[list(range(3, 75)), FITS]])


@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_whose_lengths_can_pass_the_limit_is_refused_at_its_start(tmp_path, held_out):
    folder = tmp_path / "model"
    limited_model("longrope").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    long, short = '{"prompt": "12345678901234567890", "answer": "7"}\n', '{"prompt": "1"}\n'
    for name, rows in (("data", short if held_out else long), ("held", long)):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    paths = {"eval_path": str(tmp_path / "held.jsonl")} if held_out else {}
    config = tiny_config(folder, tmp_path, data=paths, sampling={"max_tokens": 5})
    with pytest.raises(UserError, match=r"prompt of 20 and 5 .*set max_tokens to at most 4"):
        Trainer(config)


@pytest.mark.parametrize(("most", "said"), [(91, False), (92, True), (100_000, True)])
def test_a_run_says_that_its_answers_end_at_the_context(model_folder, tmp_path, capsys, most, said):
    (tmp_path / "data.jsonl").write_text('{"prompt": "123"}\n{"prompt": "12345"}\n')
    Trainer(tiny_config(model_folder, tmp_path, sampling={"max_tokens": most}))
    line = f"sampling.max_tokens {most} is more than the model's context of 96 has room for: "
    line += "after the longest prompt, of 5, answers end at 91 tokens\n"
    assert capsys.readouterr().out == line * said
