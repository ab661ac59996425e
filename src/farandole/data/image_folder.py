"""A folder of images as the source of shards: `SOURCE/CLASS/.../FILE`, as torchvision's `ImageFolder` has it.

Classes and files are sorted as it sorts them, so sample i of the shards is its sample i.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from farandole.data.decoding import IMAGES
from farandole.errors import UsageError


class ImageFile(NamedTuple):
    """One image: its path under the source folder, its class, its length in bytes, when it was changed."""

    path: str
    label: int
    size: int
    changed_ns: int

    samples = 1

    @property
    def content(self) -> tuple[Any, ...]:
        return self[:3]


class Found(NamedTuple):
    """One image as its source has it. `place`: for messages. `data`: its bytes, or why there are none. `suffix`: of
    its name, as `.jpg`; where the source has no names, it is the format's.
    """

    place: str
    label: int
    data: bytes | Exception
    suffix: str = ""


@dataclass(frozen=True)
class FolderReader:
    """Reads pieces, in any process."""

    folder: str
    how: tuple[Any, ...] = ()

    def read(self, pieces: Sequence[ImageFile]) -> Iterator[Found]:
        for piece in pieces:
            path = Path(self.folder, piece.path)
            try:
                data: bytes | Exception = path.read_bytes()
            except OSError as error:
                data = error
            yield Found(str(path), piece.label, data, path.suffix.lower())


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """A source folder. `passed_over`: files that are no images by their names."""

    reader: FolderReader
    classes: tuple[str, ...]
    pieces: tuple[ImageFile, ...]
    passed_over: int


def listing(folder: Path) -> FolderImages:
    """All images of the folder.

    Raises:
        UsageError: no classes, or no images.
    """
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give a folder of one folder a class, or tables") from None
    files: list[ImageFile] = []
    passed_over = 0
    for label, name in enumerate(classes):
        for root, _, names in sorted(os.walk(folder / name, followlinks=True)):
            for file in sorted(names):
                path = Path(root, file)
                if not file.lower().endswith(IMAGES):
                    passed_over += 1
                    continue
                stat = path.stat()
                files.append(ImageFile(str(path.relative_to(folder)), label, stat.st_size, stat.st_mtime_ns))
    if not files:
        raise UsageError(
            f"{folder} holds no images as CLASS/FILE.jpg; name the folder that holds the classes, or the one whose "
            f"files are tables (.parquet, .arrow)"
        )
    return FolderImages(
        reader=FolderReader(str(folder)), classes=tuple(classes), pieces=tuple(files), passed_over=passed_over
    )
