"""The processes that run reward functions: one that imports them, and the workers it forks.

The first (the zygote) is started fresh, without torch or the trainer's threads, imports all
functions once, and then forks workers in milliseconds. It alone ends them and waits for them, so
that no id of a process is ever mistaken. When its connection closes, for whatever reason, it kills
all of them and exits: nothing outlives the trainer.

What functions orphan comes to it (orphans.py).
"""

import asyncio
import contextlib
import ctypes
import fcntl
import inspect
import io
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import UserError
from .frames import BEGUN, LARGEST, RAISED, REQUEST, VALUES, WRONG, pack, read_exactly, read_value
from .load_function import describe, load_function, raised
from .orphans import Orphans
from .protocol import plain_values

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
LONGEST_COMMAND = 4096  # a number and a pid; the next command waits for the answer to this one
REAP_S = 1.0  # between looks at what functions orphaned


def main(control_fd: int) -> None:
    """The zygote: reads the specs, answers with their signatures or an error, then forks and ends.

    A command is a pid to end (answered with its wait status), or None with a socket to fork a
    worker for (answered with its pid, or an error's text).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        specs = read_value(control)
        with _ended_by_a_closed(control):
            functions = [load_function(spec) for spec in specs]
            signatures = [_plain_signature(f) for f in functions]
    except Exception as error:
        control.sendall(pack(str(error) if isinstance(error, UserError) else describe(error)))
        return
    if sys.platform == "linux":  # children that left their worker's group come to us
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    workers: set[int] = set()
    orphans = Orphans(workers)
    try:
        control.sendall(pack(signatures))
        while True:
            while not select.select([control], [], [], REAP_S)[0]:
                orphans.reap()
            command, fds, *_ = socket.recv_fds(control, LONGEST_COMMAND, 1)
            if not command:
                return
            pid = pickle.loads(command)
            if pid is None:
                connection = socket.socket(fileno=fds[0])
                answer = _fork(control, connection, functions, workers)
            else:
                answer = orphans.end_with(pid)
            control.sendall(pack(answer))
    except ConnectionError:
        return
    finally:
        orphans.end_all()


def serve(connection: socket.socket, functions: Sequence[Callable]) -> None:
    """A worker: answers requests, one at a time, until the connection closes."""
    worker = _Worker(connection)
    while (header := read_exactly(connection, REQUEST.size)) is not None:
        length, worker.request, index, one_by_one = REQUEST.unpack(header)
        worker.function = functions[index]
        data = read_exactly(connection, length)
        if data is None:
            return
        stream = io.BytesIO(data)
        worker.name = pickle.load(stream)
        try:
            lists, others, count = pickle.load(stream)
        except Exception as error:
            text = f"the arguments of the reward {worker.name} can't be read in a worker: "
            worker.send(WRONG, text + describe(error))
            continue
        worker.send(BEGUN, None)
        if one_by_one:
            for i in range(count):
                arguments = {name: values[i : i + 1] for name, values in lists.items()}
                worker.send(*worker.call(arguments | others, 1))
        else:
            worker.send(*worker.call(lists | others, count))


class _Worker:
    """Calls functions that may do anything to the process, and sends what they return."""

    def __init__(self, connection: socket.socket) -> None:
        self.request, self.name = 0, ""
        self.function: Callable | None = None
        self._connection, self._identity = connection, _identity(connection)
        self._folder = os.getcwd()
        # Children that functions fork must not answer, nor keep it open when this process dies.
        os.register_at_fork(after_in_child=connection.close)
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, arguments: dict[str, Any], count: int) -> tuple[int, Any]:
        try:
            values = self.function(**arguments)
            if inspect.isawaitable(values):
                values = self._awaited(values)
            return VALUES, plain_values(values, self.name, count)
        except UserError as error:
            return WRONG, str(error)
        except BaseException as error:
            return RAISED, raised(error)
        finally:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)

    def send(self, kind: int, content: Any) -> None:
        """Answers, unless it is no longer the connection to the trainer."""
        if _identity(self._connection) != self._identity:
            # A child that the function forked; or it was closed, and its number is another file's.
            os._exit(1)
        try:
            data = pack((self.request, kind, content))
            if len(data) > LARGEST:
                raise ValueError(f"{len(data) >> 20} MiB; at most {LARGEST >> 20} can be sent")
        except Exception as error:
            text = f"the reward {self.name} returned what can't be sent: {describe(error)}"
            data = pack((self.request, WRONG, text))
        self._connection.sendall(data)

    def _awaited(self, values: Any) -> Any:
        # One loop for the life of the worker: clients that functions keep are bound to theirs.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(values)


def _identity(connection: socket.socket) -> tuple[int, int] | None:
    try:
        found = os.fstat(connection.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _ended_by_a_closed(control: socket.socket) -> Iterator[None]:
    """While nothing is read from `control`: SIGIO, sent when it closes, ends this process."""
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)


def _plain_signature(function: Callable) -> inspect.Signature:
    """Without annotations and defaults, which need not be picklable."""
    parameters = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in inspect.signature(function).parameters.values()
    ]
    return inspect.Signature(parameters)


def _fork(
    control: socket.socket,
    connection: socket.socket,
    functions: Sequence[Callable],
    workers: set[int],
) -> int | str:
    try:
        pid = os.fork()
    except OSError as error:
        connection.close()
        return describe(error)
    if pid == 0:
        try:
            os.setpgid(0, 0)  # what it starts is killed with it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            control.close()
            serve(connection, functions)
        except ConnectionError:
            pass  # the trainer has closed
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    with contextlib.suppress(OSError):  # it has already done so, or is dead
        os.setpgid(pid, pid)
    connection.close()
    workers.add(pid)
    return pid
