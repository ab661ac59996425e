"""An image folder becomes a folder of shards: `farandole data prepare`.

    1. *list*    the folder: `SOURCE/CLASS/.../FILE`, classes and files sorted as torchvision's ImageFolder sorts them,
                 so that sample i is its sample i
    2. *cut*     the list into shards by the files' lengths: arithmetic, so that a second start cuts the same
    3. *make*    each shard in a process: its tar, and then its record, which says from what it was made and what its
                 MD5 is. A shard whose record fits and whose MD5 verifies is kept
    4. *index*   the shards, last of all: a folder with an index is whole

Invariant: whatever is killed at any moment, the next start ends with the same bytes, and a shard that was finished is
not made again. Every image is decoded once here, so that a bad one shows now and not in the middle of a training: all
of them are named together, and no index is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from farandole.data.cache import filesystem, local_path
from farandole.data.decoding import IMAGES, open_image, require_pillow
from farandole.data.index import INDEX, Index, Shard
from farandole.errors import BadSample, FarandoleError, UsageError

_NAMED = 20  # bad files in one message
_BLOCK = 1 << 20


class Source(NamedTuple):
    """One image: its path under the source folder, its class, its length in bytes, when it was changed."""

    path: str
    label: int
    size: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A source folder. `passed_over`: files that are no images by their names."""

    folder: str
    classes: tuple[str, ...]
    files: tuple[Source, ...]
    passed_over: int


class Record(msgspec.Struct, frozen=True):
    """Of one finished shard: what the index will say of it, and a digest of what it was made from."""

    shard: Shard
    made_from: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard to make, as it is sent to a process. `first`: the number of its first sample."""

    folder: str
    url: str
    name: str
    first: int
    files: tuple[Source, ...]
    short_side: int

    @property
    def made_from(self) -> str:
        return hashlib.sha256(json.dumps([1, self.first, self.short_side, self.files]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Made:
    """What became of one shard. `bad`: files that are no images and why; where there are any there is no shard."""

    files: int
    shard: Shard | None = None
    kept: bool = False
    bad: tuple[str, ...] = ()


def listing(folder: Path) -> Listing:
    """Phase 1.

    Raises:
        UsageError: no classes, or no images.
    """
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give a folder of one folder a class") from None
    files: list[Source] = []
    passed_over = 0
    for label, name in enumerate(classes):
        for root, _, names in sorted(os.walk(folder / name, followlinks=True)):
            for file in sorted(names):
                path = Path(root, file)
                if not file.lower().endswith(IMAGES):
                    passed_over += 1
                    continue
                stat = path.stat()
                files.append(Source(str(path.relative_to(folder)), label, stat.st_size, stat.st_mtime_ns))
    if not files:
        raise UsageError(f"{folder} holds no images as CLASS/FILE.jpg; the folder that holds the classes is needed")
    return Listing(folder=str(folder), classes=tuple(classes), files=tuple(files), passed_over=passed_over)


def cut(files: Sequence[Source], shard_bytes: int) -> Iterator[tuple[int, tuple[Source, ...]]]:
    """Phase 2: the number of each shard's first sample, and its files, at least one."""
    first, length = 0, 0
    for number, file in enumerate(files):
        if length and length + file.size > shard_bytes:
            yield first, tuple(files[first:number])
            first, length = number, 0
        length += file.size
    yield first, tuple(files[first:])


