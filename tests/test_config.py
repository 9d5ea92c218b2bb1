"""The run's config: defaults, YAML under arguments, and one line that names what is wrong."""

import dataclasses
import re

import pytest
import yaml

from everything import EVERYTHING
from grpo_engine.config import LoraConfig, RunConfig
from grpo_engine.curriculum.presets import Setting
from grpo_engine.errors import UserError
from grpo_engine.parsing import load_run, parse_run
from grpo_engine.sample_config import RewardConfig

MINIMAL = {
    "model": {"path": "some/model"},
    "data": {"path": "tasks.jsonl"},
    "rewards": [{"function": "math"}],
}


@pytest.fixture
def run(tmp_path):
    """Parses the minimal YAML with groups added or replaced, and arguments after it."""

    def parse(*args: str, text: str = "", **groups) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(MINIMAL | groups) + text)
        return parse_run([str(path), *args])[0]

    return parse


def told(run, *args: str, **groups) -> str:
    """The one line that a wrong config is answered with."""
    with pytest.raises(UserError) as caught:
        run(*args, **groups)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_defaults_are_those_of_the_contract(run):
    config = run()
    assert (config.model.dtype, config.model.base) == ("bfloat16", "none")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 32, "all-linear")
    assert (config.data.prompt_column, config.data.answer_column) == ("prompt", "answer")
    assert (config.sampling.group_size, config.sampling.temperature) == (8, 1.0)
    assert config.sampling.max_tokens == 256
    assert (config.loss.loss_type, config.loss.beta, config.loss.epsilon) == ("grpo", 0.04, 0.2)
    assert (config.train.max_grad_norm, config.train.warmup) == (1.0, 0.03)
    assert (config.train.steps, config.train.prompts_per_step) == (200, 8)
    assert (config.train.num_iterations, config.train.optimizer) == (1, "adamw")
    assert (config.train.eval_every, config.train.checkpoint_every) == (20, 20)


def test_learning_rate_depends_on_what_is_trained(run):
    assert run().lr == 1e-5
    assert run(lora=None).lr == 1e-6
    assert run(lora=None, train={"lr": 0.5}).lr == 0.5


def test_arguments_win_over_yaml_which_wins_over_defaults(run):
    groups = {"train": {"steps": 5, "seed": 3}, "sampling": {"stop": ["a"]}, "loss": {"beta": 0.1}}
    config = run("--train.steps", "6", "--loss.beta=0", "--sampling.stop", '["b", "c"]', **groups)
    assert (config.train.steps, config.train.seed, config.train.prompts_per_step) == (6, 3, 8)
    assert (config.loss.beta, config.sampling.stop) == (0.0, ["b", "c"])
    rewards = run("--rewards", '[{"function": "exact", "weight": 0.5}]').rewards
    assert rewards == [RewardConfig("exact", weight=0.5)]


def test_a_list_of_the_command_line_takes_nothing_from_the_rows_of_the_file(run):
    file = {
        "rewards": [
            {
                "function": "exact",
                "weight": 3,
                "gate": 1.0,
                "options": {"a": 1},
                "components": {"x": {"weight": 9}},
            }
        ],
        "curriculum": {"preset": {0: "mixed"}, "mixture": [{"temperature": 0.7, "top_p": 0.5}]},
    }
    for given in (["--rewards", "[{function: math}]"], ["--rewards=[{function: math}]"]):
        assert run(*given, **file).rewards == [RewardConfig("math")]
    mixture = run("--curriculum.mixture", "[{temperature: 1.2}]", **file).curriculum.mixture
    assert mixture == [Setting(1.2, 1.0, 1.0)]
    both = run("--rewards+", "{function: math}", **file).rewards
    assert [reward.function for reward in both] == ["exact", "math"]
    assert both[0].weight == 3.0


def test_options_of_reasoning_gym_for_other_data_are_refused(run):
    data = {"path": "tasks.jsonl", "gym": {"size": 3}}
    assert "data.gym is for a data.path of reasoning_gym:NAME" in told(run, data=data)
    data = {"path": "tasks.jsonl", "eval_path": "other.jsonl", "eval_gym": {"size": 3}}
    assert "data.eval_gym is for" in told(run, data=data)


