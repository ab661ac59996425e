"""`farandole data prepare` makes a folder of shards from images.

    1. *list*    the images of a folder (section "image folder") or of tables (`image_table.py`), in the source's order
    2. *cut*     the list into shards by its pieces' lengths: arithmetic, so that a second start cuts the same
    3. *make*    each shard in a process: its tar, and then its record, which holds a digest of its sources and its MD5.
                 A shard whose record matches and whose MD5 verifies is kept
    4. *index*   the shards, last of all: a folder with an index is complete

Several machines may share phase 3, each with the same source (`Part`): part 2 of 4 makes every fourth shard, from the
second on. A machine writes the records of its shards before it looks for those of the others. So the machine that
finishes last finds all records, and writes the index. If two finish at the same time, both may write it, with the same
content.

Invariant: if any process is killed at any moment, the next start ends with the same bytes, and does not make a finished
shard again. Every image is checked here, so that a bad one is found now and not during training: its header and its
end, which a truncated image lacks. An image is decoded completely if its end is not that of its format, or with
`check`. (To decode all of them takes twice the CPU.) One error names all bad images, and no index is written.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import msgspec
import numpy as np

from farandole.data import index as samples
from farandole.data.decoding import IMAGES, SUFFIXES, ends_as_it_should, open_image, require_pillow
from farandole.data.index import INDEX, Index, SamplesFile, Shard
from farandole.data.object_store import filesystem
from farandole.data.prepare.shards import (
    WHOLE,
    Part,
    Piece,
    cut,
    digest_of,
    make_all,
    md5_of,
    put,
)
from farandole.errors import BadSample, UsageError

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

_NAMED = 20  # bad images in one message


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


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """The job of making one shard, as it is sent to a process. `first`: the index of its first sample. `check`: decode
    every image.
    """

    reader: SourceReader
    url: str
    name: str
    first: int
    pieces: tuple[Piece, ...]
    short_side: int
    check: bool = False

    @property
    def made_from(self) -> str:
        return digest_of([2, self.first, self.short_side, *self.reader.how, self.pieces])

    @property
    def holds(self) -> str:
        contents = [piece.content for piece in self.pieces]
        return digest_of([2, self.first, self.short_side, *self.reader.how, contents])

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)


class ImageShardRecord(msgspec.Struct, frozen=True):
    """The record of one finished shard: its entry for the index, and digests of its sources. `made_from` covers the
    files' times; `holds` does not, since these differ between copies on several machines. `checked`: all its images
    were decoded. `samples`: its table (`data/index.py`).
    """

    shard: Shard
    made_from: str
    holds: str = ""
    checked: bool = True
    samples: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ImageShard:
    """The result of one shard. `bad`: the bad images, with the reasons; if there are any, the shard is not made.
    `kept`: it was finished before.
    """

    samples: int
    record: ImageShardRecord | None = None
    kept: bool = False
    bad: tuple[str, ...] = ()


def prepare(
    source: Images,
    url: str,
    *,
    shard_bytes: int,
    short_side: int,
    processes: int,
    begin: Callable[[int], None],
    made: Callable[[ImageShard], None],
    part: Part = WHOLE,
    check: bool = False,
) -> Index | int:
    """Runs phases 2 to 4: makes the shards of `source` at `url`.

    `short_side`: the limit in pixels, 0 to keep the images unchanged. `check`: decode every image.

    Each process first calls `begin` with this process's id; `made` is called with the result of each shard. Returns the
    index, or the number of shards of other parts that are not finished yet.

    Raises:
        BadSample: some images can't be used; all shards without such images are made.
        ShardError: a table can't be read.
        FarandoleError: a process was killed.
        UsageError: unknown kind of URL, or Pillow or xxHash is not installed.
    """
    require_pillow()
    samples.require_xxhash()
    url = url.rstrip("/")
    place, path = filesystem(url)
    place.makedirs(path, exist_ok=True)
    if place.exists(f"{path}/{INDEX}"):
        place.rm_file(f"{path}/{INDEX}")  # an index must describe the shards beside it, which change now
    jobs = [
        ImageJob(
            reader=source.reader, url=url, name=f"shard-{n:06d}", first=first, pieces=pieces, short_side=short_side,
            check=check,
        )
        for n, (first, pieces) in enumerate(cut(source.pieces, shard_bytes))
    ]  # fmt: skip
    results = make_all(_make, [job for n, job in enumerate(jobs) if part.has(n)], processes, begin, made)
    bad = [each for result in results for each in result.bad]
    if bad:
        checked = sum(result.samples for result in results)
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise BadSample(
            f"{len(bad)} of {checked} images can't be used; repair or remove them and start again, which "
            f"keeps the shards before the first of them:\n  " + "\n  ".join(bad[:_NAMED]) + more
        )
    own_results = iter(results)
    all_records = [next(own_results).record if part.has(n) else _of_others(job) for n, job in enumerate(jobs)]
    records = [record for record in all_records if record is not None]
    if len(records) < len(jobs):
        return len(jobs) - len(records)
    table = b"".join(record.samples for record in records)
    put(f"{url}/{samples.NAME}", io.BytesIO(table), by=f".{part.number}")
    index = Index(
        classes=source.classes,
        shardlist=tuple(record.shard for record in records),
        samples=SamplesFile(url=samples.NAME, md5sum=md5_of(io.BytesIO(table))),
    )
    put(f"{url}/{INDEX}", io.BytesIO(msgspec.json.format(msgspec.json.encode(index))), by=f".{part.number}")
    return index


def _make(job: ImageJob) -> ImageShard:
    if (record := _finished(job)) is not None:
        return ImageShard(samples=job.samples, record=record, kept=True)
    bad: list[str] = []
    rows: list[list[int]] = []
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for number, source in enumerate(job.reader.read(job.pieces), start=job.first):
                try:
                    data, suffix = _image(source, job)
                except Exception as error:  # noqa: BLE001  Pillow raises many kinds
                    bad.append(f"{source.place}: {error}")
                    continue
                _add(archive, f"{number:09d}{suffix}", data)
                end: int = archive.fileobj.tell()  # pyright: ignore[reportOptionalMemberAccess]
                rows.append([end - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, len(data), source.label])
                rows[-1].append(samples.checksum(data))
                _add(archive, f"{number:09d}.cls", str(source.label).encode())
        if bad:
            return ImageShard(samples=job.samples, bad=tuple(bad))
        size = file.tell()
        shard = Shard(url=f"{job.name}.tar", nsamples=job.samples, filesize=size, md5sum=md5_of(file))
        put(f"{job.url}/{shard.url}", file)
    table = samples.to_bytes(np.array(rows, dtype=np.int64))
    record = ImageShardRecord(shard, job.made_from, job.holds, job.check, table)
    put(f"{job.url}/{job.name}.json", io.BytesIO(msgspec.json.encode(record)))
    return ImageShard(samples=job.samples, record=record)


def _finished(job: ImageJob) -> ImageShardRecord | None:
    """Returns the record if the shard was made from the same files in the same way, and its MD5 verifies; else None."""
    files, path = filesystem(job.url)
    record = _record(job)
    if record is None or record.made_from != job.made_from or (job.check and not record.checked):
        return None
    try:
        with files.open(f"{path}/{record.shard.url}", "rb") as file:
            return record if md5_of(cast(BinaryIO, file)) == record.shard.md5sum else None
    except FileNotFoundError:
        return None


def _of_others(job: ImageJob) -> ImageShardRecord | None:
    """Returns the record if another machine made the shard from equal files, else None. Its maker verified it."""
    record = _record(job)
    same = record is not None and record.holds == job.holds and (record.checked or not job.check)
    return record if record is not None and same else None


def _record(job: ImageJob) -> ImageShardRecord | None:
    files, path = filesystem(job.url)
    try:
        record = msgspec.json.decode(files.cat_file(f"{path}/{job.name}.json"), type=ImageShardRecord)
        samples.rows_of(record.samples, record.shard.nsamples)
        return record
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return None


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
