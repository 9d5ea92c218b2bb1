"""Signals that end a run raise Interrupted at once, but never in the middle of a change."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .errors import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal is gone


class StopSignals:
    """A context in which the stopping signals raise Interrupted; those ignored before, as under
    nohup, stay so.

    Outside the main thread, where Python can't handle signals, it does nothing.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._depth = 0
        self._ignored = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            heard = [s for s in STOPPING if signal.getsignal(s) is not signal.SIG_IGN]
            self._previous = {s: signal.signal(s, self._handle) for s in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Holds a signal back until the block has ended."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and self._pending is not None:
            self._raise(self._pending)

    def ignore(self) -> None:
        """From here on the stopping signals do nothing: what they ask for is being done."""
        self._ignored, self._pending = True, None

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._ignored:
            return
        if self._depth:
            self._pending = signum
        else:
            self._raise(signum)

    def _raise(self, signum: int) -> None:
        self._pending = None
        raise Interrupted(signum)