WRONG_ROWS = {
    "no row": ("[exact]", "as in rewards: [{function: math}]; given ['exact']"),
    "no list": ("{function: math}", "must be a list of rows"),
    "no YAML": ("[{function: math", "must be a list of rows"),
    "no function": ("[{weight: 2}]", "lacks function"),
    "unknown": ("[{function: f, wieght: 2}]", "rewards.wieght", "nearest is rewards.weight"),
    "of a component": (
        "[{function: f, components: {a: {gat: 2}}}]",
        *("rewards.components.a.gat", "nearest is rewards.components.a.gate"),
    ),
    "component without keys": ("[{function: f, components: {a: 2}}]", "components.a", "given 2"),
    "null": ("[{function: f, weight: null}]", "rewards.weight", "can't be null"),
    "null options": ("[{function: f, options: null}]", "rewards.options", "can't be null"),
    "null time-out": ("[{function: f, timeout_s: null}]", "rewards.timeout_s", "can't be null"),
}


@pytest.mark.parametrize("case", WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_of_rewards_are_told_the_same_wherever_they_are_given(run, case):
    rows, *said = case
    messages = [told(run, "--rewards", rows)]
    if rows.endswith(("]", "}")):
        messages.append(told(run, rewards=yaml.safe_load(rows)))
    for message in messages:
        assert all(text in message for text in said), message


def test_resume_is_a_flag_beside_the_config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    plain, resumed = parse_run([str(path)]), parse_run(["--config", str(path), "--resume"])
    assert (plain[0], plain[1], resumed[1]) == (resumed[0], False, True)


def test_lora_null_trains_all_weights_and_an_argument_brings_it_back(run):
    assert run(lora=None).lora is None
    assert run("--lora", "null").lora is None
    assert run("--lora.rank", "4").lora == LoraConfig(rank=4)
    assert run("--lora.rank", "4", lora=None).lora == LoraConfig(rank=4)
    assert run("--lora.rank", "4", lora={"rank": 2, "alpha": 5}).lora == LoraConfig(4, 5)


@pytest.mark.parametrize("written", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_number_in_any_notation_is_a_number(run, written):
    # YAML 1.1 takes 1e-5 for a string.
    assert run(text=f"train: {{lr: {written}}}\n").train.lr == 1e-5
    assert run("--train.lr", written).train.lr == 1e-5


@pytest.mark.parametrize(
    ("groups", "unknown", "nearest"),
    [
        ({"trian": {"steps": 3}}, "trian", "train"),
        ({"rewrads": []}, "rewrads", "rewards"),
        ({"train": {"stpes": 3}}, "train.stpes", "train.steps"),
        ({"lora": {"rnak": 3}}, "lora.rnak", "lora.rank"),
        ({"loss": {"epsilon_hi": 0.3}}, "loss.epsilon_hi", "loss.epsilon_high"),
        ({"model": {"path": "m", "dtyp": "float32"}}, "model.dtyp", "model.dtype"),
        ({"rewards": [{"function": "math", "wieght": 2}]}, "wieght", "weight"),
    ],
)
def test_unknown_key_in_yaml_names_the_nearest(run, groups, unknown, nearest):
    message = told(run, **groups)
    assert unknown in message and message.endswith(nearest)


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("--train.stpes", "train.steps"),
        ("--train.step", "train.steps"),  # argparse would take the abbreviation
        ("--lora.rnak=3", "lora.rank"),
        ("--sampling.temprature", "sampling.temperature"),
        ("--resmue", "resume"),
    ],
)
def test_unknown_argument_names_the_nearest(run, argument, nearest):
    message = told(run, argument, "3")
    assert f"unknown key {argument[2:].partition('=')[0]} " in message
    assert message.endswith(f"nearest is {nearest}")


WRONG = {
    "train.steps": ["many", 2.5, True, 0],
    "train.lr": ["fast", float("nan")],
    "train.schedule": ["linear"],
    "train.gradient_checkpointing": ["sometimes"],
    "sampling.stop": ["word", [""]],
    "groups.truncated": ["maybe"],
    "loss.loss_type": ["ppo", "cispo", "dr_grpo"],
    "loss.beta": [-0.1, float("nan")],
    "loss.ddof": [2],
    "model.dtype": ["int8"],
    "model.base": ["2bit"],
    "lora.rank": ["big"],
}


