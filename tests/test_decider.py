"""Which reward says that an answer is right, and that no other number does."""

import numpy as np
import pytest

from grpo_engine.answers import summarize
from grpo_engine.errors import UserError
from grpo_engine.groups.make import judge_samples, make_batch
from grpo_engine.rewards import Scorer, load_rewards, reward_of
from grpo_engine.rewards.decider import find_decider
from grpo_engine.rewards.total import prepare_components
from grpo_engine.sample_config import ComponentConfig, RewardConfig
from grpo_engine.trainer import Trainer
from runs import metrics_of, tiny_config
from samples import rules, samples_of
from test_eval import answers

FILE = """
def right(completions, **columns):
    return [0.0] * len(completions)

def form(completions, **columns):
    return [1.0] * len(completions)

def both(completions, **columns):
    return [{"right": 0.0, "form": 1.0}] * len(completions)
"""
FORM = {"function": "repetition"}


def plain(completions, **columns):
    return [1.0] * len(completions)


def parts(completions, **columns):
    return [{"right": 1.0, "form": 0.0}] * len(completions)


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ([FORM], "repetition"),  # the only one
        ([FORM, {"function": "exact"}], "exact"),  # the only one that checks answers
        ([{"function": "exact"}, {"function": "fuzzy"}], None),
        ([{"function": "exact"}, {"function": "fuzzy", "decides": True}], "fuzzy"),
        ([{"function": "exact"}, {**FORM, "name": "own", "decides": True}], "own"),
        ([FORM, {"function": "length_penalty", "options": {"target": 9, "most": 10}}], None),
    ],
)
def test_who_decides(configs, found):
    assert find_decider(load_rewards([RewardConfig(**c) for c in configs])) == found


def test_a_part_of_a_function_decides_if_it_is_named():
    named = {"right": ComponentConfig(decides=True)}
    assert find_decider([reward_of(parts, components=named), reward_of(plain)]) == "parts.right"
    with pytest.raises(UserError, match=r"parts\.right and plain have decides: true"):
        find_decider([reward_of(parts, components=named), reward_of(plain, decides=True)])


def score(*rewards):
    given = {"completions": ["a", "b"], "completion_ids": [[1], [2]]}
    with Scorer(rewards) as scorer:
        return scorer.score(given, {}), scorer


def test_a_function_that_returns_parts_decides_by_none_of_them_unless_named():
    scores, scorer = score(reward_of(parts))
    assert scores.decider is None and scorer.decider is None
    with pytest.raises(UserError, match=r"decides: true and returned parts.right, parts.form"):
        score(reward_of(parts, decides=True))
    scores, _ = score(reward_of(parts, components={"right": ComponentConfig(decides=True)}))
    assert scores.decider == "parts.right"


def test_what_decides_is_after_bounds_and_before_weight_and_length():
    config = ComponentConfig(weight=0.1, bounds=[0.0, 10.0], per_tokens=1)
    gate = ComponentConfig(gate=0.5)
    found = prepare_components(
        {"a": [10.0, 5.0, None, 10.0], "g": [1.0, 1.0, 1.0, 0.0]},
        {},
        {"a": config, "g": gate},
        [4, 4, 4, 4],
    )
    decided = found.decided("a", floor=-1.0)
    np.testing.assert_array_equal(decided, [1.0, 0.5, np.nan, -1.0])
    assert np.isnan(found.decided(None, -1.0)).all() and np.isnan(found.decided("x", -1.0)).all()


def test_neither_a_format_that_pays_nor_a_penalty_moves_what_is_right():
    pays = {"f": [0.0] * 4, "form": [1.0] * 4}
    found = judge_samples(samples_of([[1, 1, 1, 1]], components=pays), rules())
    assert found.rewards.tolist() == [1.0] * 4 and found.judged.states == ["low"] * 4
    assert found.causes == ["all_wrong"]
    costs = {"f": [1.0] * 4, "length": [-0.03] * 4}
    found = judge_samples(samples_of([[1, 1, 1, 1]], components=costs), rules())
    assert found.causes == ["all_correct"]
    nobody = samples_of([[1, 1, 1, 1]], components=pays, decider=None)
    found = judge_samples(nobody, rules())
    assert found.causes == ["low_variance"] and found.judged.states == ["scored"] * 4
    assert make_batch(nobody, rules()).decided_of(range(4)) == []


def test_an_anchor_is_right_by_what_decides():
    pays = {"f": [1.0, 0.0], "form": [0.0, 1.0]}
    found = judge_samples(samples_of([[1, 1]], components=pays, anchors=[False, True]), rules())
    assert found.judged.valid.tolist() == [True, True]
    found = judge_samples(samples_of([[1, 1]], components=pays, anchors=[True, False]), rules())
    assert found.judged.valid.tolist() == [False, True]


def test_an_answer_that_nothing_judged_is_in_no_pass_rate():
    given = answers([1.0, 1.0, 0.0], 1)
    given.decided[:] = [None, 1.0, 0.0]
    assert summarize(given, 1.0, cut_counts=True).pass_rate == 0.5


@pytest.fixture
def two(model_folder, tmp_path):
    """A run with a reward for the form, always earned, and one for the answer, never."""
    (tmp_path / "two.py").write_text(FILE)

    def make(*names, decides=(), **groups):
        rewards = [RewardConfig(f"{tmp_path}/two.py:{n}", decides=n in decides) for n in names]
        return tiny_config(model_folder, tmp_path, rewards=rewards, train={"steps": 1}, **groups)

    return make


def test_bands_and_the_rate_of_right_answers_go_by_the_named_reward(two):
    config = two("right", "form", decides=["right"], data={"eval_path": None})
    trainer = Trainer(config)
    trainer.run()
    (line,) = metrics_of(config)
    assert (line["reward"], line["right"]) == (1.0, 0.0)
    assert line["no_signal_causes"]["all_wrong"] == 4
    assert trainer.collector.difficulty()["bands"] == {"easy": 0, "medium": 6, "hard": 4}


def test_without_a_decider_no_rate_is_given_and_the_key_is_named(two, capsys):
    config = two("right", "form")
    trainer = Trainer(config)
    trainer.run()
    assert metrics_of(config)[0]["right"] is None
    assert trainer.collector.difficulty()["bands"] == {"easy": 0, "medium": 10, "hard": 0}
    out = capsys.readouterr().out
    assert out.count("set decides: true for it in rewards") == 1


@pytest.mark.parametrize("names", [("right", "form"), ("both",)])
@pytest.mark.parametrize(
    ("key", "groups"),
    [
        ("curriculum.shares", {"curriculum": {"shares": {0: [0.0, 0.5, 0.5]}}}),
        ("curriculum.solved_share", {"curriculum": {"solved_share": 0.5}}),
        ("replay.mode clone", {"replay": {"mode": "clone"}}),
        ("anchors.share", {"anchors": {"share": 0.1, "column": "answer"}}),
    ],
)
def test_what_goes_by_right_answers_is_refused_without_a_decider(two, names, key, groups):
    with pytest.raises(UserError, match=f"{key} goes by right answers, and no reward is named"):
        Trainer(two(*names, **groups)).run()
