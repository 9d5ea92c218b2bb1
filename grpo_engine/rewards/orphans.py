"""Processes that reward functions leave behind: whose they are, when they end.

The zygote is the subreaper of its workers, so what leaves its worker's group and loses its parent
becomes the zygote's child. The dead are waited for, or a function that leaves one a call would use
up the machine's process ids. What was settled while all workers were alive is a service that some
function wants (a sandbox, say): it stays when another worker is ended, and ends with the zygote.
"""

import contextlib
import os
import signal
from pathlib import Path


class Orphans:
    """The children of this process that are no workers.

    workers: pids, kept up to date by the caller when it forks, and here when one is ended.
    """

    def __init__(self, workers: set[int]) -> None:
        self._workers = workers
        self._helpers = _children()  # of the imported modules: theirs to wait for
        self._settled: set[int] = set()

    def reap(self) -> None:
        """Waits for the dead; to be called while nothing else is to be done."""
        calm = all(map(_is_alive, self._workers))
        there = _children() - self._workers - self._helpers
        alive = {pid for pid in there if os.waitpid(pid, os.WNOHANG)[0] == 0}
        self._settled = alive if calm else self._settled & alive

    def end_with(self, worker: int) -> int:
        """Ends a worker, its group and all that has newly come here; its wait status.

        It is killed before its id can be another's, and what it leaves comes here when it dies.
        """
        status = _end(worker)
        self._workers.discard(worker)
        self._end_others(self._workers | self._helpers | self._settled)
        return status

    def end_all(self) -> None:
        """Ends everything."""
        for worker in self._workers:
            _end(worker)
        self._end_others(set())

    def _end_others(self, kept: set[int]) -> None:
        while strays := _children() - kept:
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _end(worker: int) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    return os.waitpid(worker, 0)[1]


def _is_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _children() -> set[int]:
    try:
        listed = Path("/proc/thread-self/children").read_text()
    except OSError:
        return set()
    return {int(pid) for pid in listed.split()}
