"""A checkpoint is JSON: it holds the config, or the config is refused by key at the start."""

import datetime
from dataclasses import replace

import numpy as np
import pytest

from grpo_engine.checkpoint import list_checkpoints
from grpo_engine.cli import main
from grpo_engine.config import RewardConfig
from grpo_engine.errors import Interrupted, UserError
from grpo_engine.parsing import dump_config, load_run
from grpo_engine.resume import check_same_config
from grpo_engine.trainer import Trainer
from runs import DIGITS, StoppingTrainer, tiny_config

# What JSON changes, and what it leaves.
HELD = {
    "keys that are numbers": {1: 0.5, 2.5: 1.0, -1: "a"},
    "keys that are words of YAML": {True: 1, None: 2},
    "nan": float("nan"),
    "infinities in a list": [float("inf"), -float("inf"), 0.1],
    "tuples": ((1, 2), ("a", (None, True))),
    "deep": [{"a": [{3: float("nan")}]}],
    "texts": ["é\u2028", "NaN", "1", ""],
    "a large number": 2**70,
}
REFUSED = {
    "a set": ({"a", "b"}, r"rewards\.0\.options\.given is a set"),
    "a date": ([{"x": datetime.date(2026, 1, 2)}], r"options\.given\.0\.x is a date"),
    "bytes": (b"abc", r"options\.given is a bytes"),
    "a number of numpy": (np.float64(1.0), r"options\.given is a float64"),
    "keys that are tuples": ({(1, 2): 3}, r"options\.given: its keys, \[\(1, 2\)\]"),
    "keys that are one text": ({1: "a", "1": "b"}, r"options\.given: its keys, \[1, '1'\]"),
}
WITH_OPTION = DIGITS.replace("completions, **", "completions, given, **")


@pytest.mark.parametrize("value", HELD.values(), ids=HELD.keys())
def test_a_config_that_json_changes_is_resumed(model_folder, tmp_path, value):
    (tmp_path / "digits.py").write_text(WITH_OPTION)
    rewards = [RewardConfig(f"{tmp_path / 'digits.py'}:digits", options={"given": value})]
    config = tiny_config(model_folder, tmp_path, rewards=rewards, train={"steps": 2})
    trainer = StoppingTrainer(config)
    trainer.stop_after = 1
    with pytest.raises(Interrupted):
        trainer.run()
    with pytest.raises(UserError, match="with another rewards"):
        other = [replace(rewards[0], options={"given": [value, "more"]})]
        Trainer(replace(config, rewards=other), resume=True)
    again = load_run(tmp_path / "run" / "config.yaml")
    assert dump_config(again) == dump_config(trainer.config)
    Trainer(again, resume=True).run()
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert newest.name == "step-000002"


def test_a_number_that_does_not_equal_itself_is_no_change():
    def config(x: float) -> dict:
        return {"data": {"gym": {"x": x}}, "rewards": []}

    check_same_config(config(float("nan")), config(float("nan")))
    with pytest.raises(UserError, match=r"another data\.gym\.x"):
        check_same_config(config(float("nan")), config(float("inf")))


@pytest.mark.parametrize(("value", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_json_cannot_hold_is_refused_by_key(model_folder, tmp_path, value, said):
    rewards = [RewardConfig("exact", options={"given": value})]
    with pytest.raises(UserError, match=said):
        tiny_config(model_folder, tmp_path, rewards=rewards)


def test_a_set_in_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\ndata: {path: d}\n"
        "rewards: [{function: exact, options: {names: !!set {a, b}}}]\n"
    )
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "rewards.0.options.names is a set, which a checkpoint" in capsys.readouterr().err
