"""`import grpo_engine` brings nothing; each name brings what it needs when it is used."""

import subprocess
import sys

import pytest

import grpo_engine as ge

LIGHT = {"GRPOOptions", "UserError"}  # options and errors are plain Python


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_its_options_and_its_errors_need_no_torch():
    code = (
        "import sys, grpo_engine as ge; [getattr(ge, n) for n in {names}];"
        "print('torch' in sys.modules)"
    )
    assert run(code.format(names=sorted(LIGHT))) == "False"
    assert run(code.format(names=["grpo_loss"])) == "True"


def test_public_names_are_seen_before_they_are_used():
    seen = run("import grpo_engine as ge; print(*sorted(set(dir(ge)) & set(ge.__all__)))").split()
    assert seen == sorted(ge.__all__)


@pytest.mark.parametrize("name", ge.__all__)
def test_every_name_is_the_one_of_its_module(name):
    value = getattr(ge, name)
    assert getattr(sys.modules[value.__module__], name) is value
