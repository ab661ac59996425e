"""MDS shards written by the format's layout, without its package (see `farandole.data.formats.mds`)."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

FIXED = {"int": 8, "uint8": 1, "float32": 4, "ndarray:float32:2,3": 24}
COLUMNS = {
    "about": "json", "array": "ndarray", "half": "float32", "image": "png", "name": "str", "number": "int",
    "pixels": "pil", "raw": "bytes", "shaped": "ndarray:float32:2,3", "typed": "ndarray:int16",
}  # fmt: skip
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress}


def picture(shade: int) -> bytes:
    made = io.BytesIO()
    PIL.Image.new("L", (4, 3), shade).save(made, "PNG")
    return made.getvalue()


def encoded(number: int) -> dict[str, bytes]:
    """One sample's columns, as they are stored."""
    return {
        "about": json.dumps({"n": number}).encode(),
        "array": bytes([17, 2 << 2, number % 3 + 1, 2]) + np.full((number % 3 + 1, 2), number, "<i2").tobytes(),
        "half": struct.pack("<f", number / 2),
        "image": picture(number),
        "name": f"é{number}".encode(),
        "number": struct.pack("<q", -number),
        "pixels": struct.pack("<III", 4, 3, 1) + b"L" + bytes([number]) * 12,
        "raw": bytes([number]),
        "shaped": np.full((2, 3), number, "<f4").tobytes(),
        "typed": bytes([1 << 2, 2]) + np.array([number, -number], "<i2").tobytes(),
    }


def shard(samples: Sequence[dict[str, bytes]], columns: dict[str, str]) -> bytes:
    stored: list[bytes] = []
    for sample in samples:
        lengths = [len(sample[name]) for name, encoding in columns.items() if encoding not in FIXED]
        stored.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(sample[name] for name in columns))
    config = json.dumps({"columns": columns}).encode()
    offsets = [4 + 4 * (len(stored) + 1) + len(config)]
    for each in stored:
        offsets.append(offsets[-1] + len(each))
    return struct.pack(f"<{len(offsets) + 1}I", len(stored), *offsets) + config + b"".join(stored)


def write(
    folder: Path,
    shards: Sequence[Sequence[dict[str, bytes]]],
    columns: dict[str, str] | None = None,
    *,
    compression: str | None = None,
    md5: bool = False,
    said: dict[str, Any] | None = None,
) -> Path:
    """A folder of shards, whose index fits but for what is `said` otherwise of the first one."""
    columns = COLUMNS if columns is None else columns
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, samples in enumerate(shards):
        raw = shard(samples, columns)
        name = f"shard.{number:05d}.mds"
        stored = raw if compression is None else COMPRESS[compression](raw)
        files = [(name, raw)] if compression is None else [(name, raw), (f"{name}.{compression}", stored)]
        (folder / files[-1][0]).write_bytes(stored)
        about = [
            {"basename": each, "bytes": len(data), "hashes": {"md5": hashlib.md5(data).hexdigest()} if md5 else {}}
            for each, data in files
        ]
        entries.append(
            {
                "column_encodings": list(columns.values()), "column_names": list(columns),
                "column_sizes": [FIXED.get(encoding) for encoding in columns.values()], "compression": compression,
                "format": "mds", "hashes": ["md5"] if md5 else [], "raw_data": about[0], "samples": len(samples),
                "size_limit": 1 << 26, "version": 2, "zip_data": about[1] if compression else None,
            }
        )  # fmt: skip
    entries[0] |= said or {}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def folder(place: Path, *, each: int = 5, **options: Any) -> Path:
    return write(place, [[encoded(n * each + k) for k in range(each)] for n in range(3)], **options)
