"""Resume is bitwise: a run stopped anywhere ends with the weights of one that never stopped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch

from grpo_engine import trainer as trainer_module
from grpo_engine.checkpoint import load_checkpoint
from grpo_engine.config import LoraConfig, RunConfig
from grpo_engine.errors import Interrupted, UserError
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, final_weights, metrics_of, tiny_config

CASES = {
    "all weights, cosine": {"train": {"schedule": "cosine", "warmup": 0.3}},
    "all weights in bfloat16": {"model": {"dtype": "bfloat16"}},
    "8-bit AdamW": {"train": {"optimizer": "adamw8bit"}},
    "in the middle of a generation": {"train": {"num_iterations": 2}, "loss": {"beta": 0.1}},
    "lora with dropout": {"lora": LoraConfig(rank=4, dropout=0.1), "train": {"num_iterations": 2}},
    "8-bit base": {"lora": LoraConfig(rank=4), "model": {"base": "8bit"}},
}


def at(config: RunConfig, out: Path) -> RunConfig:
    return replace(config, train=replace(config.train, out=str(out)))


def stop_after(config: RunConfig, steps: int) -> None:
    trainer = StoppingTrainer(config)
    trainer.stop_after = steps
    with pytest.raises(Interrupted):
        trainer.run()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_resumed_weights_equal_those_of_an_uninterrupted_run(model_folder, tmp_path, case):
    whole = at(tiny_config(model_folder, tmp_path, **case), tmp_path / "whole")
    parts = at(whole, tmp_path / "parts")
    Trainer(whole).run()
    stop_after(parts, 3)
    Trainer(parts, resume=True).run()
    expected, resumed = final_weights(whole), final_weights(parts)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    keys = ("step", "loss", "reward", "kl", "grad_norm", "lr")
    assert [[line[k] for k in keys] for line in metrics_of(whole)] == [
        [line[k] for k in keys] for line in metrics_of(parts)
    ]


def test_a_half_used_generation_goes_on_with_the_same_samples(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"num_iterations": 2})
    stop_after(config, 3)
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000003").values
    rows = parquet.read_table(tmp_path / "run" / "rollouts" / "step-000003.parquet").to_pylist()
    kept = [r["completion_ids"] for r in saved["state"]["batch"]["rollouts"]]
    assert saved["state"]["iteration"] == 1
    assert kept == [row["completion_ids"] for row in rows]
    Trainer(config, resume=True).run()
    files = sorted(p.stem for p in (tmp_path / "run" / "rollouts").iterdir())
    assert files == ["step-000001", "step-000003", "step-000005"]


def test_what_a_killed_process_wrote_after_its_checkpoint_is_forgotten(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path)
    stop_after(config, 3)
    run = tmp_path / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 123.0}\n{"step": 5, "lo')
    shutil.copy(run / "rollouts/step-000003.parquet", run / "rollouts/step-000004.parquet")
    (run / "checkpoints" / ".step-000004.tmp").mkdir()
    Trainer(config, resume=True).run()
    lines = metrics_of(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3]["loss"] != 123.0
    assert not list((run / "checkpoints").glob(".*"))


def test_a_finished_run_can_be_made_longer(model_folder, tmp_path):
    short = tiny_config(model_folder, tmp_path, train={"steps": 3, "warmup": 0.0})
    Trainer(short).run()
    longer = replace(short, train=replace(short.train, steps=6))
    Trainer(longer, resume=True).run()
    whole = at(longer, tmp_path / "whole")
    Trainer(whole).run()
    expected, resumed = final_weights(whole), final_weights(longer)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_resume_refuses_another_config_data_or_model(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, lora=LoraConfig(rank=4))
    stop_after(config, 2)
    changed = replace(config, loss=replace(config.loss, beta=0.2))
    with pytest.raises(UserError, match=r"loss\.beta"):
        Trainer(changed, resume=True)
    data = tmp_path / "data.jsonl"
    text = data.read_text()
    data.write_text(text.replace("say a", "say b", 1))
    with pytest.raises(UserError, match="data changed"):
        Trainer(config, resume=True)
    data.write_text(text)
    Trainer(config, resume=True).run()


def test_resume_refuses_an_adapter_on_another_base(model_folder, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    config = tiny_config(base, tmp_path, lora=LoraConfig(rank=4))
    stop_after(config, 2)
    from conftest import make_model

    make_model(seed=5).save_pretrained(base)
    with pytest.raises(UserError, match="differs from the saved one"):
        Trainer(config, resume=True)


def test_a_new_run_refuses_a_folder_that_holds_one(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path)
    stop_after(config, 1)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="already holds a run"):
        Trainer(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_only_the_newest_checkpoints_are_kept(model_folder, tmp_path):
    config = tiny_config(
        model_folder, tmp_path, train={"checkpoint_every": 1, "keep_checkpoints": 2}
    )
    Trainer(config).run()
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000005", "step-000006"]


def test_a_run_stopped_before_its_first_checkpoint_begins_again(model_folder, tmp_path, capsys):
    config = tiny_config(model_folder, tmp_path, train={"steps": 2})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')  # kill -9 left it
    with pytest.raises(UserError, match="--resume"):
        Trainer(config)
    Trainer(config, resume=True).run()
    assert "no checkpoint to resume from: the run starts over" in capsys.readouterr().out
    lines = metrics_of(config)
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["loss"] != 0.5


def test_an_evaluation_that_was_interrupted_is_made_up_once(model_folder, tmp_path, monkeypatch):
    rows = [{"prompt": "say b", "answer": "7"}]
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"eval_path": str(held_out)}
    config = tiny_config(model_folder, tmp_path, data=data, train={"steps": 4, "eval_every": 2})
    real = trainer_module.evaluate

    def interrupted(parts, config, step, progress):
        if step == 4:
            raise Interrupted(15)
        return real(parts, config, step, progress)

    monkeypatch.setattr(trainer_module, "evaluate", interrupted)
    with pytest.raises(Interrupted):
        Trainer(config).run()
    monkeypatch.setattr(trainer_module, "evaluate", real)
    for _ in range(2):  # the checkpoint of step 4 is that from before its evaluation
        Trainer(config, resume=True).run()
    evaluated = [line["step"] for line in metrics_of(config) if "eval_reward" in line]
    assert evaluated == [0, 2, 4]


@pytest.mark.parametrize("stop", [0, 2])
def test_an_evaluation_that_was_made_is_not_made_again(model_folder, tmp_path, stop):
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps({"prompt": "say b", "answer": "7"}) + "\n")
    data = {"eval_path": str(held_out)}
    config = tiny_config(model_folder, tmp_path, data=data, train={"steps": 4, "eval_every": 2})
    stop_after(config, stop)
    Trainer(config, resume=True).run()
    evaluated = [line["step"] for line in metrics_of(config) if "eval_reward" in line]
    assert evaluated == [0, 2, 4]


def test_a_copied_checkpoint_folder_is_left_alone(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path)
    stop_after(config, 2)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-000002", folder / "step-000002-good")
    Trainer(config, resume=True).run()
    assert (folder / "step-000002-good" / "state.json").is_file()
