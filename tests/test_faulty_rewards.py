"""Rewards that hang, die or return NaN: the run goes on, and says which samples it lost."""

import math
import zlib

import pytest

from grpo_engine.errors import UserError
from grpo_engine.sample_config import RewardConfig
from grpo_engine.trainer import Trainer
from runs import metrics_of, rollouts_of, tiny_config

STEPS = 30
FAULTY = """
import os, time, zlib

def fault(prompt, ids, step):
    return zlib.crc32(repr((prompt, ids, step)).encode()) % 50

def faulty(prompts, completions, completion_ids, step):
    values = [float(len(c)) for c in completions]
    for i, (prompt, ids) in enumerate(zip(prompts, completion_ids)):
        which = fault(prompt, ids, step)
        while which == 0:
            time.sleep(1)
        if which == 1:
            os.kill(os.getpid(), 9)
        if which == 2:
            values[i] = float("nan")
    return values
"""
CAUSES = [
    "the reward faulty timed out after 1 s",
    "the reward faulty lost its process (signal 9)",
    "the reward faulty returned nan",
]


def test_thirty_steps_with_a_reward_that_hangs_dies_and_returns_nan(model_folder, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    rewards = [RewardConfig(f"{tmp_path}/faulty.py:faulty", timeout_s=1.0)]
    config = tiny_config(
        model_folder, tmp_path, rewards=rewards, train={"steps": STEPS, "lr": 1e-4}
    )
    trainer = Trainer(config)
    assert trainer.run().step == STEPS
    found = [0, 0, 0]
    for step, line in enumerate(metrics_of(config), start=1):
        rows = rollouts_of(config, step)
        for row in rows:
            key = (row["prompt"], row["completion_ids"], step)
            which = zlib.crc32(repr(key).encode()) % 50
            if which < 3:
                found[which] += 1
                # An empty answer is invalid too, but the first cause is the reward's.
                assert (row["state"], row["cause"]) == ("invalid", CAUSES[which])
                assert row["reward"] is None and not row["valid"] and row["advantage"] == 0
            elif row["state"] != "invalid":
                assert row["reward"] == len(row["text"])  # its own, whoever failed beside it
        assert line["invalid"] == sum(row["state"] == "invalid" for row in rows) / 16
    assert min(found) > 2  # of 480 samples, 9.6 of each expected
    assert trainer.parts.scorer.failed == sum(found)
    assert trainer.parts.scorer.restarts >= found[0] + found[1]


def test_a_run_whose_reward_fails_too_often_stops_and_says_why(model_folder, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def bad(completions, step):\n"
        "    return [float('nan') if step == 3 and i else 1.0 for i in range(len(completions))]\n"
    )
    rewards = [RewardConfig(f"{tmp_path}/bad.py:bad")]
    config = tiny_config(model_folder, tmp_path, rewards=rewards)
    trainer = Trainer(config)
    with pytest.raises(UserError, match=r"15 of 16 samples .* the reward bad returned nan"):
        trainer.run()
    assert trainer.state.step == 2 and len(metrics_of(config)) == 2
    assert not any(math.isnan(line["loss"]) for line in metrics_of(config))
