"""What held-out figures are over: a judge that fails on more answers is no gain."""

import json
from pathlib import Path

import pytest

from conftest import write_jsonl
from grpo_engine.cli import main
from grpo_engine.evaluate import evaluation_line
from grpo_engine.parsing import dump_config
from grpo_engine.sample_config import RewardConfig
from grpo_engine.watch import Watch
from runs import metrics_of, tiny_config

# A quarter of the held-out tasks is right; from step 2 on the judge is down for all others.
JUDGE = """
def judge(completions, kind, step, **columns):
    if step >= 2 and any(k == "wrong" for k in kind):
        raise RuntimeError("rate limit")
    return [float(k != "wrong") for k in kind]
"""


@pytest.fixture
def judged(model_folder, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    kinds = ["right", "wrong", "wrong", "wrong"]
    heldout = [{"prompt": "say b", "kind": kind} for kind in kinds]
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": "say a", "kind": "right"}] * 8)
    return tiny_config(
        model_folder,
        tmp_path,
        rewards=[RewardConfig(f"{tmp_path}/judge.py:judge")],
        scoring={"max_failed": 1.0},
        data={
            "path": str(tmp_path / "data.jsonl"),
            "eval_path": str(write_jsonl(tmp_path / "heldout.jsonl", heldout)),
        },
        train={"steps": 2, "eval_every": 1, "checkpoint_every": 10},
    )


def test_answers_that_drop_out_are_counted_and_are_no_gain(judged, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(dump_config(judged))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    before, _, after = metrics_of(judged)
    names = ("eval_reward", "eval_reward_answers", "eval_reward_unscored", "eval_reward_truncated")
    assert [before[name] for name in names] == [0.25, 4, 0, 4]
    assert [after[name] for name in names] == [1.0, 4, 3, 4]
    assert (before["reward_failures"], after["reward_failures"]) == (0, 3)
    assert after["worker_restarts"] == 0
    out = capsys.readouterr().out
    assert (
        "step 2: held-out reward 1.000, right 1.000, of 4 answers 3 have no reward, 4 were" in out
    )
    assert "held-out reward 0.250 -> 0.250 (3 answers have no reward and count as the low" in out
    saved = json.loads((Path(judged.train.out) / "checkpoints/step-000002/state.json").read_text())
    assert saved["watch"]["early_stop"]["best_step"] == 0
    assert main(["eval", judged.train.out, "--run-rewards"]) == 0
    assert "no reward   3 of 4 answers are left out" in capsys.readouterr().out


def test_an_answer_without_a_reward_counts_as_the_lowest_so_far(judged):
    watch = Watch(judged)
    compared = [
        watch.evaluated(step, {"reward": rewards, "regression": [4.0, None]})
        for step, rewards in enumerate(
            [[1.0, -1.0, None], [1.0, None, None], [-2.0, 1.0, 1.0], [1.0, 1.0, None]]
        )
    ]
    # Their lowest is -1 after the first, -2 after the third; the other set's is the floor, 0.
    assert [c["reward"] for c in compared] == pytest.approx([-1 / 3, -1 / 3, 0.0, 0.0])
    assert {c["regression"] for c in compared} == {2.0}
    resumed = Watch(judged)
    resumed.load(json.loads(json.dumps(watch.state())))
    again = resumed.evaluated(4, {"reward": [None, 1.0, 1.0]})
    assert again == {"reward": 0.0} and resumed.early_stop.best_step == 2


def test_the_line_for_a_person_says_what_is_left_out_and_nothing_else():
    names = ("", "_right", "_answers", "_unscored", "_truncated")

    def line(*values):
        return evaluation_line(
            "reward", {f"eval_reward{n}": v for n, v in zip(names, values, strict=True)}
        )

    assert line(0.5, 0.25, 8, 0, 0) == "held-out reward 0.500, right 0.250"
    assert (
        line(0.5, float("nan"), 8, 2, 0) == "held-out reward 0.500, of 8 answers 2 have no reward"
    )
    assert line(0.5, 0.25, 8, 2, 3) == (
        "held-out reward 0.500, right 0.250, of 8 answers 2 have no reward, 3 were cut"
    )
