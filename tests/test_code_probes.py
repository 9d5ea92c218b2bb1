"""Programs that are no solutions: the doctor sees a code reward that pays for them."""

import torch

from conftest import make_model, make_tokenizer, write_jsonl
from grpo_engine.config import DataConfig
from grpo_engine.doctor import WARNING, probes
from grpo_engine.doctor.code_probes import code_texts
from grpo_engine.groups.rules import Rules
from grpo_engine.model import Policy
from grpo_engine.rewards.builtin import python_tests
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.score import Scorer
from grpo_engine.taskset import TaskSet

TESTS = "from math import sqrt\nassert f(4) == int(sqrt(4))\nassert g(f(9)) == 3"


def test_the_functions_that_are_faked():
    equal = code_texts({"tests": TESTS})["equal to everything"]
    assert [line for line in equal.splitlines() if line.startswith("def")] == [
        "def f(*_): return Y()",
        "def g(*_): return Y()",
    ]
    check = {"test": "def check(c):\n    assert c(1) == 1", "entry_point": "h"}
    assert "def h(*_): return Y()" in code_texts(check)["equal to everything"]
    assert list(code_texts({"tests": [TESTS, "assert k() == 1"]})) == list(code_texts(check))
    assert "def k(" in code_texts({"tests": [TESTS, "assert k() == 1"]})["equal to everything"]
    for other in ({}, {"tests": None}, {"tests": "no python"}, {"answer": "4"}, {"tests": 3}):
        assert code_texts(other) == {}


def naive(code):
    """What the tests say of it if an error is all that they can say."""
    try:
        exec(code.removeprefix("```python").removesuffix("```") + TESTS, {})
    except Exception:
        return 0.0
    return 1.0


def test_a_naive_code_reward_pays_for_what_python_tests_does_not():
    texts = code_texts({"tests": TESTS})
    assert naive(texts["equal to everything"]) == 1.0
    assert python_tests(list(texts.values()), [TESTS] * 4) == [0.0] * 4


def test_rows_with_tests_are_probed(tmp_path):
    rows = [{"prompt": f"write f{i}", "tests": TESTS if i else None} for i in range(3)]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    policy = Policy(make_model(), make_tokenizer(), torch.device("cpu"), None)
    source = TaskSet(str(path), DataConfig(str(path)), policy)

    def pays_classes(completions, **_):
        return [float("class" in c) for c in completions]

    with Scorer([reward_of(pays_classes)]) as scorer:
        found = probes.probe(scorer, source, range(3), "answer", Rules(), 500)
    checks = {check.name: check for check in probes.check_probes(found)}
    assert checks["probe equal to everything"].status == WARNING
    assert checks["probe equal to everything"].text.startswith("earns 1 in 2 of 2 tasks")
    for name in ("exit as success", "written as success", "errors that are none"):
        assert checks[f"probe {name}"].text == "earns at most 0 in 2 tasks"
