"""Completions that are no answers: a sound reward pays for none, and a leaky one is told."""

import pytest
import torch

from conftest import make_model, make_tokenizer, write_jsonl
from grpo_engine.config import DataConfig
from grpo_engine.doctor import OK, WARNING, probes
from grpo_engine.groups.rules import Rules
from grpo_engine.model import Policy
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.score import Scorer
from grpo_engine.sample_config import GroupsConfig
from grpo_engine.taskset import TaskSet


def test_the_texts_of_the_probes():
    texts = probes.probe_texts("1+1=", "2", ["2", "9", "4"])
    assert texts["empty"] == "" and texts["prompt repeated"] == "1+1="
    assert texts["empty box"] == "\\boxed{}" and texts["empty tag"] == "<answer></answer>"
    assert texts["answer pasted"].split() == ["2"] * 50
    assert texts["many candidates"].startswith("1 2 3 ") and texts["many candidates"].endswith(
        " 50"
    )
    assert texts["another task's answer"] == "9"
    assert texts["all answers"] == "9 4 2 9"
    assert "answer pasted" not in probes.probe_texts("1+1=", None, ["9"])
    assert "all answers" not in probes.probe_texts("1+1=", "2", ["2"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    rows = [{"prompt": f"what is {i}*3?", "answer": str(3 * i)} for i in (4, 5, 6)]
    path = write_jsonl(tmp_path_factory.mktemp("tasks") / "data.jsonl", rows)
    made = Policy(make_model(), make_tokenizer(), torch.device("cpu"), None)
    return TaskSet(str(path), DataConfig(str(path)), made)


def probed(source, function, max_tokens=96, **groups) -> tuple[dict, dict]:
    """Rewards by probe and task, and the checks by probe."""
    with Scorer([reward_of(function)]) as scorer:
        rules = Rules(groups=GroupsConfig(**groups))
        found = probes.probe(scorer, source, range(3), "answer", rules, max_tokens)
    checks = {check.name: check for check in probes.check_probes(found)}
    return {(p.name, p.row): p for p in found}, checks


def exact(completions, answer, **_):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_a_sound_reward_pays_for_no_probe(source):
    found, checks = probed(source, exact)
    assert {p.right for p in found.values()} == {1.0} and not any(p.pays for p in found.values())
    assert {check.status for check in checks.values()} == {OK}
    assert checks["probe empty"].text == "earns at most 0 in 3 tasks"
    assert checks["probe prompt repeated"].text == "earns at most 0 in 3 tasks"


def test_a_reward_that_looks_for_the_answer_anywhere(source):
    def anywhere(completions, answer, **_):
        return [float(a in c.split()) for c, a in zip(completions, answer, strict=True)]

    found, checks = probed(source, anywhere, max_tokens=400, invalid=["repetition"])
    paid = {name for (name, _), p in found.items() if p.pays}
    assert paid == {"many candidates", "all answers"}  # what is pasted is pure repetition: invalid
    assert checks["probe all answers"].status == WARNING
    assert checks["probe all answers"].text == (
        "earns 1 in 3 of 3 tasks, as much as the right answer: row 0, '15 18 12 15'"
    )
    found, _ = probed(source, anywhere, max_tokens=400)
    assert {row for (name, row), p in found.items() if p.pays and name == "answer pasted"} == {
        0,
        1,
        2,
    }
    # 20 tokens end before the numbers reach 12 (1 to 9 and blanks are 18).
    found, _ = probed(source, anywhere, max_tokens=20)
    assert not any(p.pays for (name, _), p in found.items() if name == "many candidates")


def test_a_reward_that_pays_for_nothing_said(source):
    def shorter(completions, **_):
        return [1.0 - len(c) for c in completions]

    found, checks = probed(source, shorter, invalid=["empty"])
    # "12" earns -1, and nothing longer does better: no right answer is known.
    assert {p.right for p in found.values()} == {None}
    assert checks["probe right answer"].status == WARNING
    assert not found["empty", 0].pays
    found, checks = probed(source, shorter)
    assert found["empty", 0].reward == 1.0 and found["empty", 0].pays
    assert checks["probe empty"].text == "earns 1 in 3 of 3 tasks: row 0, ''"


def test_a_right_answer_may_need_a_form(source):
    def said(completions, answer, **_):
        wanted = [f"The answer is {a}" for a in answer]
        return [float(c == w) / 2 for c, w in zip(completions, wanted, strict=True)]

    found, checks = probed(source, said, max_tokens=4)  # right answers are not cut
    assert {p.right for p in found.values()} == {0.5}
    assert {check.status for check in checks.values()} == {OK}
