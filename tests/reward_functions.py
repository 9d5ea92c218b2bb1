"""Reward functions that behave, and such that don't; run in workers, never in the tests."""

import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from grpo_engine.rewards.frames import VALUES, pack
from grpo_engine.rewards.process import StepReward
from grpo_engine.rewards.protocol import EnvFailed


def act(completions):
    """Each completion says what to do and what to return then: "ok 3", "hang 4", "kill 5"."""
    return [_act(*text.split()) for text in completions]


def _act(deed, number):
    if deed == "hang":
        time.sleep(600)
    if deed == "spin":
        while True:
            pass
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "exit":
        os._exit(3)
    if deed == "raise":
        raise ValueError(f"no\n{number}")
    if deed == "leave":
        sys.exit("over")
    if deed == "nap":
        time.sleep(0.004)
    return float("nan") if deed == "nan" else float(number)


def batch(completions):
    """How many samples the call was for."""
    act(completions)
    return [len(completions)] * len(completions)


def processes(completions):
    """The ids of worker and zygote."""
    return [{"worker": os.getpid(), "zygote": os.getppid()}] * len(completions)


def torch_is_here(completions):
    return ["torch" in sys.modules] * len(completions)


def given(**arguments):
    """What it was called with, as text."""
    return [EnvFailed(repr(sorted(arguments.items())))] * len(arguments["completions"])


def extras(completions, step, groups):
    return [step + group for group in groups]


def bonus(completions, answers, *, bonus=0.0, scale=1.0):
    return [scale * answer + bonus for answer in answers]


async def waits(completions):
    async def one(text):
        await asyncio.sleep(0.001)
        return float(text)

    return await asyncio.gather(*map(one, completions))


_loops = set()


async def loops(completions):
    _loops.add(asyncio.get_running_loop())
    return [len(_loops)] * len(completions)


def noisy(completions):
    print("to stdout" * 10_000)
    os.write(1, b"to fd 1" * 10_000)
    sys.stderr.write("to stderr")
    return act(completions)


def forks(completions):
    """Its child returns as well."""
    os.fork()
    return act(completions)


def closes(completions):
    """Keeps what is open under other numbers, and opens a file under each of the old ones."""
    for i in range(3, 64):
        try:
            fcntl.fcntl(i, fcntl.F_DUPFD, 100)
        except OSError:
            continue
        os.dup2(os.open(completions[0].split()[1], os.O_WRONLY | os.O_APPEND), i)
    return [1.0] * len(completions)


def forges(completions):
    """An answer to another request, sent on its worker's connection."""
    for i in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(i).st_mode):
                os.write(i, pack((10_000, VALUES, [99.0] * len(completions))))
        except OSError:
            continue
    return act(completions)


def moves(completions):
    here = os.getcwd()
    os.chdir("/")
    return [EnvFailed(here)] * len(completions)


def leaves_children(completions):
    """A child, and a grandchild in a session of its own; then it dies."""
    child = subprocess.Popen(["sleep", "600"])
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    Path(completions[0]).write_text(f"{child.pid} {os.read(reading, 20).decode()}")
    os.kill(os.getpid(), signal.SIGKILL)


def notes_and_hangs(completions):
    Path(completions[0]).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)


def orphans(completions):
    subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)
    return [1.0] * len(completions)


def daemonises(completions):
    subprocess.run(["setsid", "sh", "-c", 'sleep 600 & echo $! > "$0"', completions[0]], check=True)
    return [1.0] * len(completions)


def pids(completions):
    return [float(os.getpid())] * len(completions)


def steps(completions):
    return [[StepReward(0, 2, 0.5), StepReward(2, 3, 1.0)]] * len(completions)


class Odd(float):
    """A class that the trainer can't know."""


def odd_steps(completions):
    return [[StepReward(0, 2, Odd(0.5))]] * len(completions)


def half_steps(completions):
    return [[StepReward(0.5, 2, 1.0)]] * len(completions)


def words(completions):
    return ["1.0"] * len(completions)


def too_few(completions):
    return [1.0] * (len(completions) - 1)


def text(completions):
    return "1" * len(completions)


def nothing(completions):
    return None


def functions_back(completions):
    return [text] * len(completions)
