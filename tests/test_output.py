"""No line that is only shown ends a run: pipes, full disks, any terminal and alphabet."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml

from conftest import save_model_folder, write_jsonl
from grpo_engine.commands.train import _example, _program

GRPO = [sys.executable, "-m", "grpo_engine.cli"]
REWARD = (
    "def letters(completions, **_):\n    return [float(len(set(str(c)))) for c in completions]\n"
)


@pytest.fixture
def workplace(tmp_path) -> Path:
    """A short run whose file names and prompts ASCII can't say."""
    save_model_folder(tmp_path / "model", chat=True)
    prompt = [{"role": "user", "content": "say é 家\nand 2"}]
    write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": prompt}])
    (tmp_path / "letters.py").write_text(REWARD)
    run = {
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": "tasks.jsonl"},
        "rewards": [{"function": "letters.py:letters"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {"steps": 3, "prompts_per_step": 1, "out": "run 家"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def train(workplace: Path, stdout=subprocess.PIPE, **changes) -> subprocess.CompletedProcess:
    unset = {"FORCE_COLOR", "LC_ALL", "PYTHONIOENCODING", "TERM", "COLUMNS"}
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"OMP_NUM_THREADS": "1"} | changes.pop("env", {})
    return subprocess.run(
        [*GRPO, "train", "run.yaml"],
        cwd=workplace,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=120,
        **changes,
    )


def finished(workplace: Path) -> bool:
    return (workplace / "run 家/adapter/adapter_model.safetensors").is_file()


ENVIRONMENTS = {
    "ascii": ({"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1", "COLUMNS": "20"}, "\\u5bb6"),
    "C": ({"LC_ALL": "C", "TERM": "dumb", "FORCE_COLOR": "1"}, "家"),
}


@pytest.mark.parametrize(("env", "shown"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_log_file_has_plain_lines_whatever_its_alphabet(workplace, env, shown):
    run = train(workplace, env=env)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.decode("utf-8", "surrogateescape").splitlines()
    # A line a step, the folder and what comes next: no bar, no line that is overwritten.
    assert [line[:8] for line in lines if "/3 " in line] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[-2].startswith("run folder: ") and shown in lines[-2]
    assert lines[-1].startswith("next: grpo sample 'run ")
    assert b"\r" not in run.stdout and b"\x1b" not in run.stdout
    assert finished(workplace)


def test_a_reader_that_left_a_full_disk_and_a_closed_stdout_end_no_run(workplace):
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full:
        for number, stdout in enumerate([writing, full, None]):
            (workplace / "run.yaml").write_text(
                (workplace / "run.yaml").read_text().replace("out: ", f"out: {number}")
            )
            close = {"preexec_fn": lambda: os.close(1)} if stdout is None else {}
            run = train(workplace, stdout=stdout, **close)
            assert run.returncode == 0, run.stderr
            lines = [line for line in run.stderr.decode().splitlines() if "grpo" in line]
            cause = ["Broken pipe", "No space left on device", None][number]
            expected = [f"grpo: can't print ({cause}): going on without"] if cause else []
            assert lines == expected
            assert b"Exception" not in run.stderr
    os.close(writing)
    assert len(list(workplace.glob("*/adapter/adapter_model.safetensors"))) == 3


@pytest.mark.parametrize("columns", [20, 80])
def test_a_terminal_shows_a_bar_and_the_run_ends(workplace, columns):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    run = train(workplace, stdout=slave, env={"TERM": "xterm"}, stdin=slave)
    os.close(slave)
    shown = os.read(master, 100_000)
    os.close(master)
    assert run.returncode == 0, run.stderr
    assert b"\x1b[" in shown and finished(workplace)


def test_a_path_that_this_machine_can_not_write_is_named(workplace):
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = train(workplace, env=env)
    assert run.returncode == 2
    assert run.stderr.startswith(b"grpo: error: train.out: 'run \\u5bb6' can be no path here (")
    assert run.stderr.count(b"\n") == 1


def test_the_command_that_comes_next_can_be_typed(monkeypatch, tmp_path):
    assert _example("What is\n  3 + 4?") == "'What is 3 + 4?'"
    assert _example([{"role": "user", "content": "it's"}]) == """--chat 'it'"'"'s'"""
    # 12 words of five letters with blanks are 71 characters: the first ten have room in 60.
    assert _example(" ".join(["seven"] * 12)) == "'" + " ".join(["seven"] * 10) + "'"
    assert _example("x" * 100) == "x" * 60
    program = tmp_path / "my bin/grpo"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program() == f"'{program}'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert _program() == "grpo"
    monkeypatch.setattr(sys, "argv", ["/some/where/cli.py"])
    assert _program() == "grpo"
