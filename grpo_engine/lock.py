"""A run folder belongs to one process: a lock that the kernel releases when that process ends."""

import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path

from .disk import writing
from .errors import UserError

UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # to some network file systems
LONGEST = 400  # bytes: a pid and the name of a host

_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


class InUse(UserError):
    """Another process writes to the folder."""


class RunLock:
    """Holds `folder`, which must exist, until it is released, is collected or the process ends.

    Raises InUse, naming host and pid, if another holds it. As a context it is released at its end.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        with writing(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.release = weakref.finalize(self, os.close, handle)
        self.warning: str | None = None
        """where the file system knows no locks, and others are not kept out"""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNKNOWN:
                holder = os.read(handle, LONGEST).decode(errors="replace").strip()
                self.release()
                raise InUse(
                    f"{folder} is in use by {holder or 'another process'}: wait until it has "
                    "ended, or stop it; or give another --train.out"
                ) from error
            self.warning = (
                f"{folder} lies on a file system without locks: let no second process train there"
            )
        _held.add(self)
        with writing(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _forget() -> None:
    """A forked child must not hold the lock when this process is dead."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget)
