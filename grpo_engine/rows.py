"""Rows of data as they lie in files: JSON, Parquet, folders of `datasets`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError, first_line, require

MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # of Windows
HUB_ID = re.compile(r"[\w-]+/[\w.-]+")
TABLES = {".csv": "'csv', data_files={!r}", ".tsv": "'csv', data_files={!r}, sep='\\t'"}


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSON or Parquet file or of a folder saved by `datasets`, columns by name.

    A byte that is no UTF-8 becomes a lone surrogate, which `check_plain` refuses.
    Raises UserError, naming the line, for what can't be read as rows.
    """
    source = Path(path).expanduser()
    suffix = source.suffix.lower()
    if not source.exists():
        advice = "give a JSONL or Parquet file, or a folder"
        if HUB_ID.fullmatch(path):
            advice = f"a data set of the hub is saved first: {_saving(repr(path), source.name)}"
        raise UserError(f"no such data: {path}; {advice}")
    if source.is_dir():
        return _dataset_folder_rows(source)
    if suffix == ".parquet":
        return _parquet_rows(source)
    if suffix in (".jsonl", ".json", ".ndjson"):
        return _json_rows(source)
    advice = ""
    if suffix in TABLES:
        advice = f"; convert it: {_saving(TABLES[suffix].format(path), source.stem)}"
    raise UserError(f"{source}: expected .jsonl, .parquet or a folder saved by `datasets`{advice}")


def check_plain(row: dict[str, Any], where: str) -> None:
    """UserError for a column with what JSON can't hold: rows are hashed, recorded, read back."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, default=_refuse).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: the column {name!r} holds {error.object[error.start]!r}, which is no "
                "character: save the file as UTF-8, or drop the row"
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: the column {name!r} holds what JSON can't ({first_line(error)}): make "
                "it text or numbers, or drop the column"
            ) from error


def _refuse(value: Any) -> None:
    raise TypeError(f"a {type(value).__name__}")


def _saving(loaded: str, name: str) -> str:
    return (
        f"python -c \"import datasets; datasets.load_dataset({loaded}, split='train')"
        f".to_json('{name}.jsonl')\""
    )


def _json_rows(source: Path) -> Iterator[dict]:
    with source.open("rb") as file:
        start = file.read(3)
    encoding = next((name for mark, name in MARKS.items() if start.startswith(mark)), "utf-8")
    place = ""
    try:
        with source.open(encoding=encoding, errors="surrogateescape") as lines:
            if source.suffix.lower() == ".json" and lines.read(4096).lstrip().startswith("["):
                lines.seek(0)
                texts = [("", lines.read())]
            else:
                lines.seek(0)
                texts = ((f" line {number}", line) for number, line in enumerate(lines, start=1))
            for place, text in texts:
                if not text.strip():
                    continue
                found = json.loads(text, object_pairs_hook=_object)
                for number, row in enumerate([found] if place else found):
                    if not isinstance(row, dict):
                        where = place or f" row {number}"
                        raise UserError(f"{source}{where}: expected an object with columns")
                    yield row
    except (OSError, UnicodeError) as error:
        raise UserError(f"can't read {source}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{source}{place} is no JSON: {error}; expected an object a line"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return found


def _parquet_rows(source: Path) -> Iterator[dict]:
    parquet = require("pyarrow.parquet", "train", "reading Parquet")
    try:
        table = parquet.ParquetFile(source).read()
        names = table.column_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"it has two columns {twice[0]!r}")
        yield from table.to_pylist(maps_as_pydicts="strict")
    except (OSError, ValueError, KeyError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"can't read {source}: {error}") from error


def _dataset_folder_rows(source: Path) -> Iterator[dict]:
    datasets = require("datasets", "tasks", "reading a folder saved by `datasets`")
    try:
        dataset = datasets.load_from_disk(str(source))
    except Exception as error:  # an empty data set is an IndexError in there
        raise UserError(f"{source} is no folder with rows saved by `datasets`: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        names = ", ".join(f"{source}/{split}" for split in dataset)
        raise UserError(f"{source} holds several splits; give the path of one: {names}")
    yield from dataset.with_format(None)  # not the tensors or arrays that it may be saved with
