"""Tasks of reasoning-gym, with a stand-in for the package."""

import json
import sys
import types

import pytest

from grpo_engine.data import load_tasks
from grpo_engine.errors import UserError
from grpo_engine.rewards.load import load_rewards
from grpo_engine.rewards.score import Scorer
from grpo_engine.sample_config import RewardConfig


class FakeDataset(list):
    """As reasoning-gym's: rows by number, and a scorer."""

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


@pytest.fixture
def gym(monkeypatch):
    """A stand-in for the optional package, with one data set `sums`."""
    asked = []

    def create_dataset(name, size, seed, **options):
        asked.append((name, size, seed, options))
        rows = [(f"{seed}+{i}=", str(seed + i)) for i in range(size)]
        return FakeDataset(
            {"question": q, "answer": a, "metadata": {"difficulty": 1}} for q, a in rows
        )

    fake = types.ModuleType("reasoning_gym")
    fake.create_dataset = create_dataset
    fake.factory = types.SimpleNamespace(DATASETS={"sums": None})
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    return asked


def test_reasoning_gym_tasks_carry_what_their_reward_needs(gym):
    tasks = load_tasks("reasoning_gym:sums", gym={"size": 3, "seed": 5, "digits": 2})
    assert gym[0] == ("sums", 3, 5, {"digits": 2})
    assert [(t.row, t.prompt, t.columns["answer"]) for t in tasks] == [
        (0, "5+0=", "5"),
        (1, "5+1=", "6"),
        (2, "5+2=", "7"),
    ]
    entry = json.loads(tasks[1].columns["gym_entry"])
    assert (entry["dataset"], entry["config"]) == ("sums", {"digits": 2})
    scorer = Scorer(load_rewards([RewardConfig("reasoning_gym", isolate=False)]))
    arguments = {
        "prompts": [t.prompt for t in tasks],
        "completions": ["the answer is 5", "7", "7"],
        "completion_ids": [[1]] * 3,
    }
    columns = {n: [t.columns[n] for t in tasks] for n in tasks[0].columns}
    assert scorer.score(arguments, columns).components == {"reasoning_gym": [1.0, 0.0, 1.0]}


def test_reasoning_gym_has_a_thousand_tasks_of_seed_0_by_default(gym):
    assert len(load_tasks("reasoning_gym:sums")) == 1000
    assert gym[0][1:3] == (1000, 0)
    with pytest.raises(UserError, match="no data set 'prods'; there are sums"):
        load_tasks("reasoning_gym:prods")
