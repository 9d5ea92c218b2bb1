"""The loop: it learns, starts on-policy, counts right, and refuses steps that are not finite."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file

from conftest import make_model
from grpo_engine import learn
from grpo_engine.config import LoraConfig, RewardConfig
from grpo_engine.errors import UserError
from grpo_engine.groups.batch import micro_batches
from grpo_engine.trainer import Trainer
from runs import final_weights, metrics_of, tiny_config
from samples import batch_of

METRICS = (
    "step loss reward reward_std no_signal kl entropy clip_region grad_norm lr completion_length "
    "truncated tokens_per_s_sample tokens_per_s_train time_ms"
).split()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "lora"])
def test_reward_rises_from_sampled_answers(model_folder, tmp_path, lora):
    train = {"steps": 20, "lr": 5e-3 if lora is None else 2e-2}
    config = tiny_config(model_folder, tmp_path, lora=lora, train=train, loss={"beta": 0.0})
    Trainer(config).run()
    rewards = [line["reward"] for line in metrics_of(config)]
    assert rewards[0] < 0.25  # 10 of 75 characters are digits
    assert sum(rewards[-3:]) / 3 > 0.6


def test_first_step_is_on_policy_and_at_the_reference(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3, "num_iterations": 2})
    Trainer(config).run()
    first, second, third = metrics_of(config)
    assert first["ratio_mean"] == 1.0 and first["kl"] == 0.0
    assert second["ratio_mean"] != 1.0 and second["kl"] > 0.0  # same samples, moved policy
    assert third["ratio_mean"] == 1.0


def test_a_generation_serves_num_iterations_steps(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"steps": 6, "num_iterations": 3})
    Trainer(config).run()
    files = sorted(p.name for p in (tmp_path / "run" / "rollouts").iterdir())
    assert files == ["step-000001.parquet", "step-000004.parquet"]


def test_metrics_agree_with_the_recorded_samples(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"steps": 2})
    Trainer(config).run()
    for line in metrics_of(config):
        assert set(METRICS) <= line.keys()
        rows = parquet.read_table(
            tmp_path / "run" / "rollouts" / f"step-{line['step']:06d}.parquet"
        ).to_pylist()
        assert len(rows) == 16
        texts = [re.sub("<eos>|<pad>", "", row["completion"]) for row in rows]
        digits = [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in texts]
        assert [row["reward"] for row in rows] == pytest.approx(digits)
        assert line["reward"] == pytest.approx(sum(digits) / 16)
        stds = [torch.tensor(digits[i : i + 4]).std(correction=0) for i in range(0, 16, 4)]
        assert line["reward_std"] == pytest.approx(float(sum(stds)) / 4)
        lengths = [len(row["completion_ids"]) for row in rows]
        assert line["completion_length"] == pytest.approx(sum(lengths) / 16)
        assert line["truncated"] == sum(r["finish_reason"] == "length" for r in rows) / 16
        assert {row["policy_version"] for row in rows} == {line["step"] - 1}
        assert len({row["task_row"] for row in rows}) == 4


def test_the_sampler_and_the_trainer_agree_on_log_probs(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, sampling={"temperature": 0.6, "top_p": 0.8})
    Trainer(config).run()
    assert max(line["logp_gap"] for line in metrics_of(config)) < 1e-5


def test_the_split_into_micro_batches_does_not_change_the_run(model_folder, tmp_path):
    weights = []
    for name, budget in (("whole", 8192), ("split", 40)):
        train = {"token_budget": budget, "out": str(tmp_path / name), "steps": 3}
        config = tiny_config(model_folder, tmp_path, train=train)
        Trainer(config).run()
        weights.append(final_weights(config))
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=2e-5)


def test_gradient_checkpointing_gives_the_same_weights(model_folder, tmp_path):
    weights = []
    for flag in (False, True):
        train = {"gradient_checkpointing": flag, "out": str(tmp_path / str(flag)), "steps": 2}
        config = tiny_config(model_folder, tmp_path, train=train)
        Trainer(config).run()
        weights.append(final_weights(config))
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-6)


def nan_at(
    monkeypatch: pytest.MonkeyPatch, steps: set[int], trainer: Trainer, where: str = "loss"
) -> None:
    """One NaN log-prob in the training forward of these steps, or one NaN in its gradient."""
    real = learn.completion_logprobs

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([gradient[:1] * float("nan"), gradient[1:]])

    def poisoned(*args):
        logp, entropy = real(*args)
        if trainer.state.step + 1 in steps and torch.is_grad_enabled():
            if where == "loss":
                logp = torch.cat([logp[:1] * float("nan"), logp[1:]])
            else:
                logp.register_hook(spoil)
        return logp, entropy

    monkeypatch.setattr(learn, "completion_logprobs", poisoned)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_step_is_skipped_counted_and_reported(
    model_folder, tmp_path, monkeypatch, capsys, where
):
    config = tiny_config(
        model_folder, tmp_path, train={"steps": 3, "checkpoint_every": 1, "keep_checkpoints": 3}
    )
    trainer = Trainer(config)
    nan_at(monkeypatch, {2}, trainer, where)
    state = trainer.run()
    lines = metrics_of(config)
    assert [line["skipped"] for line in lines] == [0, 1, 0]
    assert lines[1]["loss" if where == "loss" else "grad_norm"] is None
    assert lines[1]["nonfinite"] == (1 if where == "loss" else 0)
    assert state.skipped == 1 and "not finite" in capsys.readouterr().out
    one, two, three = (
        load_file(tmp_path / "run" / "checkpoints" / f"step-00000{k}" / "model/model.safetensors")
        for k in (1, 2, 3)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(two[name], three[name]) for name in one)


def test_five_nan_steps_in_a_row_stop_the_run_with_a_checkpoint(
    model_folder, tmp_path, monkeypatch
):
    config = tiny_config(model_folder, tmp_path, train={"steps": 50})
    trainer = Trainer(config)
    nan_at(monkeypatch, set(range(3, 50)), trainer)
    with pytest.raises(UserError, match="5 steps in a row"):
        trainer.run()
    assert trainer.state.step == 7
    assert (tmp_path / "run" / "checkpoints" / "step-000007" / "state.json").is_file()


def test_all_truncated_and_masked_changes_no_weight(model_folder, tmp_path):
    config = tiny_config(
        model_folder,
        tmp_path,
        groups={"truncated": "mask"},
        sampling={"max_tokens": 1, "group_size": 4},
        train={"steps": 2},
    )
    Trainer(config).run()
    before = load_file(model_folder / "model.safetensors")
    after = final_weights(config)
    truncated_only = [line for line in metrics_of(config) if line["truncated"] == 1.0]
    assert len(truncated_only) == 2  # else the seed drew an EOS and the test means nothing
    assert all(line["loss"] == 0.0 and line["grad_norm"] == 0.0 for line in truncated_only)
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_extras_and_columns_reach_a_reward_file(model_folder, tmp_path):
    (tmp_path / "spy.py").write_text(
        "import json\n"
        "def spy(prompts, completions, completion_ids, answer, finish_reasons, raw_completions,\n"
        "        prompt_tail, step, **rest):\n"
        f"    open({str(tmp_path / 'seen.json')!r}, 'w').write(json.dumps([prompts, completions,\n"
        "        completion_ids, answer, finish_reasons, raw_completions, prompt_tail, step,\n"
        "        sorted(rest)]))\n"
        "    return [float(i) for i in range(len(prompts))]\n"
    )
    rewards = [RewardConfig(f"{tmp_path / 'spy.py'}:spy")]
    config = tiny_config(model_folder, tmp_path, rewards=rewards, train={"steps": 1})
    Trainer(config).run()
    seen = json.loads(Path(tmp_path / "seen.json").read_text())
    prompts, completions, ids, answers, reasons, raw, tails, step, rest = seen
    assert step == 1 and rest == [] and answers == ["7"] * 16
    assert all(tail == prompt for tail, prompt in zip(tails, prompts, strict=True))
    for text, full, tokens, reason in zip(completions, raw, ids, reasons, strict=True):
        ended = tokens[-1] == 1
        assert reason == ("stop" if ended else "length")
        assert full == text + ("<eos>" if ended else "")


def test_8bit_base_starts_at_a_ratio_of_1_and_a_kl_of_0(model_folder, tmp_path):
    # In eval mode bitsandbytes multiplies in int8 on the CPU, in train mode it dequantises.
    config = tiny_config(
        model_folder,
        tmp_path,
        lora=LoraConfig(rank=4),
        model={"base": "8bit"},
        train={"steps": 1, "num_iterations": 2},
    )
    Trainer(config).run()
    first = metrics_of(config)[0]
    assert first["ratio_mean"] == 1.0 and first["kl"] == 0.0


def test_dropout_of_the_model_itself_is_off(model_folder, tmp_path):
    folder = tmp_path / "dropout"
    shutil.copytree(model_folder, folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(values | {"attention_dropout": 0.5}))
    config = tiny_config(folder, tmp_path, train={"steps": 1, "num_iterations": 2})
    Trainer(config).run()
    first = metrics_of(config)[0]
    assert first["ratio_mean"] == 1.0 and first["logp_gap"] < 1e-5


def test_a_reward_that_edits_its_arguments_does_not_edit_the_samples(model_folder, tmp_path):
    (tmp_path / "rude.py").write_text(
        "def rude(completions, completion_ids, prompts, **columns):\n"
        "    for ids in completion_ids:\n"
        "        ids[:] = [5] * len(ids)\n"
        "    return [float(i % 3) for i in range(len(completions))]\n"
    )
    rewards = [RewardConfig(f"{tmp_path / 'rude.py'}:rude")]
    config = tiny_config(model_folder, tmp_path, rewards=rewards, train={"steps": 1})
    Trainer(config).run()
    assert metrics_of(config)[0]["logp_gap"] < 1e-5


def test_no_forward_of_ragged_samples_passes_the_budget():
    batch = batch_of([[1.0, 0.0] * 20] * 2)
    for rollout in batch.rollouts:
        rollout.completion_ids[:] = [3] * 4
        rollout.prompt_ids[:] = [4 + rollout.group]
    batch.rollouts[0].completion_ids[:] = [3] * 200
    # Nothing is padded: 1 + 200 + 39 * 4 = 357 tokens, and 1 + 40 * 4 = 161.
    passed: list[int] = []
    model = make_model(max_position_embeddings=256)
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, inputs: passed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    for budget, tokens in ((518, [518]), (517, [357, 161])):
        learn.score_logprobs(model, batch, micro_batches(batch, budget, without_signal=True))
        assert sorted(passed, reverse=True) == tokens
        passed.clear()
