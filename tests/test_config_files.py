"""The run's config on disk and in the help: nothing is lost, every key is explained."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from everything import EVERYTHING, OTHERWISE, SECTIONS
from grpo_engine.config import LoraConfig
from grpo_engine.ledger import Ledger
from grpo_engine.parsing import load_run, parse_run
from grpo_engine.sample_config import RewardConfig, SamplingConfig


@pytest.mark.parametrize("config", [EVERYTHING, OTHERWISE], ids=["everything", "otherwise"])
def test_config_survives_its_yaml(tmp_path, config):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
    assert load_run(path) == config


def test_text_that_looks_like_a_number_survives_its_yaml(tmp_path):
    # PyYAML writes 1e3 without quotes, since YAML 1.1 takes it for text; here it is a number.
    config = dataclasses.replace(EVERYTHING, sampling=SamplingConfig(stop=["1e3"]))
    Ledger(tmp_path).write_header(config, torch.device("cpu"), {})
    assert load_run(tmp_path / "config.yaml") == config


def test_every_key_was_given_another_value():
    # Else the round trip would not see a key that is dropped.
    for group in (*SECTIONS, "lora"):
        sections = [getattr(EVERYTHING, group), getattr(OTHERWISE, group)]
        for field in dataclasses.fields(sections[0]):
            given = [getattr(section, field.name) for section in sections if section is not None]
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            assert any(value != default for value in given), f"{group}.{field.name}"


def documented(cls: type, prefix: str) -> dict[str, str]:
    """Keys and descriptions as they stand in the source: a string below each field."""
    bodies = [ast.parse(inspect.getsource(c)).body[0].body for c in cls.__mro__[:-1]]
    return {
        f"{prefix}.{a.target.id}": " ".join(b.value.value.split())
        for body in bodies
        for a, b in pairwise(body)
        if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
    }


HELP = {group: type(getattr(EVERYTHING, group)) for group in SECTIONS}


def assert_explained(text: str, group: str, cls: type) -> None:
    keys = documented(cls, group)
    assert set(keys) == {f"{group}.{f.name}" for f in dataclasses.fields(cls)}
    text = "".join(text.split())  # lines are folded, also at hyphens
    for key, description in keys.items():
        assert f"--{key}" in text
        assert "".join(description.split()) in text


def test_help_lists_every_key_with_its_description():
    command = [sys.executable, "-m", "grpo_engine.cli", "train", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert shown.returncode == 0, shown.stderr
    for group, cls in HELP.items():
        assert_explained(shown.stdout, group, cls)
    assert "--lora.help" in shown.stdout and "--rewards.help" in shown.stdout


@pytest.mark.parametrize(("group", "cls"), [("lora", LoraConfig), ("rewards", RewardConfig)])
def test_group_that_may_be_null_or_many_explains_its_keys(capsys, group, cls):
    with pytest.raises(SystemExit) as caught:
        parse_run([f"--{group}.help"])
    assert caught.value.code == 0
    assert_explained(capsys.readouterr().out, group, cls)
