"""pass@k and standard errors by hand; `grpo eval` gives the figures of training."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from conftest import write_jsonl
from grpo_engine.answers import Answers, pass_at_k, standard_error, summarize
from grpo_engine.cli import main
from grpo_engine.rewards.score import Scores
from grpo_engine.rollout import Rollout, SamplingParams
from runs import files_of

REWARD = """
def digits(completions, **columns):
    return [{"digits": sum(map(str.isdigit, c)) / max(1, len(c)), "short": float(len(c) < 6)}
            for c in completions]
"""


@pytest.mark.parametrize(
    ("samples", "right", "k", "chance"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - 1/10
        (5, 3, 3, 1.0),  # only two are wrong
        (5, 0, 3, 0.0),
        (10, 4, 2, 1 - 15 / 45),
        (3, 3, 3, 1.0),
    ],
)
def test_pass_at_k(samples, right, k, chance):
    assert pass_at_k(samples, right, k) == pytest.approx(chance, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices():
    from itertools import combinations

    answers = [True, False, False, True, False, False, False]
    for k in range(1, 8):
        chosen = list(combinations(answers, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


@pytest.mark.parametrize("given", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_without_meaning(given):
    with pytest.raises(ValueError, match="no meaning"):
        pass_at_k(*given)


def test_standard_error():
    # Deviations -1, 0, 1: variance 1 by n - 1, over 3 values.
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert standard_error([2.0]) is None


def answers(rewards: list[float | None], samples: int) -> Answers:
    params = SamplingParams()
    count, none = len(rewards), torch.zeros(1)
    rollouts = [
        Rollout([1], [2], none, none, "length" if i == 0 else "stop", 0, 0, params, 0)
        for i in range(count)
    ]
    scores = Scores({"r": rewards}, [None] * count, [None] * count, decider="r")
    tasks = list(range(count // samples))
    return Answers(tasks, samples, rollouts, ["x"] * count, scores, rewards, rewards)


def test_a_summary_by_hand():
    # Three tasks of four: 2 of 4 right, 1 of 3 (one has no reward), none of 4.
    rewards = [1.0, 1.0, 0.0, 0.5, 1.0, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    found = summarize(answers(rewards, 4), correct_at=1.0, cut_counts=True)
    means = [2.5 / 4, 1 / 3, 0.0]
    assert found.reward == pytest.approx(sum(means) / 3)
    assert found.reward_error == pytest.approx(standard_error(means))
    assert found.pass_rate == pytest.approx((1 / 2 + 1 / 3) / 3)
    # @2: 1 - 1/6, 1 - 1/3, 0; @4: only the tasks with four scored answers.
    assert found.pass_at == pytest.approx({1: 5 / 18, 2: (5 / 6 + 2 / 3) / 3, 4: 1 / 2})
    assert found.components == pytest.approx({"r": 3.5 / 11})
    assert (found.tasks, found.answers, found.unscored) == (3, 12, 1)
    assert (found.scored_tasks, found.truncated) == (3, 1)


def test_an_answer_that_was_cut_is_not_right_unless_asked():
    given = answers([1.0, 0.0, 1.0, 1.0], 2)  # the first is cut
    assert given.right(1.0, cut_counts=False) == [False, False, True, True]
    assert summarize(given, 1.0, cut_counts=False).pass_rate == 0.5
    assert summarize(given, 1.0, cut_counts=True).pass_rate == 0.75
    assert summarize(given, 1.0, cut_counts=False).reward == 0.75


def test_answers_without_any_reward():
    found = summarize(answers([None, None], 1), correct_at=1.0, cut_counts=True)
    assert math.isnan(found.reward) and math.isnan(found.pass_rate)
    assert found.pass_at == {} and found.reward_error is None and found.unscored == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A finished run with held-out tasks."""
    folder = tmp_path_factory.mktemp("eval")
    rows = [{"prompt": f"{i} apples:", "answer": str(i)} for i in range(7)]
    write_jsonl(folder / "data.jsonl", rows)
    write_jsonl(folder / "heldout.jsonl", rows[2:])
    (folder / "my.py").write_text(REWARD)
    config = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "lora": {"rank": 4},
        "data": {"path": str(folder / "data.jsonl"), "eval_path": str(folder / "heldout.jsonl")},
        "rewards": [
            {
                "function": f"{folder}/my.py:digits",
                "isolate": False,
                "components": {"digits": {"decides": True}},
            }
        ],
        "sampling": {"group_size": 4, "max_tokens": 6},
        "groups": {"truncated": "keep", "correct_at": 0.5},
        "train": {
            "steps": 3, "prompts_per_step": 3, "lr": 0.05, "eval_every": 2, "checkpoint_every": 2,
            "out": str(folder / "run"),
        },
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


