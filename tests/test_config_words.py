"""What a word of a config means is decided by its key: no trap of YAML 1.1, nothing that is quoted
changes its type, nothing is said twice."""

import dataclasses
import math
from typing import Any

import pytest
import yaml

from everything import EVERYTHING, OTHERWISE
from grpo_engine.errors import UserError
from grpo_engine.parsing import dump_config, load_run, parse_run

RUN = "model: {path: m}\ndata: {path: d}\nrewards: [{function: math}]\n"


def of(tmp_path, text: str, key: str) -> Any:
    """The value of the key when `text` stands below the minimal config."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN + text)
    group, _, name = key.partition(".")
    return getattr(getattr(load_run(path), group), name)


TEXTS = "1e3 1e-5 yes no off on n true null ~ 007 1_000 0o17 0x1F 1:30 2026-12-01 .5 1. .inf = <<"


@pytest.mark.parametrize("text", [*TEXTS.split(), "", "#", "[a]", "{a: b}", "a: b", "- a", "!x"])
def test_what_is_quoted_stays_text(tmp_path, text):
    for quote in "'\"":
        quoted = f"{quote}{text}{quote}"
        assert of(tmp_path, f"variants: {{column: {quoted}}}", "variants.column") == text
        if text:
            assert of(tmp_path, f"sampling: {{stop: [{quoted}]}}", "sampling.stop") == [text]
        options = f"\nrewards: [{{function: f, options: {{x: {quoted}}}}}]\n"
        path = tmp_path / "run.yaml"
        path.write_text("model: {path: m}\ndata: {path: d}" + options)
        assert load_run(path).rewards[0].options == {"x": text}


WORDS = {
    "variants.column": {"no": "no", "007": "007", "1e3": "1e3", "1:30": "1:30", "~": None},
    "train.tensorboard": {"off": False, "no": False, "Yes": True, "TRUE": True},
    "train.lr": {"1e-5": 1e-5, "1E-5": 1e-5, "+1e-5": 1e-5, ".5": 0.5, "3": 3.0, "null": None},
    "train.steps": {"1_000": 1000, "0x10": 16, "0o17": 15, "12": 12},
    "train.out": {"2026-12-01": "2026-12-01", "12": "12", "off": "off"},
    "sampling.stop": {"[no, 1e3]": ["no", "1e3"]},
    "lora.targets": {"on": "on", "[q, 1]": ["q", "1"]},
    "curriculum.temperature": {"{0: 1, 7: 1e-1}": {0: 1.0, 7: 0.1}},
    "data.now": {"2026-12-31": "2026-12-31", "2026-12-31T18:30": "2026-12-31T18:30"},
}


@pytest.mark.parametrize(("key", "words"), WORDS.items(), ids=WORDS)
def test_a_word_without_quotes_is_of_the_kind_of_its_key(tmp_path, key, words):
    group, _, name = key.partition(".")
    for word, value in words.items():
        prefix = "path: d, " if group == "data" else ""
        run = RUN.replace("data: {path: d}\n", "") if group == "data" else RUN
        path = tmp_path / "run.yaml"
        path.write_text(f"{run}{group}: {{{prefix}{name}: {word}}}\n")
        for config in (load_run(path), parse_run([str(path), f"--{key}", word])[0]):
            found = getattr(getattr(config, group), name)
            assert found == value and type(found) is type(value)


def test_a_key_without_a_kind_has_the_numbers_of_json_and_true_false_null(tmp_path):
    words = "[1e3, 7, -0.5, true, False, null, .inf, yes, 007, 1_000, 0x1F, 1:30, 2026-12-01]"
    path = tmp_path / "run.yaml"
    rewards = f"rewards: [{{function: f, options: {{x: {words}}}}}]"
    path.write_text(f"model: {{path: m}}\ndata: {{path: d}}\n{rewards}\n")
    numbers, rest = [1000.0, 7, -0.5, True, False, None, math.inf], "yes 007 1_000 0x1F 1:30"
    expected = [*numbers, *rest.split(), "2026-12-01"]
    found = load_run(path).rewards[0].options["x"]
    assert found == expected and list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize(
    ("key", "word", "says"),
    [
        ("train.lr", "fast", "a number or null; given 'fast'"),
        ("train.lr", "1:30", "a number or null; given '1:30'"),
        ("train.lr", "yes", "a number or null; given 'yes'"),
        ("train.steps", "017", "an integer; given '017'"),
        ("train.steps", "1e3", "an integer; given 1000.0"),
        ("train.steps", "true", "an integer; given True"),
        ("train.steps", "[5]", "an integer; given [5]"),
        ("train.tensorboard", "1", "true or false; given 1"),
        ("train.tensorboard", "maybe", "true or false; given 'maybe'"),
        ("sampling.stop", "word", "a list; given 'word'"),
        ("lora.targets", "{a: b}", "a text or a list; given {'a': 'b'}"),
        ("loss.loss_type", "gspo", "given 'gspo'; GSPO is loss.importance_sampling_level"),
        ("curriculum.temperature", "[1]", "a mapping or null; given [1]"),
    ],
)
def test_a_word_of_another_kind_is_told_in_one_line(tmp_path, key, word, says):
    group, _, name = key.partition(".")
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN}{group}: {{{name}: {word}}}\n")
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert str(caught.value).startswith(f"{key} in {path} must be ") and says in str(caught.value)
    path.write_text(RUN)
    with pytest.raises(UserError) as caught:
        parse_run([str(path), f"--{key}={word}"])
    assert str(caught.value).startswith(f"{key} in the command line must be ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {steps: 1, steps: 2}", "the key steps stands twice"),
        ("data: {path: e}", "the key data stands twice"),
        ("sampling: {'stop': [a], stop: [b]}", "the key stop stands twice"),
        ("curriculum: {temperature: {0: 1, 0: 2}}", "the key 0 stands twice"),
        ("train:\n\tsteps: 1", "is no YAML"),
        ("---\ntrain: {steps: 1}", "expected a single document"),
        ("train: {out: !!python/object:os.system x}", "is no YAML"),
        ("train: {? [a] : 1}", "is no YAML"),
        ("train: {1: 2}", "unknown key train.1"),
        ("curriculum: {mixture: [{class_path: os.system}]}", "unknown key curriculum.mixture"),
    ],
)
def test_a_file_that_can_not_be_meant_is_refused(tmp_path, text, says):
    with pytest.raises(UserError) as caught:
        of(tmp_path, text, "train.steps")
    assert says in str(caught.value) and "run.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_another_editor_is_read(tmp_path, encoding):
    path = tmp_path / "run.yaml"
    text = RUN + "sampling: {stop: [é]}\nloss: &a {beta: 0.1}\nkl: {<<: {mode: fixed}}\n"
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert load_run(path).sampling.stop == ["é"]


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("learning_rate", "here it is train.lr"),
        ("num_generations", "here it is sampling.group_size"),
        ("max_completion_length", "here it is sampling.max_tokens"),
        ("mask_truncated_completions", "here it is groups.truncated"),
        ("use_vllm", "here it is none: the sampler"),
        ("epsilon_high", "the nearest is loss.epsilon_high"),
        ("num_iterations", "the nearest is train.num_iterations"),
    ],
)
def test_a_name_of_another_trainer_is_known(tmp_path, name, here):
    path = tmp_path / "run.yaml"
    for text in (f"{name}: 3", f"groups: {{{name}: 3}}"):
        path.write_text(f"{RUN}{text}\n")
        with pytest.raises(UserError, match=f"unknown key .*{name} in .*; {here}"):
            load_run(path)
    path.write_text(RUN)
    with pytest.raises(UserError, match=f"unknown key {name} in the command line; {here}"):
        parse_run([str(path), f"--{name}", "3"])


def test_the_printed_config_is_one_that_can_be_read(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    with pytest.raises(SystemExit) as caught:
        parse_run([str(path), "--train.steps", "7", "--print_config"])
    assert caught.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_run(printed) == parse_run([str(path), "--train.steps", "7"])[0]


@pytest.mark.parametrize("text", [*TEXTS.split(), "1e3", "-7", "Null", "TRUE", ".NaN", " a", "é\n"])
@pytest.mark.parametrize("config", [EVERYTHING, OTHERWISE], ids=["everything", "otherwise"])
def test_every_text_survives_the_file_of_the_run(tmp_path, config, text):
    options = {"x": text, text: [text, {"y": text}], "n": [1e3, 1e-7, 2**70, True, None]}
    reward = dataclasses.replace(config.rewards[0], options=options)
    variants = dataclasses.replace(config.variants, column=text)
    config = dataclasses.replace(config, rewards=[reward], variants=variants)
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_run(tmp_path / "config.yaml") == config
    assert yaml.safe_load(dump_config(config))["train"]["steps"] == config.train.steps
