"""`farandole data prepare` of images, from a folder (section "image folder") or from tables (`image_table.py`).

`shards.py` has the phases and the invariants. Every image is checked here, so that a bad one is found now and not
during training: its header and its end, which a truncated image lacks. An image is decoded completely if its end is not
that of its format, or with `check`. (To decode all of them takes twice the CPU.)
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from farandole.data import index as samples
from farandole.data.decoding import IMAGES, SUFFIXES, ends_as_it_should, open_image, require_pillow
from farandole.data.index import Index, SamplesFile
from farandole.data.prepare.shards import (
    WHOLE,
    BadSamples,
    Part,
    Piece,
    ShardJob,
    ShardRecord,
    ShardResult,
    cut,
    digest_of,
    make_shards,
    md5_of,
    put,
    put_index,
)
from farandole.errors import UsageError

# --- image folder -----------------------------------------------------------------------------------------------------
#
# A folder of images as the source of shards: `SOURCE/CLASS/.../FILE`, as in torchvision's `ImageFolder`.
#
# Classes and files are sorted as in `ImageFolder`, so sample i of the shards is its sample i.


class ImageFile(NamedTuple):
    """One image: its path relative to the source folder, its class, its length in bytes, its mtime."""

    path: str
    label: int
    size: int
    changed_ns: int

    samples = 1

    @property
    def content(self) -> tuple[Any, ...]:
        return self[:3]


class SourceImage(NamedTuple):
    """One image as its source stores it. `place`: for messages. `data`: its bytes, or the error of reading it.
    `suffix`: that of its name, like `.jpg`; "" if the source has no names.
    """

    place: str
    label: int
    data: bytes | Exception
    suffix: str = ""


@dataclass(frozen=True)
class FolderReader:
    """Reads the images of a folder, in any process."""

    folder: str
    how: tuple[Any, ...] = ()

    def read(self, pieces: Sequence[ImageFile]) -> Iterator[SourceImage]:
        for piece in pieces:
            path = Path(self.folder, piece.path)
            try:
                data: bytes | Exception = path.read_bytes()
            except OSError as error:
                data = error
            yield SourceImage(str(path), piece.label, data, path.suffix.lower())


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """A source folder. `passed_over`: number of files whose names are not those of images."""

    reader: FolderReader
    classes: tuple[str, ...]
    pieces: tuple[ImageFile, ...]
    passed_over: int


def list_folder(folder: Path) -> FolderImages:
    """Returns all images of the folder.

    Raises:
        UsageError: there are no classes, or no images.
    """
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give a folder with one folder per class, or tables") from None
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


# --- prepare ----------------------------------------------------------------------------------------------------------


class SourceReader(Protocol):
    """Reads pieces of a source, in any process. `how`: everything, besides the pieces, on which the result depends."""

    @property
    def how(self) -> tuple[Any, ...]: ...

    def read(self, pieces: Any) -> Iterator[SourceImage]: ...


class Images(Protocol):
    """A source of images: the result of `list_folder` or `image_table.list_table`."""

    @property
    def reader(self) -> SourceReader: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def pieces(self) -> Sequence[Piece]: ...


class ImageShardRecord(ShardRecord, frozen=True, kw_only=True):
    """The record of a shard of images. `checked`: all of them were decoded. `samples`: its table (`data/index.py`)."""

    checked: bool = True
    samples: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ImageJob(ShardJob[ImageShardRecord]):
    """The job of making one shard. `first`: the index of its first sample. `check`: decode every image."""

    reader: SourceReader
    first: int
    pieces: tuple[Piece, ...]
    short_side: int
    check: bool = False
    suffix = ".tar"
    samples_are = "images"
    sized_in_samples = True
    record_type = ImageShardRecord

    @property
    def made_from(self) -> str:
        return digest_of([2, self.first, self.short_side, *self.reader.how, self.pieces])

    @property
    def holds(self) -> str:
        contents = [piece.content for piece in self.pieces]
        return digest_of([2, self.first, self.short_side, *self.reader.how, contents])

    @property
    def size(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    def accepts(self, record: ImageShardRecord) -> bool:
        try:
            samples.rows_of(record.samples, record.shard.nsamples)
        except ValueError:
            return False
        return record.checked or not self.check

    def write(self, file: BinaryIO) -> tuple[int, dict[str, Any]] | BadSamples:
        bad = BadSamples()
        rows: list[list[int]] = []
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for number, source in enumerate(self.reader.read(self.pieces), start=self.first):
                try:
                    data, suffix = _image(source, self)
                except Exception as error:  # noqa: BLE001  Pillow raises many kinds
                    bad = bad.plus(f"{source.place}: {error}")
                    continue
                _add(archive, f"{number:09d}{suffix}", data)
                end: int = archive.fileobj.tell()  # pyright: ignore[reportOptionalMemberAccess]
                rows.append([end - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, len(data), source.label])
                rows[-1].append(samples.checksum(data))
                _add(archive, f"{number:09d}.cls", str(source.label).encode())
        if bad.number:
            return bad
        table = samples.to_bytes(np.array(rows, dtype=np.int64))
        return self.size, {"checked": self.check, "samples": table}


def prepare(
    source: Images,
    url: str,
    *,
    shard_bytes: int,
    short_side: int,
    processes: int,
    begin: Callable[[int], None],
    on_result: Callable[[ShardResult[ImageShardRecord]], None],
    part: Part = WHOLE,
    check: bool = False,
) -> Index | int:
    """Runs phases 2 to 4: makes the shards of `source` at `url`.

    `short_side`: the limit in pixels, 0 to keep the images unchanged. `check`: decode every image. See `make_shards`
    for the other arguments. Returns the index, or the number of shards of other parts that are not finished yet.

    Raises:
        BadSample: some images can't be used; all shards without such images are made.
        ShardError: a table can't be read.
        FarandoleError: a process was killed.
        UsageError: unknown kind of URL, or Pillow or xxHash is not installed.
    """
    require_pillow()
    samples.require_xxhash()
    url = url.rstrip("/")
    jobs = [
        ImageJob(
            reader=source.reader, url=url, name=f"shard-{n:06d}", first=first, pieces=pieces, short_side=short_side,
            check=check,
        )
        for n, (first, pieces) in enumerate(cut(source.pieces, shard_bytes))
    ]  # fmt: skip
    records = make_shards(jobs, url, part, processes=processes, begin=begin, on_result=on_result)
    if isinstance(records, int):
        return records
    table = b"".join(record.samples for record in records)
    put(f"{url}/{samples.NAME}", io.BytesIO(table), by=f".{part.number}")
    index = Index(
        classes=source.classes,
        shardlist=tuple(record.shard for record in records),
        samples=SamplesFile(url=samples.NAME, md5sum=md5_of(io.BytesIO(table))),
    )
    put_index(url, index, part)
    return index


def _image(source: SourceImage, job: ImageJob) -> tuple[bytes, str]:
    """Checks an image, and returns its bytes and the suffix of its name. If it is larger than `short_side`, returns
    the bytes of a resized copy. Raises any error of Pillow for a bad image.
    """
    import PIL.Image

    data = source.data
    if isinstance(data, Exception):
        raise data
    with open_image(data) as image:
        suffix = source.suffix or SUFFIXES[image.format or ""]
        smaller = bool(job.short_side) and min(image.size) > job.short_side
        if job.check or smaller or not ends_as_it_should(data, image.format):
            image.load()
        if not smaller:
            return data, suffix
        width, height = (max(round(extent * job.short_side / min(image.size)), 1) for extent in image.size)
        resized: Any = image.resize((width, height), PIL.Image.Resampling.LANCZOS)
        written = io.BytesIO()
        resized.save(written, image.format, quality=95)
        return written.getvalue(), suffix


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Adds an entry without time and owner: the same files give the same shard, and the same MD5."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
