"""Writing files and folders whole or not at all; what the disk refuses is one kind of error."""

import ctypes
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


class DiskError(UserError):
    """A file or folder could not be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the system in the block, whichever library met them, become a DiskError."""
    try:
        yield
    except Exception as error:
        # Libraries in Rust raise types of their own: "File too large (os error 27)".
        told = re.search(r"\(os error (\d+)\)", str(error))
        if not told and not isinstance(error, OSError):
            raise
        number = int(told[1]) if told else error.errno
        reason = os.strerror(number) if number else error
        advice = "; make room there" if number in NO_ROOM else ""
        raise DiskError(f"can't write to {path}: {reason}{advice}") from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file by `text`; DiskError leaves the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Adds `line` to a file; DiskError leaves nothing of it."""
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Fills a temporary folder and puts it in the place of `target`, never seen half-written.

    DiskError if writing fails; nothing is left behind, and an old `target` stays.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(target):
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            _open_to_readers(temporary)
            for path in (temporary, *temporary.rglob("*")):
                _sync(path)
            old = _put(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(target.parent)
    if old is not None:
        remove_folder(old)


def _open_to_readers(folder: Path) -> None:
    """Files as the umask wants them: safetensors writes its own for the user alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)


def remove_folder(folder: Path) -> None:
    """Removes a folder; one that the system keeps is hidden, and warned of."""
    hidden = folder.with_name(f".{folder.name.strip('.')}.tmp")
    try:
        folder.rename(hidden)  # a half-removed one would look whole
        shutil.rmtree(hidden)
    except OSError as error:
        warnings.warn(f"can't remove {folder}: {error.strerror}", stacklevel=2)


def _put(new: Path, target: Path) -> Path | None:
    """Renames `new` to `target`; returns where an old `target` then lies."""
    if not target.exists():
        new.rename(target)
        return None
    if _exchanged(new, target):
        return new
    old = target.with_name(f".{target.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def _exchanged(a: Path, b: Path) -> bool:
    """Whether the file system could swap two paths, so that there is no moment with neither."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return swap(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
