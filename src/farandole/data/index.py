"""What `index.json` says of a folder of shards: the `wids` package's format, in which unknown fields are passed over.

`classes` is ours: the classes' names by label, which that format has no place for.
"""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from farandole.errors import UsageError

INDEX = "index.json"
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One tar file: its name, relative to the index, how many samples it has, its length and its MD5 in hex."""

    url: str
    nsamples: int
    filesize: int
    md5sum: str


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """All shards, in the order of their samples."""

    kind: str = msgspec.field(default="wids-shard-index-v1", name="__kind__")
    wids_version: int = 1
    name: str = ""
    classes: tuple[str, ...] = ()
    shardlist: tuple[Shard, ...]


def require_pillow() -> None:
    """Raises `UsageError` where Pillow is not installed: before anything is begun, not at the first image."""
    if find_spec("PIL") is None:
        raise UsageError('images are decoded with Pillow, which is not installed: pip install "farandole[images]"')
