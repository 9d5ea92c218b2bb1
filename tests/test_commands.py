"""The layout of the command line: a module a command, found by its name, nothing loaded before."""

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


def test_a_command_loads_torch_only_to_work():
    code = (
        "import sys, grpo_engine.cli as c\n"
        "try: c.main(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
