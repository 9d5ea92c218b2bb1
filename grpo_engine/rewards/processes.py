"""The trainer's handles of the processes in worker.py."""

import contextlib
import inspect
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from .frames import LARGEST, LENGTH, pack, read_value
from .load_function import FunctionSpec, describe
from .process import StepReward
from .protocol import EnvFailed

# Started with -c, for it must import what the trainer can, from wherever that was started.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from grpo_engine.rewards.worker import main; main(int(sys.argv[2]))"
)
LOAD_S = 600.0  # importing the functions; a module may load a model
COMMAND_S = 60.0  # forking or ending a worker: milliseconds, on a machine that isn't stuck
CLOSE_S = 10.0
Answer = tuple[int, int, Any] | pickle.UnpicklingError
READ_SIZE = 1 << 18


class ZygoteLost(Exception):
    """The zygote died, or gave no answer."""


class Zygote:
    """The process that imports the functions and forks workers.

    Raises UserError if a function can't be loaded.
    """

    def __init__(self, specs: Sequence[FunctionSpec], folder: str) -> None:
        self.lost = False
        """it died or was given up: only `close` is left to do"""
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    START,
                    json.dumps([str(p) for p in sys.path]),
                    str(other.fileno()),
                ],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stderr: what functions print is not the trainer's output
                cwd=folder,
                start_new_session=True,  # Ctrl-C in the terminal is the trainer's to act on
            )
        try:
            answer = self._ask(pack(list(specs)), LOAD_S)
        except BaseException as error:
            self.close()
            if isinstance(error, ZygoteLost):
                raise UserError(
                    f"the process that imports the reward functions {error}; what it said is above"
                ) from error
            raise
        if isinstance(answer, str):
            self.close()
            raise UserError(answer)
        self.signatures: list[inspect.Signature] = answer

    def fork(self) -> "Worker":
        """A new worker. Raises ZygoteLost, or UserError if the system refuses."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._ask(pickle.dumps(None), COMMAND_S, theirs)
        if isinstance(answer, str):
            ours.close()
            raise UserError(f"a reward worker can't be started: {answer}")
        return Worker(answer, ours, self)

    def end(self, pid: int) -> int:
        """Kills a worker and all of its group; its wait status. Raises ZygoteLost."""
        return self._ask(pickle.dumps(pid), COMMAND_S)

    def close(self) -> None:
        """Ends it and all of its workers."""
        self._control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: bytes, timeout_s: float, passed: socket.socket | None = None) -> Any:
        try:
            self._control.settimeout(timeout_s)
            if passed is not None:
                socket.send_fds(self._control, [command], [passed.fileno()])
            else:
                self._control.sendall(command)
            return read_value(self._control)
        except (OSError, EOFError) as error:
            self._lose()
            late = isinstance(error, TimeoutError)
            raise ZygoteLost(f"gave no answer in {timeout_s:g} s" if late else "died") from error
        except BaseException:  # interrupted: its answer would be taken for the next one's
            self._lose()
            raise

    def _lose(self) -> None:
        self.lost = True
        self._control.close()


class Worker:
    """A worker and its connection."""

    def __init__(self, pid: int, connection: socket.socket, zygote: Zygote) -> None:
        self.pid, self._connection, self._zygote = pid, connection, zygote
        # Opened while the zygote still holds the id, for the day when it does no longer.
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self.calls = 0
        """of functions, that it has been asked for"""
        connection.setblocking(False)
        self._inbox = bytearray()
        self._outbox = memoryview(b"")

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    @property
    def sending(self) -> bool:
        """Whether `send` has to go on."""
        return len(self._outbox) > 0

    def queue(self, data: bytes) -> None:
        """Data for `send`."""
        self._outbox = memoryview(data)

    def send(self) -> None:
        """As much as goes without waiting; that it died is found when reading."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                self._outbox = self._outbox[self._connection.send(self._outbox) :]

    def receive(self) -> tuple[list[Answer], bool]:
        """The answers that have come (number of the request, kind, content), and whether the
        connection still stands.

        One that holds anything but plain values is an UnpicklingError in its place.
        """
        stands = True
        try:
            while data := self._connection.recv(READ_SIZE):
                self._inbox += data
            stands = False
        except BlockingIOError:
            pass
        except OSError:
            stands = False
        answers: list[Answer] = []
        while len(self._inbox) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._inbox)
            if size > LARGEST:
                return answers, False  # the function wrote into it
            end = LENGTH.size + size
            if len(self._inbox) < end:
                break
            answers.append(_read_plain(bytes(self._inbox[LENGTH.size : end])))
            del self._inbox[:end]
        return answers, stands

    def end(self) -> int | None:
        """Kills it; its wait status, None if nobody could wait for it."""
        self._connection.close()
        try:
            return self._zygote.end(self.pid)
        except ZygoteLost:  # and its id may be another's by now
            if self._handle is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            return None
        finally:
            if self._handle is not None:
                os.close(self._handle)


class _PlainUnpickler(pickle.Unpickler):
    """Builds nothing but answers: a worker may run what a model wrote."""

    def find_class(self, module: str, name: str) -> type:
        for allowed in (EnvFailed, StepReward):
            if (module, name) == (allowed.__module__, allowed.__qualname__):
                return allowed
        raise pickle.UnpicklingError(f"an object of the class {module}.{name}")


def _read_plain(data: bytes) -> Answer:
    try:
        number, kind, content = _PlainUnpickler(io.BytesIO(data)).load()
        return number, kind, content
    except Exception as error:
        return pickle.UnpicklingError(describe(error))
