"""An image folder in a few shards, as `farandole data prepare` makes them, and all that is in them."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

from farandole.data.images import ShardedImages
from farandole.data.index import Index
from farandole.data.prepare import images as image_folder

SHARDS = 6


def prepared(source: Path, url: str) -> Index:
    listed = image_folder.list_folder(source)
    size = sum(file.size for file in listed.pieces) // SHARDS + 2000
    return image_folder.prepare(
        listed, url, shard_bytes=size, short_side=0, processes=1, begin=pickle.dumps, on_result=lambda _: None
    )


def read_all(images: ShardedImages) -> list[tuple[bytes, int]]:
    return [images.read(index) for index in range(len(images))]


def shard_sizes(folder: Path) -> list[int]:
    """Of a folder in which a fetcher may be at work: what it renames or removes meanwhile is not counted."""
    sizes: list[int] = []
    for path in folder.iterdir():
        if path.suffix not in (".lock", ".seen"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
    return sizes
