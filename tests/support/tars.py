"""WebDataset tars as others have them: any fields, an index beside them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from attack.files import entry
from farandole.data.prepare import webdataset_index

Sample = tuple[str, Mapping[str, bytes]]


def picture(shade: int) -> bytes:
    made = io.BytesIO()
    PIL.Image.new("RGB", (6, 4), (shade, 0, 255 - shade)).save(made, "PNG")
    return made.getvalue()


def array(value: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, value, allow_pickle=False)
    return made.getvalue()


def sample(number: int) -> Sample:
    """One of each kind of field, all of them telling of `number`."""
    return f"folder.d/{number:04d}", {
        "seg.png": picture(number),
        "cls": str(number).encode(),
        "txt": f"é{number}".encode(),
        "json": json.dumps({"number": number}).encode(),
        "npy": array(np.full((2, 3), number, dtype=np.float32)),
        "bin": bytes([number, 0, 255]),
    }


def write(path: Path, samples: Sequence[Sample]) -> Path:
    parts = [entry(f"{key}.{field}", data) for key, fields in samples for field, data in fields.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(parts) + bytes(1024))
    return path


def folder(place: Path, *, tars: int = 3, each: int = 4, index: bool = True) -> Path:
    for number in range(tars):
        write(place / f"part-{number:03d}.tar", [sample(number * each + n) for n in range(each)])
    if index:
        make_index(place)
    return place


def make_index(place: Path, output: Path | None = None) -> list[webdataset_index.Read]:
    heard: list[webdataset_index.Read] = []
    webdataset_index.make_index(
        str(place), webdataset_index.listing(str(place)), str(output or place / "index.json"), processes=1, begin=abs,
        on_result=heard.append,
    )  # fmt: skip
    return heard
