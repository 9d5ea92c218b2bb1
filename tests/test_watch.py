"""What looks after a run, in a run: early stop, the best checkpoint, regression, audit, KL."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import write_jsonl
from grpo_engine.checkpoint import list_checkpoints
from grpo_engine.cli import main
from grpo_engine.config import LoraConfig, RunConfig
from grpo_engine.errors import UserError
from grpo_engine.guards import Alarm, Guards
from grpo_engine.parsing import dump_config
from grpo_engine.sample_config import RewardConfig
from grpo_engine.trainer import Trainer
from grpo_engine.watch import Watch
from runs import metrics_of, rollouts_of, tiny_config

# Held-out rewards by the step at which they are asked for; the training reward varies as it likes.
SCRIPT = """
HELDOUT = {0: 0.1, 1: 0.3, 2: 0.5, 3: 0.5, 4: 0.4, 5: 0.45, 6: 0.9}
REGRESSION = {0: 0.8, 1: 0.75, 2: 0.72, 3: 0.6, 4: 0.6, 5: 0.6, 6: 0.6}

def scripted(completions, kind, step):
    train = [float(len(c) % 3) for c in completions]
    tables = {"heldout": HELDOUT, "regression": REGRESSION}
    return [tables[k][step] if k else r for k, r in zip(kind, train)]
