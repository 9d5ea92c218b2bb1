"""The line of a step that taught nothing: how many of what, by which key."""

from grpo_engine.groups.make import make_batch
from grpo_engine.groups.nothing import nothing_learned
from grpo_engine.trainer import Trainer
from runs import tiny_config
from samples import rules, samples_of


def line(rewards, *args, groups=None, **changes) -> str:
    chosen = rules(groups=groups)
    return nothing_learned(make_batch(samples_of(rewards, *args, **changes), chosen), chosen.groups)


def test_cut_answers_that_are_masked():
    made = samples_of([[0, 0], [1, 0]], [["length"] * 2] * 2, lengths=[[256] * 2] * 2)
    assert nothing_learned(make_batch(made, rules()), rules().groups) == (
        "0 of 4 samples are in the loss: 4 truncated, max_tokens 256 (groups.truncated mask). "
        "1 of 2 groups carry signal: 1 all_wrong"
    )


def test_samples_without_a_reward():
    nan = "the reward f returned nan"
    assert line([[None, None, 1]], failures=[nan, nan, None]) == (
        f"1 of 3 samples are in the loss: 2 invalid, {nan} (groups.invalid_reward null). "
        "0 of 1 groups carry signal: 1 all_malformed"
    )


def test_all_is_in_the_loss_and_alike():
    assert line([[1, 1], [0, 0], [0, 0]]) == (
        "6 of 6 samples are in the loss. 0 of 3 groups carry signal: 2 all_wrong; 1 all_correct"
    )


def test_the_line_of_a_run(model_folder, tmp_path, capsys):
    changes = {"groups": {"truncated": "mask"}, "sampling": {"ignore_eos": True, "max_tokens": 3}}
    config = tiny_config(model_folder, tmp_path, train={"steps": 1}, loss={"beta": 0.0}, **changes)
    size = config.sampling.group_size * config.train.prompts_per_step
    assert Trainer(config).run().step == 1
    assert (
        f"step 1: nothing to learn from: 0 of {size} samples are in the loss: {size} truncated, "
        "max_tokens 3 (groups.truncated mask). "
    ) in " ".join(capsys.readouterr().out.split())
