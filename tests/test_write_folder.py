"""A folder appears whole or not at all, and takes the place of an old one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from grpo_engine import disk
from grpo_engine.disk import DiskError, write_folder
from grpo_engine.errors import Interrupted


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), DiskError),
        (SafetensorError("I/O error: File too large (os error 27)"), DiskError),
        (ValueError("a bug"), ValueError),
        (Interrupted(15), Interrupted),
    ],
    ids=repr,
)
@pytest.mark.parametrize("had_one", [True, False])
def test_writer_that_fails_leaves_nothing_and_keeps_the_old_folder(
    tmp_path, error, raised, had_one
):
    target = tmp_path / "adapter"
    if had_one:
        write_folder(target, lambda folder: (folder / "a").write_bytes(b"old"))

    def fails(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(b"half")
        raise error

    with pytest.raises(raised) as caught:
        write_folder(target, fails)
    told = {28: "No space left on device", 27: "File too large"}
    refused = [f"can't write to {target}: {text}; make room there" for text in told.values()]
    assert str(caught.value) in (refused if raised is DiskError else [str(error)])
    assert tree(tmp_path) == ({"adapter/a": b"old"} if had_one else {})
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"] * had_one


def test_folder_replaces_the_old_one_and_a_killed_attempt(tmp_path):
    target = tmp_path / "deep" / "adapter"
    write_folder(target, lambda folder: (folder / "old").write_bytes(b"1"))
    killed = tmp_path / "deep" / ".adapter.tmp"
    killed.mkdir()
    (killed / "half").write_bytes(b"?")
    write_folder(target, lambda folder: (folder / "new").write_bytes(b"2"))
    assert tree(tmp_path) == {"deep/adapter/new": b"2"}


@pytest.mark.parametrize("knows", [True, False])
def test_there_is_always_a_whole_folder_where_the_system_can_exchange_two(
    tmp_path, monkeypatch, knows
):
    """Renames and removals are when a kill could leave none."""
    target = tmp_path / "adapter"
    write_folder(target, lambda folder: (folder / "a").write_text("old"))
    seen = []

    def watched(real: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            found = real(*args, **options)
            seen.append((target / "a").read_text() if target.exists() else None)
            return found

        return call

    if not knows:  # as of a network file system
        monkeypatch.setattr(disk, "_exchanged", lambda *_: False)
    for owner, name in ((Path, "rename"), (disk, "_exchanged"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    write_folder(target, lambda folder: (folder / "a").write_text("new"))
    assert tree(tmp_path) == {"adapter/a": b"new"}
    assert (None in seen) is not knows and seen[-1] == "new"


def test_a_rename_that_fails_gives_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "adapter"
    write_folder(target, lambda folder: (folder / "a").write_text("old"))
    real = Path.rename

    def fails(path: Path, to: Path) -> Path:
        if path.name == ".adapter.tmp":
            raise OSError(5, "Input/output error")
        return real(path, to)

    monkeypatch.setattr(disk, "_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(DiskError, match=r"adapter: Input/output error$"):
        write_folder(target, lambda folder: (folder / "a").write_text("new"))
    assert tree(tmp_path) == {"adapter/a": b"old"}


def test_all_of_a_folder_is_on_the_disk_before_it_is_seen(tmp_path, monkeypatch):
    target = tmp_path / "adapter"
    synced = []
    monkeypatch.setattr(disk, "_sync", lambda path: synced.append((path, target.exists())))

    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("x")

    write_folder(target, write)
    temporary = tmp_path / ".adapter.tmp"
    inside = {temporary, temporary / "sub", temporary / "sub" / "a"}
    assert {path for path, seen in synced if not seen} == inside
    assert [path for path, seen in synced if seen] == [tmp_path]
