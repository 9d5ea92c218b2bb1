"""Results as a table, CSV and JSON."""

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import UserError, require
from .harness import Row


def prepare(out: Path) -> None:
    """Makes the folder; UserError where nothing can be written into it."""
    probe = out / ".probe"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {out}: can't be written to: {error.strerror}") from error


def write(out: Path, name: str, machine: Mapping[str, Any], rows: list[Row]) -> list[Path]:
    """NAME.json (all) and NAME.csv (a line a row, with commit and device) in `out`."""
    paths = [out / f"{name}.json", out / f"{name}.csv"]
    write_json(paths[0], {"machine": machine, "rows": [asdict(row) for row in rows]})
    same = {key: machine[key] for key in ("commit", "device_name", "threads")}
    same |= {name: version for name, version in machine["packages"].items() if version}
    columns = [*(field.name for field in fields(Row)), *same]
    with open(paths[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            flat = {
                **asdict(row),
                "shape": _pairs(row.shape),
                "errors": _pairs(row.errors),
                "figures": _pairs(row.figures, _figures),
            }
            writer.writerow(flat | same)
    return paths


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all; NaN and infinity, which JSON has not, as null."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(_finite(content), indent=1), encoding="utf-8")
    os.replace(temporary, path)


def show(machine: Mapping[str, Any], rows: list[Row]) -> None:
    """A table for every case, and below it what the gate found."""
    console = require("rich.console", "train", "the table of grpo bench").Console(highlight=False)
    table_of = require("rich.table", "train", "the table of grpo bench").Table
    versions = (f"{name} {v}" for name, v in machine["packages"].items() if v)
    gemm = (f"{_figures(rate)} GFLOP/s {dtype}" for dtype, rate in machine["gemm_gflop_s"].items())
    for line in (
        f"{machine['device_name']}, {machine['threads']} threads, commit {machine['commit']}",
        ", ".join(versions),
        f"measured here: copy {_figures(machine['copy_gb_s'])} GB/s, GEMM {', '.join(gemm)}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    for (suite, case, shape), members in groupby(rows, key=_case_of):
        members = list(members)
        timed = [row for row in members if row.p50_ms is not None]
        unit = next((row.rate_unit for row in timed if row.rate_unit), "rate")
        table = table_of(box=None, padding=(0, 2, 0, 0))
        table.add_column("provider", no_wrap=True)
        for heading in ("p20 ms", "p50 ms", "p80 ms", "MiB", unit, "of rate", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in timed:
            table.add_row(row.provider, *_cells(row))
        console.print(f"\n{suite} {case}: {shape}", markup=False, soft_wrap=True)
        if timed:
            console.print(table)
        for row in members:
            parts = row.status, _pairs(row.errors), _pairs(row.figures, _figures), row.note
            found = "; ".join(filter(None, parts))
            console.print(f"  {row.provider}: {found}", markup=False, soft_wrap=True)


def _case_of(row: Row) -> tuple[str, str, str]:
    return row.suite, row.case, _pairs(row.shape)


def _cells(row: Row) -> list[str]:
    times = (row.p20_ms, row.p50_ms, row.p80_ms, row.peak_mem_mib, row.rate)
    share = "" if row.of_machine is None else f"{row.of_machine:.0%}"
    return [*map(_figures, times), share, _figures(row.ratio)]


def _figures(value: float | None) -> str:
    """Four figures, more where there are more before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _pairs(values: Mapping[str, Any], show: Callable[[float], str] = "{:.2g}".format) -> str:
    return " ".join(
        f"{name} {show(value)}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
