"""Jobs for pools of reward workers, and what became of processes."""

import os
import time
from pathlib import Path

from grpo_engine.rewards.workers import FunctionSpec, Job

FILE = Path(__file__).parent / "reward_functions.py"
AMPLE_S = 60.0  # of calls that answer, on any machine
SHORT_S = 0.5  # of calls that hang, beside others that take no time


def spec(function: str, **changes) -> FunctionSpec:
    return FunctionSpec(f"{FILE}:{function}", **changes)


def job(completions, timeout_s=AMPLE_S, index=0, split=True, **arguments) -> Job:
    everything = {"completions": completions, **arguments}
    return Job(index, "f", everything, len(completions), timeout_s, split)


def gone(pid: int) -> bool:
    """Whether there is no such process, a dead one that nobody has waited for aside."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # gone meanwhile, or a system without /proc
        return Path("/proc/self").exists()


def wait_for(condition) -> None:
    end = time.monotonic() + AMPLE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
