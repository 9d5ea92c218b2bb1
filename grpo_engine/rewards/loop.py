"""Where async functions of this process run."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any


class LoopThread:
    """One event loop in a thread of its own, started with the first call.

    An async function keeps its client from call to call, and may be called where a loop runs
    already, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, awaitable: Awaitable, timeout_s: float) -> Any:
        """What it returns or raises; TimeoutError after `timeout_s`."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(awaitable, timeout_s), self._loop
        )
        try:
            return future.result()
        finally:
            future.cancel()  # of one that is waited for no more: interrupted

    def close(self) -> None:
        """Ends the loop and what still runs in it; a later call starts another."""
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


async def _end_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