def pairs(values: dict[str, list]) -> list[tuple]:
    return [(key, value) for key in values for value in values[key]]


@pytest.mark.parametrize(("key", "value"), pairs(WRONG))
def test_wrong_value_in_yaml_names_its_key(run, key, value):
    group, name = key.split(".")
    message = told(run, **{group: MINIMAL.get(group, {}) | {name: value}})
    # The options of the loss are checked by GRPOOptions, which knows its own names only.
    assert name in message and (group == "loss" or group in message)
    if key == "lora.rank":  # one of several types: which one was wanted must not be cut off
        assert "int" in message


AT_LEAST_ONE = (
    "train.steps train.prompts_per_step train.num_iterations train.token_budget train.eval_every "
    "train.checkpoint_every train.keep_checkpoints sampling.max_tokens lora.rank data.eval_limit"
).split()
OUT_OF_RANGE = {
    **{key: [0] for key in AT_LEAST_ONE},
    "train.lr": [0.0, -1e-5, float("nan"), float("inf")],
    "train.warmup": [-0.1, 1.1, float("nan")],
    "train.max_grad_norm": [0.0],
    "train.weight_decay": [-0.1],
    "train.seed": [-1],
    "sampling.group_size": [1, 0],
    "sampling.temperature": [0.0, -1.0, float("inf")],
    "sampling.top_p": [0.0, 1.1],
    "sampling.top_k": [-1],
    "sampling.min_p": [-0.1, 1.1],
    "sampling.repetition_penalty": [0.0],
    "lora.dropout": [1.0, -0.1],
    "lora.alpha": [0],
}


@pytest.mark.parametrize(("key", "value"), pairs(OUT_OF_RANGE))
def test_value_out_of_range_names_its_key_and_itself(key, value):
    group, name = key.split(".")
    with pytest.raises(UserError, match=re.escape(key)) as caught:
        section = dataclasses.replace(getattr(EVERYTHING, group), **{name: value})
        dataclasses.replace(EVERYTHING, **{group: section})
    assert f"{value:g}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("weight", ["heavy", float("nan"), float("inf")])
def test_wrong_weight_of_a_reward_names_its_key(run, weight):
    message = told(run, rewards=[{"function": "math", "weight": weight}])
    assert "rewards" in message and "weight" in message


@pytest.mark.parametrize("group", ["model", "data", "rewards", "sampling", "loss", "train"])
@pytest.mark.parametrize("value", [None, 5])
def test_group_without_keys_is_named(run, group, value):
    # `train:` with every line below it commented out is null.
    assert group in told(run, **{group: value})


@pytest.mark.parametrize("missing", MINIMAL)
def test_required_group_that_is_missing_is_named(tmp_path, missing):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != missing}))
    with pytest.raises(UserError, match=missing):
        load_run(path)


def test_combinations_without_meaning_are_errors(run):
    assert "rewards is empty" in told(run, rewards=[])
    for base in ("8bit", "4bit"):
        message = told(run, model={"path": "m", "base": base}, lora=None)
        assert f"model.base {base}" in message and "lora" in message
    assert "delta" in told(run, loss={"loss_type": "sapo", "delta": 2.0})
    alone = {"path": "tasks.jsonl", "regression_path": "before.jsonl"}
    assert "data.eval_path" in told(run, data=alone)
    both = told(run, sampling={"preset": "mixed"}, curriculum={"temperature": {0: 1.0}})
    assert "curriculum.temperature" in both and "sampling.preset" in both
    assert "sampling.preset" in told(run, sampling={"preset": "mid", "temperature": 0.9})


@pytest.mark.parametrize(
    "content", ["model: {path: ", "- a\n- b\n", "", "just text", b"\xff\xfe\x00"]
)
def test_file_that_is_no_config_is_named(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"run\.yaml (is no YAML|must hold)"):
        load_run(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"can't read the config .*absent\.yaml: No such file"):
        load_run(tmp_path / "absent.yaml")


@pytest.mark.parametrize("args", [["stray"], ["--train.steps"], ["--train.steps", "abc"]])
def test_stray_or_incomplete_arguments_are_named(run, args):
    assert args[0].strip("-") in told(run, *args)
