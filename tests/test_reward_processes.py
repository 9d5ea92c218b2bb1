"""The processes behind reward workers: what they may do, and that none of them is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.protocol import EnvFailed
from grpo_engine.rewards.workers import FunctionSpec, Outcome, WorkerPool
from reward_jobs import AMPLE_S, FILE, gone, job, spec, wait_for


def test_what_a_function_prints_is_not_the_trainers_output(capfd):
    with WorkerPool([spec("noisy")]) as pool:
        assert pool.call([job(["ok 3", "ok 4"])])[0].values == [3.0, 4.0]
    out, err = capfd.readouterr()
    assert out == "" and all(text in err for text in ("to stdout", "to fd 1", "to stderr"))


def test_a_forked_child_of_a_function_does_not_answer():
    with WorkerPool([spec("forks", per_sample=True), spec("forks")], workers=1) as pool:
        for i in range(5):
            texts = [f"ok {10 * i + k}" for k in range(4)]
            expected = [10.0 * i + k for k in range(4)]
            assert [o.values for o in pool.call([job(texts), job(texts, index=1)])] == [
                expected
            ] * 2
        assert pool.restarts == 0


def test_a_connection_that_is_no_longer_the_trainers_is_not_written_to(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.touch()
    with WorkerPool([spec("closes"), spec("act")], workers=1) as pool:
        (outcome,) = pool.call([job([f"ok {foreign}"])])
        assert outcome == Outcome([None], ["lost its process (exit code 1)"])
        assert pool.call([job(["ok 1"], index=1)])[0].values == [1.0]
    assert foreign.read_bytes() == b""


def test_an_answer_to_another_request_is_not_taken():
    with WorkerPool([spec("forges"), spec("forges", per_sample=True)]) as pool:
        outcomes = pool.call([job(["ok 1", "ok 2"]), job(["ok 3", "ok 4"], index=1)])
    assert [o.values for o in outcomes] == [[1.0, 2.0], [3.0, 4.0]]


def test_the_working_folder_is_the_same_for_every_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with WorkerPool([spec("moves", per_sample=True)], workers=1) as pool:
        monkeypatch.chdir("/")
        assert pool.call([job(["a", "b"])])[0].values == [EnvFailed(str(tmp_path))] * 2


def test_what_a_killed_function_started_is_killed(tmp_path):
    note = tmp_path / "pids"
    with WorkerPool([spec("leaves_children")]) as pool:
        (outcome,) = pool.call([job([str(note)])])
        assert outcome.failures == ["lost its process (signal 9)"]
        child, daemon = map(int, note.read_text().split())
        assert gone(child)
        assert gone(daemon) or sys.platform != "linux"


def test_an_idle_worker_that_dies_is_replaced_and_no_sample_blamed():
    with WorkerPool([spec("processes")], workers=1) as pool:
        before = pool.call([job(["a"])])[0].values[0]
        os.kill(int(before["worker"]), signal.SIGKILL)
        wait_for(lambda: gone(int(before["worker"])))
        (outcome,) = pool.call([job(["a"])])
        assert outcome.failures == [None] and pool.restarts == 1
        assert outcome.values[0]["worker"] != before["worker"]
        assert outcome.values[0]["zygote"] == before["zygote"]


def test_a_dead_zygote_is_replaced():
    with WorkerPool([spec("processes"), spec("act")], workers=1) as pool:
        before = pool.call([job(["a"])])[0].values[0]
        os.kill(int(before["zygote"]), signal.SIGKILL)
        (outcome,) = pool.call([job(["ok 1", "kill 2", "ok 3"], index=1)])
        assert outcome.values == [1.0, None, 3.0]
        assert outcome.failures[1].startswith("lost its process")
        assert pool.call([job(["a"])])[0].values[0]["zygote"] != before["zygote"]


def test_a_zygote_that_cannot_be_replaced_is_an_error(tmp_path):
    file = tmp_path / "once.py"
    file.write_text(
        "import os\n"
        f"if os.path.exists('{tmp_path}/done'): os._exit(7)\n"
        f"open('{tmp_path}/done', 'w').close()\n"
        "def f(completions): return [os.getppid()] * len(completions)\n"
    )
    with WorkerPool([FunctionSpec(f"{file}:f")], workers=2) as pool:
        (zygote,) = pool.call([job(["a"])])[0].values
        os.kill(int(zygote), signal.SIGKILL)
        pool.call([job(["a"])])  # the worker is still there
        with pytest.raises(UserError, match="process that imports the reward functions died"):
            pool.call([job(["a"]), job(["b"])])  # a second one is needed


@pytest.mark.parametrize("zygote_died", [False, True])
def test_closing_ends_all_processes_and_a_closed_pool_says_so(zygote_died):
    pool = WorkerPool([spec("processes")])
    (found,) = pool.call([job(["a"])])[0].values
    if zygote_died:
        os.kill(int(found["zygote"]), signal.SIGKILL)
    pool.close()
    pool.close()
    assert gone(int(found["zygote"]))
    wait_for(lambda: gone(int(found["worker"])))
    with pytest.raises(ValueError, match="closed"):
        pool.call([job(["a"])])


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """A trainer in a process group of its own, killed in the end."""
    head = "import sys; from grpo_engine.rewards.workers import *\n"
    paths = [str(FILE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    trainer = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), str(FILE), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        try:
            yield trainer
        finally:
            trainer.kill()


def test_nothing_outlives_a_trainer_that_is_killed(tmp_path):
    note = tmp_path / "pids"
    script = """
        with WorkerPool([FunctionSpec(sys.argv[1] + ":notes_and_hangs")]) as pool:
            pool.call([Job(0, "f", {"completions": [sys.argv[2]]}, 1, 600.0)])
        """
    with running(script, str(note)) as trainer:
        wait_for(lambda: note.exists() and len(note.read_text().split()) == 2)
        worker, zygote = map(int, note.read_text().split())
        assert not gone(worker) and not gone(zygote)
        trainer.kill()
        wait_for(lambda: gone(worker) and gone(zygote))


def test_nothing_outlives_a_trainer_that_is_killed_while_functions_are_imported(tmp_path):
    file, note = tmp_path / "slow.py", tmp_path / "pid"
    file.write_text(
        "import os, time\n"
        f"open('{note}', 'w').write(f'{{os.getpid()}} ')\n"
        "time.sleep(600)\n"
        "def f(completions): return []\n"
    )
    script = "WorkerPool([FunctionSpec(sys.argv[2] + ':f')])"
    with running(script, str(file)) as trainer:
        wait_for(lambda: note.exists() and note.read_text().endswith(" "))
        trainer.kill()
        wait_for(lambda: gone(int(note.read_text())))


def test_ctrl_c_is_the_trainers_to_act_on(tmp_path):
    # Sent to the whole group, as a terminal does; and once more to zygote and worker themselves.
    note = tmp_path / "pids"
    script = """
        specs = [FunctionSpec(f"{sys.argv[1]}:{name}") for name in ("notes_and_hangs", "act")]
        with WorkerPool(specs) as pool:
            try:
                pool.call([Job(0, "f", {"completions": [sys.argv[2]]}, 1, 600.0)])
            except KeyboardInterrupt:
                print(pool.call([Job(1, "f", {"completions": ["ok 4"]}, 1, 60.0)])[0].values)
                print(pool.restarts)
        """
    with running(script, str(note)) as trainer:
        wait_for(lambda: note.exists() and len(note.read_text().split()) == 2)
        worker, zygote = map(int, note.read_text().split())
        os.kill(worker, signal.SIGINT)
        os.kill(zygote, signal.SIGINT)
        time.sleep(0.1)
        assert not gone(worker) and not gone(zygote)
        os.killpg(trainer.pid, signal.SIGINT)
        assert trainer.communicate(timeout=AMPLE_S)[0].split() == ["[4.0]", "1"]
        assert gone(worker) and gone(zygote)


def test_an_interrupted_command_to_the_zygote_leaves_the_pool_usable(monkeypatch):
    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with WorkerPool([spec("act")], workers=2) as pool:
        assert pool.call([job(["ok 1"])])[0].values == [1.0]
        monkeypatch.setattr("grpo_engine.rewards.processes.read_value", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.call([job(["ok 2"]), job(["ok 3"])])  # a second worker is forked
        outcomes = pool.call([job(["ok 4"]), job(["ok 5"])])
        assert [o.values for o in outcomes] == [[4.0], [5.0]]


def test_workers_are_light():
    with WorkerPool([spec("torch_is_here")]) as pool:
        assert pool.call([job(["a"])])[0].values == [0.0]
    code = "import sys, grpo_engine.rewards.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
