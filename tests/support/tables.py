"""Parquet and Arrow files with columns of many kinds, whose values tell of their rows."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("parquet", "arrow", "stream")
DAY = datetime.date(2020, 1, 1)


def rows(begin: int, count: int) -> pa.Table:
    """Columns of every kind that a sample may have."""
    numbers = range(begin, begin + count)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "half": pa.array([n / 2 for n in numbers], pa.float32()),
            "even": [n % 2 == 0 for n in numbers],
            "name": [f"é{n}" for n in numbers],
            "data": [bytes([n % 256, 0]) for n in numbers],
            "tokens": pa.array([[n, n + 1, n + 2] for n in numbers], pa.list_(pa.uint16())),
            "ragged": pa.array([[float(n)] * (n % 3) for n in numbers], pa.list_(pa.float32())),
            "fixed": pa.array([[n, -n] for n in numbers], pa.list_(pa.int8(), 2)),
            "gaps": pa.array([None if n % 4 == 1 else n for n in numbers], pa.int64()),
            "holes": pa.array([[n, None] for n in numbers], pa.list_(pa.int64())),
            "day": [DAY + datetime.timedelta(n) for n in numbers],
            "about": [{"row": n, "words": ["a", str(n)]} for n in numbers],
        }
    )


PLAIN = ("number", "half", "even", "tokens", "fixed")  # of which `gather` makes micro-batches


def expected(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "half": number / 2,
        "even": number % 2 == 0,
        "name": f"é{number}",
        "data": bytes([number % 256, 0]),
        "tokens": np.array([number, number + 1, number + 2], dtype=np.uint16),
        "ragged": np.array([number] * (number % 3), dtype=np.float32),
        "fixed": np.array([number, -number], dtype=np.int8),
        "gaps": None if number % 4 == 1 else number,
        "holes": [number, None],
        "day": DAY + datetime.timedelta(number),
        "about": {"row": number, "words": ["a", str(number)]},
    }


def noted(table: pa.Table, **features: dict[str, Any]) -> pa.Table:
    """With what Hugging Face's `datasets` writes into the schema of columns."""
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write(path: Path, table: pa.Table, kind: str, group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=group)
        return path
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    return path


def folder(place: Path, kind: str, *, files: int = 3, each: int = 16) -> Path:
    ending = "parquet" if kind == "parquet" else "arrow"
    for number in range(files):
        write(place / f"part-{number}.{ending}", rows(number * each, each), kind)
    return place


def same(found: Any, wanted: Any) -> bool:
    """Of values and of their types, arrays by their bits."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == wanted.dtype and found.tolist() == wanted.tolist()
    return type(found) is type(wanted) and found == wanted
