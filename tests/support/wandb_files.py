"""What Weights & Biases has written offline: records of its protocol, in the log format of LevelDB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32 * 1024  # bytes: of the file, and of one block of records
FULL, FIRST, _MIDDLE, LAST = 1, 2, 3, 4


def rows(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The ids under which W&B knows the run of a folder, and the rows of its history, in the order of writing."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids: list[str] = []
    found: list[dict[str, Any]] = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                found.append({**items, "_step": record.history.step.num})
    return ids, found


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    at, parts = HEADER, b""
    while at + 7 <= len(content):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part = content[at + 7 : at + 7 + size]
        at += 7 + size
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
