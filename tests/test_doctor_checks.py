"""The doctor's checks of policy, prompts and installation: what is wrong is named."""

import math
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import EOS, make_model, make_tokenizer
from grpo_engine.config import LoraConfig, ModelConfig
from grpo_engine.doctor import FAIL, MISSING, OK, WARNING, installation, ops, policy
from grpo_engine.errors import UserError
from grpo_engine.model import Policy, load_policy
from grpo_engine.rollout import Rollout, SamplingParams
from grpo_engine.sampler import GroupSampler

CHAT = [{"role": "user", "content": "say 7"}]
SCORED = torch.tensor([-1.0, -2.5])


def given(**changes) -> policy.Logprobs:
    return replace(policy.Logprobs(SCORED.clone(), SCORED, SCORED.clone(), None), **changes)


def test_log_probs_that_agree():
    ratio, gap, kl = policy.check_logprobs(given(reference=SCORED.clone()))
    assert (ratio.status, gap.status, kl.status) == (OK, OK, OK)
    assert "1.000000 to 1.000000 over 2 tokens" in ratio.text
    assert kl.text == "0.00e+00 nats a token"
    assert "loss.beta is 0" in policy.check_logprobs(given())[2].text


def test_a_ratio_that_is_not_one():
    ratio = policy.check_logprobs(given(trained=SCORED + torch.tensor([0.0, math.log(2)])))[0]
    assert ratio.status == FAIL and "1.000000 to 2.000000" in ratio.text
    ratio = policy.check_logprobs(given(trained=SCORED + 1e-3), dropout=0.1)[0]
    assert ratio.status == WARNING and "lora.dropout 0.1" in ratio.text


def test_a_sampler_that_computes_something_else():
    far = given(sampler=torch.tensor([-1.0, -2.0]))  # a mean of 0.25 nats
    gap = policy.check_logprobs(far)[1]
    assert gap.status == FAIL and "mean 2.50e-01, most 5.00e-01" in gap.text
    assert policy.check_logprobs(far, most_gap=0.3)[1].status == OK
    assert policy.check_logprobs(given(sampler=SCORED * math.nan))[1].status == FAIL


def test_a_reference_that_is_another():
    # k3 of a log-ratio of log 2: 2 - log 2 - 1.
    kl = policy.check_logprobs(given(reference=SCORED + math.log(2)))[2]
    assert kl.status == FAIL and f"{1 - math.log(2):.2e}" in kl.text
    kl = policy.check_logprobs(given(reference=SCORED + math.log(2)), own_reference=True)[2]
    assert kl.status == OK and "model.reference" in kl.text


@pytest.fixture(scope="module")
def trained(model_folder: Path) -> tuple[Policy, list[Rollout]]:
    """A policy with a fresh adapter, and a group that it sampled."""
    model = ModelConfig(str(model_folder), dtype="float32")
    made = load_policy(model, LoraConfig(rank=4), needs_reference=True, resume=None)
    params = SamplingParams(temperature=0.7, max_tokens=9, seed=3)
    return made, GroupSampler(made.model, made.tokenizer).generate([[5, 9, 20]], 5, params)[0]


def test_real_log_probs_agree_whatever_the_budget(trained):
    made, rollouts = trained
    modes = [m.training for m in made.model.modules()]
    found = policy.logprobs(made, rollouts, 10_000)
    assert [m.training for m in made.model.modules()] == modes
    assert [c.status for c in policy.check_logprobs(found, most_gap=policy.EXACT_GAP)] == [OK] * 3
    # The first sample short: micro-batches of (3 + 2) and (3 + 9) tokens come largest first.
    cut = {"completion_ids": rollouts[0].completion_ids[:2], "logp_sampler": SCORED}
    ragged = [replace(rollouts[0], **cut), *rollouts[1:]]
    tight = policy.logprobs(made, ragged, 3 + 9).scored
    whole = torch.cat([found.scored[:2], found.scored[len(rollouts[0].completion_ids) :]])
    torch.testing.assert_close(tight, whole, rtol=0, atol=1e-5)


def test_an_adapter_that_has_moved_is_seen(trained):
    made, rollouts = trained
    weights = [p for name, p in made.trainable().items() if "lora_B" in name]
    with torch.no_grad():
        for p in weights:
            p += 0.5
    try:
        ratio, gap, kl = policy.check_logprobs(policy.logprobs(made, rollouts, 10_000))
    finally:
        with torch.no_grad():
            for p in weights:
                p.zero_()
    assert (ratio.status, gap.status, kl.status) == (OK, FAIL, FAIL)


