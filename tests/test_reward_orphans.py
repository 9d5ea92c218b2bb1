"""What reward functions start and leave behind: pools, services, orphans, leaks."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from grpo_engine.rewards.processes import Worker, ZygoteLost
from grpo_engine.rewards.worker import REAP_S
from grpo_engine.rewards.workers import FunctionSpec, WorkerPool
from reward_jobs import SHORT_S, gone, job, spec, wait_for

POOLS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def length(text):
    return float(len(text))

def executor(completions, method):
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(length, completions))

def pool(completions, method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(length, completions)
"""


def children_of_the_zygote(pool: WorkerPool) -> set[int]:
    zygote = pool._zygote._process.pid
    return set(map(int, Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()))


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("function", ["executor", "pool"])
def test_a_function_of_a_file_may_have_a_pool_of_its_own(tmp_path, function, method):
    (tmp_path / "pooled_rewards.py").write_text(POOLS)
    asked = FunctionSpec(f"{tmp_path}/pooled_rewards.py:{function}", options={"method": method})
    with WorkerPool([asked], workers=1) as pool:
        (outcome,) = pool.call([job(["a", "bb", "ccc"])])
    assert (outcome.failures, outcome.values) == ([None] * 3, [1.0, 2.0, 3.0])


def test_a_file_whose_name_is_a_packages_is_itself(tmp_path):
    (tmp_path / "json.py").write_text("def f(completions):\n    return [3.0] * len(completions)\n")
    with WorkerPool([FunctionSpec(f"{tmp_path}/json.py:f")]) as pool:
        assert pool.call([job(["a"])])[0].values == [3.0]


def test_the_dead_that_functions_orphan_are_waited_for():
    with WorkerPool([spec("orphans", per_sample=True)], workers=1) as pool:
        pool.call([job(["ok"] * 40)])
        (worker,) = pool._workers
        wait_for(lambda: children_of_the_zygote(pool) == {worker.pid})
        assert pool.restarts == 0


def test_a_service_of_a_healthy_worker_outlives_the_end_of_another(tmp_path):
    note = tmp_path / "pid"
    with WorkerPool([spec("daemonises"), spec("act")], workers=2) as pool:
        pool.call([job([str(note)])])
        wait_for(lambda: note.is_file() and note.read_text())
        service = int(note.read_text())
        time.sleep(2.5 * REAP_S)  # it has been seen while all workers were well
        (outcome,) = pool.call([job(["hang 1"], SHORT_S, index=1)])
        assert outcome.failures == ["timed out after 0.5 s"]
        assert not gone(service)
    wait_for(lambda: gone(service))


def test_a_worker_gives_way_after_its_calls_and_that_is_no_restart():
    with WorkerPool([spec("pids", per_sample=True)], workers=1, calls_per_worker=3) as pool:
        found = [pool.call([job(["a"])])[0].values[0] for _ in range(7)]
        assert [found.index(pid) for pid in found] == [0, 0, 0, 3, 3, 3, 6]
        assert pool.restarts == 0


def test_without_the_zygote_no_id_is_taken_for_another_process():
    """The id of the worker is another's by then: only the handle may be used."""

    class Lost:
        def end(self, pid):
            raise ZygoteLost("died")

    bystander = os.fork()
    if bystander == 0:
        os.setpgid(0, 0)
        time.sleep(600)
    try:
        dead = os.fork()
        if dead == 0:
            os._exit(0)
        ours, theirs = socket.socketpair()
        worker = Worker(dead, ours, Lost())
        os.waitpid(dead, 0)
        worker.pid = bystander  # as if its id had come round
        assert worker.end() is None
        theirs.close()
        assert not gone(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)
