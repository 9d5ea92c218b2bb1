"""A run folder belongs to one process, until the kernel or the run releases it."""

import errno
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest

from grpo_engine.checkpoint import list_checkpoints
from grpo_engine.commands import train as command
from grpo_engine.errors import Interrupted, UserError
from grpo_engine.ledger import Ledger
from grpo_engine.lock import InUse, RunLock
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, files_of, metrics_of, tiny_config

HERE = f"process {os.getpid()} on {socket.gethostname()}"


def test_a_second_process_is_refused_by_name_until_the_first_lets_go(tmp_path):
    with RunLock(tmp_path), pytest.raises(InUse) as caught:
        RunLock(tmp_path)
    assert f"in use by {HERE}: wait" in str(caught.value) and "--train.out" in str(caught.value)
    with RunLock(tmp_path) as lock:
        assert lock.warning is None


def test_a_killed_process_and_what_it_forked_hold_nothing(tmp_path):
    holder = (
        "import os, sys, time; from pathlib import Path; from grpo_engine.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\n"
        "if os.fork() == 0: print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    try:
        with pytest.raises(InUse, match=f"process {process.pid} on"):
            RunLock(tmp_path)
        process.kill()
        process.wait()
        os.kill(child, 0)  # it is still there
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_used(model_folder, tmp_path, monkeypatch, code):
    def unknown(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unknown)
    config = tiny_config(model_folder, tmp_path, train={"steps": 1})
    trainer = Trainer(config)
    assert "without locks: let no second process" in trainer.lock.warning
    trainer.run()
    assert [line["step"] for line in metrics_of(config)] == [1]


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_trainer_changes_nothing_and_the_first_goes_on(
    model_folder, tmp_path, monkeypatch, capsys, resume
):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3, "checkpoint_every": 1})
    first = Trainer(config)
    if resume:
        first.step()
        first._write_metrics()
        first._save()
    half = first.ledger.checkpoints / ".step-000002.tmp"
    half.mkdir()  # the first is writing it
    before = files_of(tmp_path / "run")
    with pytest.raises(InUse, match=HERE):
        Trainer(config, resume=resume)
    arguments = "grpo_engine.parsing.parse_run", lambda _: (config, resume)
    monkeypatch.setattr(*arguments)
    with pytest.raises(InUse):  # no traceback is written into a folder that is another's
        command.run([])
    assert files_of(tmp_path / "run") == before
    first.run()
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3]


def test_a_run_that_ends_or_does_not_start_lets_go(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"steps": 2})
    stopping = StoppingTrainer(config)
    stopping.stop_after = 1
    with pytest.raises(Interrupted):
        stopping.run()
    other = tiny_config(model_folder, tmp_path, train={"steps": 2}, loss={"beta": 0.5})
    with pytest.raises(UserError, match="beta"):
        Trainer(other, resume=True)
    Trainer(config, resume=True).run()
    with RunLock(tmp_path / "run"):
        pass


def test_a_folder_without_a_run_is_not_made_by_a_resume(tmp_path):
    with pytest.raises(UserError, match=r"holds no run to resume: leave out --resume"):
        Ledger(tmp_path / "typo").lock(resume=True)
    assert list(tmp_path.iterdir()) == []


def test_kill_9_while_a_reward_hangs_frees_the_folder(model_folder, tmp_path):
    (tmp_path / "digits.py").write_text(
        "import pathlib, time\n"
        "def digits(completions, **columns):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'called').touch()\n"
        "    time.sleep(600)\n"
    )
    config = tiny_config(model_folder, tmp_path, train={"steps": 1})
    script = (
        "import pickle, sys; from grpo_engine.trainer import Trainer\n"
        "Trainer(pickle.load(open(sys.argv[1], 'rb'))).run()"
    )
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "config")])
    deadline = time.monotonic() + 120
    while not (tmp_path / "called").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    with RunLock(tmp_path / "run"):
        assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