@pytest.mark.parametrize(
    ("bos", "prompt", "ids", "status", "text"),
    [
        (False, "a", [30], OK, "has none"),
        (True, "a", [2, 30], OK, "1 in front"),
        (True, "a", [30], FAIL, "0 in front"),
        (True, "a", [2, 2, 30], FAIL, "2 in front"),
        (True, CHAT, [30], WARNING, "the chat template writes none"),
        (True, CHAT, [2, 30, 2], OK, "1 in front"),
    ],
)
def test_bos(bos, prompt, ids, status, text):
    found = policy.check_bos(make_tokenizer(bos=bos, chat=True), prompt, ids)
    assert found.status == status and text in found.text


def tail(prompt, ids, template=None):
    tokenizer = make_tokenizer(chat=True)
    if template is not None:
        tokenizer.chat_template = template
    made = SimpleNamespace(model=make_model(), tokenizer=tokenizer)
    return policy.check_tail(made, prompt, ids)


def test_the_prompts_tail():
    tokenizer = make_tokenizer()
    ids = tokenizer("say 7:")["input_ids"]
    assert tail("say 7:", ids).status == OK and tail("say 7:", ids).text == "'say 7:'"
    found = tail("say 7: ", tokenizer("say 7: ")["input_ids"])
    assert found.status == WARNING and "a blank" in found.text
    found = tail("say 7:", [*ids, 1])
    assert found.status == FAIL and EOS in found.text and "EOS" in found.text
    assert tail(CHAT, ids).status == OK
    found = tail(CHAT, ids, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert found.status == WARNING and "begins no answer" in found.text


def ends(finish, length=8, ids=frozenset({1}), prompt="a", chat=False, **params):
    logp = torch.zeros(length)
    drawn = SamplingParams(max_tokens=8, **params)
    group = [Rollout([5], [9] * length, logp, logp, end, 0, 0, drawn, 0) for end in finish]
    return policy.check_ends(group, ids, prompt, make_tokenizer(chat=chat))


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (ends(["length", "stop"]), OK, "by 1 of 2 samples"),
        (ends(["length"] * 2), FAIL, "sampling.max_tokens 8 is too small, or the model does not"),
        (ends(["length"], chat=True), FAIL, "set data.as_chat"),
        (ends(["length"], chat=True, prompt=CHAT), FAIL, "does not end its answers"),
        (ends(["length"], ignore_eos=True), FAIL, "sampling.ignore_eos is on"),
        (ends(["length"], ids=frozenset()), FAIL, "names no EOS"),
        (ends(["length"], length=5), FAIL, "the context was full after 5 tokens"),
    ],
)
def test_why_no_sample_ends(found, status, text):
    assert found.status == status and text in found.text


def by_name(checks):
    return {check.name: check for check in checks}


def test_this_installation_is_sound(tmp_path):
    found = by_name(installation.check_installation(tmp_path))
    assert not [check for check in found.values() if check.status == FAIL]
    assert found["torch"].text == torch.__version__
    assert found["transformers"].text == f"{metadata.version('transformers')} (extra train)"
    assert {"grpo_loss", "token_logprob", "sample_tokens", "group_decode"} <= found.keys()
    if not torch.cuda.is_available():
        assert found["grpo_loss"].text.startswith("cpp; triton needs a CUDA device; off the")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("torch>=2.11", ("torch", "2.11", None)),
        ('peft>=0.18; extra == "train"', ("peft", "0.18", "train")),
        ("jsonargparse[signatures]>=4.49; extra == 'train'", ("jsonargparse", "4.49", "train")),
        (
            'reasoning-gym>=0.1; python_version >= "3.11" and extra == "tasks"',
            ("reasoning-gym", "0.1", "tasks"),
        ),
        ("numpy", ("numpy", None, None)),
    ],
)
def test_requirements_are_read_from_the_metadata(line, parts):
    assert installation.REQUIREMENT.match(line).groups() == parts


def test_packages_that_are_old_or_not_there(monkeypatch):
    needs = ["numpy>=10.0", "peft>=99.0; extra == 'train'", "nowhere>=1; extra == 'tasks'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    found = by_name(installation._packages())
    assert found["numpy"].status == FAIL and "is below 10.0" in found["numpy"].text
    assert found["peft"].status == MISSING
    assert "pip install -U 'grpo-engine[train]'" in found["peft"].text
    assert found["nowhere"].status == MISSING and "grpo-engine[tasks]" in found["nowhere"].text


def test_what_fails_is_told(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise UserError("no process")

    monkeypatch.setattr(installation, "Scorer", refuse)
    worker = installation._reward_worker()
    assert worker.status == FAIL and "no process" in worker.text
    disk = installation._disk(tmp_path / "nowhere")
    assert disk.status == FAIL and "nowhere can't be written to" in disk.text

    def off(device, impl):
        return torch.tensor([0.0, 1e-2 if impl == "auto" else 0.0])

    def raises(device, impl):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "OPS", {"off": off, "raises": raises})
    found = by_name(ops.check_ops(torch.device("cpu")))
    assert found["off"].status == FAIL and "off the reference by 1e-02" in found["off"].text
    assert found["raises"].status == FAIL and "no such kernel" in found["raises"].text
