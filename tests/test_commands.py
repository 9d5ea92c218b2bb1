"""The layout of the command line: a module a command, found by its name, nothing loaded before."""

import os
import subprocess
import sys

import pytest

from grpo_engine.cli import COMMANDS, USAGE, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_usage_and_explains_itself(command, capsys):
    assert f"\n  grpo {command} " in USAGE
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"grpo {command}" in capsys.readouterr().out


def test_usage(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert capsys.readouterr().out == f"{USAGE}\n{USAGE}\n"


@pytest.mark.parametrize(
    ("command", "given", "then"),
    [
        ("doctor", {}, "None 10000"),
        ("doctor", {"OMP_WAIT_POLICY": "active"}, "active None"),
        ("doctor", {"GOMP_SPINCOUNT": "500"}, "None 500"),
        ("bench", {}, "None None"),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_user_or_a_benchmark_wants_otherwise(
    command, given, then
):
    code = (
        "import os, sys, grpo_engine.cli as c\n"
        f"try: c.main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"
    )
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    env = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == then


def test_a_command_loads_torch_only_to_work():
    code = (
        "import sys, grpo_engine.cli as c\n"
        "try: c.main(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
