"""Where async functions of this process run."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable
from concurrent import futures
from typing import Any

from ..errors import UserError

GRACE_S = 1.0  # for a cancelled function to let go
MOST_ABANDONED = 8  # threads that functions still hold


class LoopThread:
    """One event loop in a thread of its own, started with the first call.

    An async function keeps its client from call to call, and may be called where a loop runs
    already, as in a notebook. One that blocks, or swallows its cancellation, keeps the thread; the
    next call has another.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []

    def run(self, awaitable: Awaitable, timeout_s: float) -> Any:
        """What it returns or raises; TimeoutError after `timeout_s`.

        Raises UserError when too many functions have not let go of their threads.
        """
        if self._loop is None:
            try:
                self._start()
            except UserError:
                if inspect.iscoroutine(awaitable):
                    awaitable.close()  # it is not awaited
                raise
        future = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(awaitable, timeout_s), self._loop
        )
        try:
            return future.result(timeout_s + GRACE_S)
        except (asyncio.TimeoutError, futures.TimeoutError) as error:
            if not future.done():
                self._abandon()
            raise TimeoutError(f"timed out after {timeout_s:g} s") from error
        finally:
            future.cancel()  # of one that is waited for no more: interrupted

    def close(self) -> None:
        """Ends the loop and what still runs in it; a later call starts another."""
        if self._loop is None:
            return
        with contextlib.suppress(futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result(GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        self._loop = self._thread = None

    def _start(self) -> None:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MOST_ABANDONED:
            raise UserError(
                f"{MOST_ABANDONED} calls of async reward functions have not let go after their "
                "time-out: they block; await what they wait for, or give the function as "
                "file.py:function, which runs in a process that can be killed"
            )
        self._loop = asyncio.new_event_loop()
        # A daemon: one that never lets go does not keep the program from ending.
        self._thread = threading.Thread(target=_serve, args=(self._loop,), daemon=True)
        self._thread.start()

    def _abandon(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # of what is cut off nobody need hear
        self._loop.call_soon_threadsafe(self._loop.stop)  # whenever it is let go of
        self._abandoned.append(self._thread)
        self._loop = self._thread = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _end_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