def prepare(
    source: Listing,
    url: str,
    *,
    shard_bytes: int,
    short_side: int,
    processes: int,
    begin: Callable[[int], None],
    made: Callable[[Made], None],
) -> Index:
    """Phases 2 to 4: the shards of `source` at `url`. `short_side`: in pixels, 0 to leave the images as they are.

    Each process first calls `begin` with this process's id; `made` hears of each shard.

    Raises:
        BadSample: files that are no images; all shards without them are made.
        FarandoleError: a process was killed.
        UsageError: no such place, or Pillow is not installed.
    """
    require_pillow()
    url = url.rstrip("/")
    place, path = filesystem(url)
    place.makedirs(path, exist_ok=True)
    if place.exists(f"{path}/{INDEX}"):
        place.rm_file(f"{path}/{INDEX}")  # while it is there, the shards are what it says
    jobs = [
        Job(folder=source.folder, url=url, name=f"shard-{n:06d}", first=first, files=files, short_side=short_side)
        for n, (first, files) in enumerate(cut(source.files, shard_bytes))
    ]
    results = _make_all(jobs, processes, begin, made)
    bad = [file for result in results for file in result.bad]
    if bad:
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise BadSample(
            f"{len(bad)} of {len(source.files)} files can't be decoded; mend or remove them and start again, which "
            f"keeps the shards before the first of them:\n  " + "\n  ".join(bad[:_NAMED]) + more
        )
    shards = tuple(result.shard for result in results if result.shard is not None)
    index = Index(classes=source.classes, shardlist=shards)
    _put(f"{url}/{INDEX}", io.BytesIO(msgspec.json.format(msgspec.json.encode(index))))
    return index


def _make_all(
    jobs: Iterable[Job], processes: int, begin: Callable[[int], None], made: Callable[[Made], None]
) -> list[Made]:
    """Phase 3, in the order of the jobs."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin, initargs=(os.getpid(),))
    with pool:
        futures = [pool.submit(_make, job) for job in jobs]
        try:
            for done in as_completed(futures):
                made(done.result())
        except BrokenProcessPool:
            raise FarandoleError(
                f"one of the {processes} processes was killed, perhaps for want of memory; "
                f"start again, which keeps the finished shards, with fewer --processes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _make(job: Job) -> Made:
    if (shard := _finished(job)) is not None:
        return Made(files=len(job.files), shard=shard, kept=True)
    bad: list[str] = []
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for number, source in enumerate(job.files, start=job.first):
                try:
                    data = _image(Path(job.folder, source.path), job.short_side)
                except Exception as error:  # noqa: BLE001  Pillow raises many kinds
                    bad.append(f"{Path(job.folder, source.path)}: {error}")
                    continue
                _add(archive, f"{number:09d}{Path(source.path).suffix.lower()}", data)
                _add(archive, f"{number:09d}.cls", str(source.label).encode())
        if bad:
            return Made(files=len(job.files), bad=tuple(bad))
        size = file.tell()
        shard = Shard(url=f"{job.name}.tar", nsamples=len(job.files), filesize=size, md5sum=_md5(file))
        _put(f"{job.url}/{shard.url}", file)
    _put(f"{job.url}/{job.name}.json", io.BytesIO(msgspec.json.encode(Record(shard, job.made_from))))
    return Made(files=len(job.files), shard=shard)


def _finished(job: Job) -> Shard | None:
    """The shard, if it was made from the same files in the same way and is as it was written."""
    files, path = filesystem(job.url)
    try:
        record = msgspec.json.decode(files.cat_file(f"{path}/{job.name}.json"), type=Record)
        if record.made_from != job.made_from:
            return None
        with files.open(f"{path}/{record.shard.url}", "rb") as file:
            return record.shard if _md5(cast(BinaryIO, file)) == record.shard.md5sum else None
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _image(path: Path, short_side: int) -> bytes:
    """The file's bytes, once they have been seen to decode; those of a smaller copy where it is to be smaller."""
    import PIL.Image

    data = path.read_bytes()
    with open_image(data) as image:
        image.load()
        if not short_side or min(image.size) <= short_side:
            return data
        width, height = (max(round(extent * short_side / min(image.size)), 1) for extent in image.size)
        smaller: Any = image.resize((width, height), PIL.Image.Resampling.LANCZOS)
        written = io.BytesIO()
        smaller.save(written, image.format, quality=95)
        return written.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Without time and owner: the same files give the same shard, and the same MD5."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _put(url: str, file: Any) -> None:
    """All of `file` at `url`, or nothing."""
    file.seek(0)
    local = local_path(url)
    if local is None:
        files, path = filesystem(url)
        with files.open(path, "wb") as target:  # objects appear when they are closed
            shutil.copyfileobj(file, target, _BLOCK)
        return
    part = Path(f"{local}.part")
    with part.open("wb") as target:
        shutil.copyfileobj(file, target, _BLOCK)
        target.flush()
        os.fsync(target.fileno())
    os.replace(part, local)


def _md5(file: Any) -> str:
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