def figure(out: str, name: str) -> float:
    (line,) = [line for line in out.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name).split()[0])


def evaluated(run: Path) -> dict[int, float]:
    """The held-out reward that training wrote, by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval_reward"] for line in lines if "eval_reward" in line}


def test_the_figures_of_training_come_again(run, capsys):
    recorded, before = evaluated(run), files_of(run)
    assert sorted(recorded) == [0, 2, 3] and len(set(recorded.values())) > 1
    for args, step in (([], 3), (["--step", "2"], 2), (["--base"], 0)):
        capsys.readouterr()
        assert main(["eval", str(run), "--run-rewards", *args]) == 0
        out = capsys.readouterr().out
        assert figure(out, "reward") == pytest.approx(recorded[step], abs=1e-4), step
        assert "5 tasks, 1 answers each at temperature 0" in out
    assert files_of(run) == before


def test_answers_and_their_figures(run, tmp_path, capsys):
    before, file = files_of(run), tmp_path / "answers.jsonl"
    data = str(run.parent / "data.jsonl")
    args = ["--data", data, "--limit", "6", "--samples", "4", "--temperature", "0.9"]
    assert main(["eval", str(run), "--run-rewards", *args, "--out", str(file)]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["task_row"] for row in rows] == [i for i in range(6) for _ in range(4)]
    assert rows[8]["columns"] == {"answer": "2"} and rows[8]["prompt"] == "2 apples:"
    for row in rows:
        share = sum(map(str.isdigit, row["text"])) / max(1, len(row["text"]))
        short = float(len(row["text"]) < 6)
        assert row["components"] == {"digits.digits": share, "digits.short": short}
        assert row["reward"] == share + short and row["right"] == (share >= 0.5)
    assert len({row["text"] for row in rows[:4]}) > 1
    right = [sum(row["right"] for row in rows[i : i + 4]) for i in range(0, 24, 4)]
    assert figure(out, "reward") == pytest.approx(sum(r["reward"] for r in rows) / 24, abs=1e-4)
    assert figure(out, "pass rate") == pytest.approx(sum(right) / 24, abs=1e-4)
    two = sum(1 - math.comb(4 - c, 2) / 6 for c in right) / 6
    assert f"@2 {two:.4f}" in out
    assert figure(out, "component   digits.short") == pytest.approx(
        sum(len(r["text"]) < 6 for r in rows) / 24, abs=1e-4
    )
    assert files_of(run) == before


def test_cut_answers_are_right_only_if_the_run_or_the_command_says_so(run, capsys):
    path = run / "config.yaml"
    stored = path.read_text()
    rates = []
    for truncated, args in (("keep", []), ("mask", []), ("mask", ["--cut-counts"])):
        path.write_text(stored.replace("truncated: keep", f"truncated: {truncated}"))
        assert main(["eval", str(run), "--run-rewards", *args]) == 0
        out = capsys.readouterr().out
        assert "truncated   5 of 5 answers" in out
        assert "+-          standard error over 5 tasks" in out
        rates.append(figure(out, "pass rate"))
        assert (", and not cut)" in out) == (truncated == "mask" and not args)
    path.write_text(stored)
    assert rates[0] == rates[2] > rates[1] == 0


def test_a_pass_rate_needs_a_reward_that_decides(run, capsys):
    path = run / "config.yaml"
    stored = path.read_text()
    path.write_text(stored.replace("decides: true", "decides: false"))
    assert main(["eval", str(run), "--run-rewards"]) == 0
    path.write_text(stored)
    assert "pass rate   unknown: no reward is named" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--samples", "2", "--temperature", "0"], "2 times the same answer"),
        (["--base", "--step", "2"], "leave out --step"),
        (["--step", "1"], "step-000001/adapter is not there"),
        (["--data", "nowhere.jsonl"], "no such data"),
        (["--out", "RUN/answers.jsonl"], "lies in the run folder"),
    ],
)
def test_arguments_that_make_no_sense(run, capsys, args, text):
    assert (
        main(["eval", str(run), "--run-rewards", *(a.replace("RUN", str(run)) for a in args)]) == 2
    )
    assert text in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