"""


@pytest.fixture
def scripted(model_folder, tmp_path):
    """A run whose held-out rewards are those of the script."""
    (tmp_path / "scripted.py").write_text(SCRIPT)
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"say {i}", "kind": ""} for i in range(10)])
    paths = {}
    for name in ("heldout", "regression"):
        rows = [{"prompt": "say b", "kind": name}]
        paths[name] = str(write_jsonl(tmp_path / f"{name}.jsonl", rows))

    def make(**groups):
        train = {"steps": 6, "eval_every": 1, "checkpoint_every": 10, "keep_checkpoints": 1}
        early_stop = {"evaluations": 1} | groups.pop("early_stop", {})
        return tiny_config(
            model_folder,
            tmp_path,
            rewards=[RewardConfig(f"{tmp_path}/scripted.py:scripted")],
            data={"path": str(tmp_path / "data.jsonl"), "eval_path": paths["heldout"]}
            | groups.pop("data", {}),
            train=train | groups.pop("train", {}),
            early_stop=early_stop,
            **groups,
        )

    make.regression = paths["regression"]
    return make


def test_a_run_without_further_gain_stops_and_says_so(scripted, tmp_path, capsys):
    config, path = scripted(), tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert main(["train", str(path)]) == 3
    lines = metrics_of(config)
    assert [line.get("eval_reward") for line in lines] == [0.1, 0.3, 0.5, 0.5, 0.4, 0.45]
    assert lines[-1]["stopped"].startswith("3 evaluations without a gain; best: step 2")
    assert not any("stopped" in line for line in lines[:-1])
    out = capsys.readouterr().out
    assert "stopped after step 5, 1 of 6 left: 3 evaluations without a gain; " in out
    assert "best: step 2 (0.500), kept in checkpoints/" in out
    kept = list_checkpoints(Path(config.train.out) / "checkpoints")
    assert [path.name for path in kept] == ["step-000002", "step-000005"]
    assert (kept[0] / "model" / "model.safetensors").is_file()


def test_early_stop_can_be_switched_off_and_asks_for_the_gain_it_is_told(scripted):
    config = scripted(early_stop={"evaluations": None})
    assert Trainer(config).run().step == 6
    small = scripted(early_stop={"min_gain": 0.45}, train={"out": config.train.out + "2"})
    assert Trainer(small).run().step == 6  # 0.5 is no gain over 0.1


def test_a_run_that_stopped_early_stays_so_when_resumed(scripted, capsys):
    config = scripted()
    Trainer(config).run()
    lines = metrics_of(config)
    capsys.readouterr()
    assert Trainer(config, resume=True).run().step == 5
    assert metrics_of(config) == lines
    assert "stopped after step 5, 1 of 6 left: 3 evaluations" in capsys.readouterr().out


def test_best_that_was_the_model_before_has_no_checkpoint(scripted):
    watch = Watch(scripted(early_stop={"evaluations": 3}))
    for step, reward in enumerate([0.9, 0.0, 0.0, *[0.5] * 3, *[0.4] * 9]):
        watch.evaluated(step, {"reward": [reward]})
    assert watch.stop.endswith("best: step 0 (0.900): the model as it was")


def test_evaluation_without_a_reward_ends_the_run_and_is_made_again(scripted, tmp_path):
    script = SCRIPT.replace("2: 0.5,", "2: float('nan'),")
    (tmp_path / "scripted.py").write_text(script)
    config = scripted(scoring={"max_failed": 1.0})
    for resume in (False, True):
        with pytest.raises(UserError, match="the held-out reward of step 2 is nan"):
            Trainer(config, resume=resume).run()
    (tmp_path / "scripted.py").write_text(SCRIPT)
    Trainer(config, resume=True).run()
    found = [(x["step"], x["eval_reward"]) for x in metrics_of(config) if "eval_reward" in x]
    assert found == [(0, 0.1), (1, 0.3), (2, 0.5), (3, 0.5), (4, 0.4), (5, 0.45)]


def test_a_run_that_a_guard_stops_is_evaluated_at_its_end(scripted, monkeypatch):
    config = scripted(train={"eval_every": 100})
    trainer = Trainer(config)
    observe = trainer.watch.observe

    def stops(metrics):
        trainer.watch.stop = "guard kl_early_stop" if metrics["step"] == 3 else None
        return observe(metrics)

    monkeypatch.setattr(trainer.watch, "observe", stops)
    assert trainer.run().step == 3
    assert [line.get("eval_reward") for line in metrics_of(config)] == [0.1, None, None, 0.5]


def stop_at_3(guards: Guards, metrics: dict) -> list[Alarm]:
    if metrics["step"] != 3:
        return []
    causes = (("learning rate", "train.lr 0.1"),)
    return [Alarm(3, "kl_early_stop", "KL", 6.2, ">", 5.0, causes, False, "stop")]


@pytest.mark.parametrize("killed", [False, True], ids=["saved", "killed before the last save"])
def test_a_run_that_a_guard_stopped_stays_so_until_that_guard_lets_it(
    scripted, monkeypatch, capsys, killed
):
    monkeypatch.setattr(Guards, "observe", stop_at_3)

    def make(threshold: float | None, **train: int) -> RunConfig:
        return scripted(
            guards={"kl_early_stop": threshold},
            train={"checkpoint_every": 2} | train,
            early_stop={"evaluations": None},
        )

    trainer = Trainer(make(5.0))
    if killed:

        def kill(_: dict) -> None:
            if trainer.watch.stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(trainer, "_rescue", lambda _: None)
        monkeypatch.setattr(trainer.display, "step", kill)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    else:
        assert trainer.run().step == 3
    capsys.readouterr()
    for config, said in (
        (make(5.0), "3 of 6 left: guard kl_early_stop: 6.2 > 5; to go on"),
        (make(6.0, steps=7), "4 of 7 left: guard kl_early_stop: 6.2 > 6; to go"),
    ):
        assert Trainer(config, resume=True).run().step == 3
        assert said in capsys.readouterr().out
    assert Trainer(make(6.3 if killed else None), resume=True).run().step == 6


def test_regression_set_is_evaluated_and_its_fall_is_a_guard(scripted, capsys):
    config = scripted(data={"regression_path": scripted.regression}, train={"steps": 4})
    Trainer(config).run()
    lines = metrics_of(config)
    assert [line.get("eval_regression") for line in lines] == [0.8, 0.75, 0.72, 0.6, 0.6]
    out = capsys.readouterr().out
    held_out = "held-out reward 0.500, right 0.000, of 1 answers 1 were cut"
    assert f"step 3: {held_out}  regression reward 0.600" in out
    assert "guard regression_fall" in out and "train.lr" in out
    # Falls of 0.05 and 0.08 are none; 0.2, seen after step 3, is said with step 4.
    said = ["regression_fall" in line.get("alarms", []) for line in lines[1:]]
    assert said == [False, False, False, True]


def test_fall_at_the_last_evaluation_is_said_too(scripted, capsys):
    config = scripted(data={"regression_path": scripted.regression}, train={"steps": 3})
    Trainer(config).run()
    assert "guard regression_fall" in capsys.readouterr().out


def test_highest_rewards_are_listed_for_a_person(model_folder, tmp_path, capsys):
    config = tiny_config(model_folder, tmp_path, train={"steps": 4, "audit_every": 2})
    Trainer(config).run()
    files = sorted((Path(config.train.out) / "audit").iterdir())
    assert [path.name for path in files] == ["step-000002.md", "step-000004.md"]
    rows = [
        row for step in (3, 4) for row in rollouts_of(config, step) if row["reward"] is not None
    ]
    answers = {(row["reward"], row["task_row"], row["text"]) for row in rows}
    listed = files[1].read_text().splitlines()[2:]
    assert len(listed) == min(20, len(answers)) > 10
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in listed]
    best = sorted((reward for reward, _, _ in answers), reverse=True)[:20]
    assert [row[0] for row in cells] == [f"{reward:.3f}" for reward in best]
    assert {int(row[5]) for row in cells} <= {3, 4}
    if len(answers) <= 20:
        assert sum(int(row[1]) for row in cells) == len(rows)
    assert f"highest rewards to look at: {files[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("resume", [False, True])
def test_a_reference_that_follows_the_policy_is_refused_at_the_start(
    model_folder, tmp_path, monkeypatch, resume
):
    config = tiny_config(model_folder, tmp_path, loss={"beta": 0.1}, train={"steps": 1})
    if resume:
        Trainer(config).run()

    def follows(policy, *_, **__):
        @contextmanager
        def scope():
            yield policy

        return scope

    monkeypatch.setattr("grpo_engine.model._reference", follows)
    with pytest.raises(UserError, match="the reference of the KL would follow the policy"):
        Trainer(config, resume=resume)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "lora"])
def test_a_warm_up_that_bfloat16_rounds_away_ends_no_run(model_folder, tmp_path, lora):
    config = tiny_config(
        model_folder,
        tmp_path,
        lora=lora,
        model={"path": str(model_folder), "dtype": "bfloat16"},
        loss={"beta": 0.04},
        train={"steps": 6, "lr": 1e-10},
    )
    assert Trainer(config).run().step == 6
    lines = metrics_of(config)
    # What the line is for: nothing is left of updates with a gradient.
    assert all(line["kl"] == 0 and line["grad_norm"] > 0 for line in lines)
    assert [line["alarms"] for line in lines if "kl_zero" in line["alarms"]]


def test_beta_decays_over_the_steps_and_is_recorded(model_folder, tmp_path):
    kl = {"mode": "decay", "final": 0.02, "over": 4}
    config = tiny_config(model_folder, tmp_path, loss={"beta": 0.1}, kl=kl, train={"steps": 6})
    Trainer(config).run()
    betas = [line["beta"] for line in metrics_of(config)]
    assert betas == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.02])


def test_alarms_stand_in_the_record(model_folder, tmp_path):
    (tmp_path / "constant.py").write_text(
        "def constant(completions, **_):\n    return [0.5] * len(completions)\n"
    )
    rewards = [RewardConfig(f"{tmp_path}/constant.py:constant")]
    config = tiny_config(model_folder, tmp_path, rewards=rewards, train={"steps": 4})
    Trainer(config).run()
    lines = metrics_of(config)
    assert "no_signal" in lines[2]["alarms"] and lines[0]["alarms"] == []
    assert lines[2]["no_signal_causes"]["low_variance"] == 4


def test_a_run_that_stopped_early_stays_so_until_it_is_given_more(scripted, capsys):
    config = scripted()
    Trainer(config).run()
    assert Trainer(config, resume=True).run().step == 5
    assert capsys.readouterr().out.count("stopped after step 5") == 2
    more = scripted(early_stop={"evaluations": 4})
    assert Trainer(more, resume=True).run().step == 6
    assert metrics_of(config)[-1]["eval_reward"] == 0.9
