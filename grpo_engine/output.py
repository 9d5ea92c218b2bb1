"""What is printed ends no run: not by a closed pipe, a full disk or an alphabet that lacks it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class Output:
    """A text stream that escapes what it can't encode, and is given up when it can't be written."""

    def __init__(self, stream: TextIO | None) -> None:
        # Of a closed one; the open null device also takes its number, so that no file gets it.
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")
        self._lost = False
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """As of any stream; never raises OSError."""
        self._do(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """As of any stream; never raises OSError."""
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, act: Any, *args: str) -> None:
        if self._lost:
            return
        try:
            act(*args)
        except OSError as error:
            self._lost = True
            with suppress(OSError):  # what is still in its buffer must not fail when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            print(f"grpo: can't print ({error.strerror}): going on without", file=sys.stderr)


@contextmanager
def sturdy_output() -> Iterator[None]:
    """Within it, stdout and stderr are of this kind."""
    out, err = Output(sys.stdout), Output(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
