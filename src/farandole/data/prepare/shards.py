"""`farandole data prepare` makes a folder of shards from a source: of images (`images.py`) or of texts (`tokens.py`).

    1. *list*    the source, in pieces that can be read by themselves
    2. *cut*     the pieces into shards by their lengths: arithmetic, so that a second start cuts the same
    3. *make*    each shard in a process: its file, and then its record, which holds digests of its sources and its MD5.
                 A shard whose record matches and whose MD5 verifies is kept
    4. *index*   the shards, last of all: a folder with an index is complete

Several machines can share phase 3, each with the same source (`Part`): part 2 of 4 makes every fourth shard, from the
second on. A machine writes the records of its shards before it looks for those of the others. So the machine that
finishes last finds all records, and writes the index. If two finish at the same time, both may write it, with the same
content.

Invariants. If any process is killed at any moment, the next start ends with the same bytes, and does not make a
finished shard again. A file that `put` writes exists completely, or not at all. Processes end with the process that
started them. If one is killed, it is an error, and the finished work of the others stays. One error names the first of
all samples that can't be used, and no index is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec
from filelock import FileLock, Timeout

from farandole.data import shared_memory
from farandole.data.cache import filesystem, local_path
from farandole.data.index import INDEX, Shard
from farandole.errors import BadSample, FarandoleError, UsageError

# --- cutting ----------------------------------------------------------------------------------------------------------
#
# A list of pieces is cut into shards by arithmetic, so the same list always gives the same shards.


class Piece(Protocol):
    """An indivisible part of a source: one image, some bytes of a text, some rows of a table.

    Attributes:
        size: the length in bytes, exact or approximate.
        samples: the number of samples.
        content: identifies the piece, with equal values on all machines that have a copy: without its mtime.
    """

    @property
    def size(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def content(self) -> tuple[Any, ...]: ...


class Part(msgspec.Struct, frozen=True):
    """The shards that this machine makes: number `number` of each `total`, counted from 1."""

    number: int = 1
    total: int = 1

    def has(self, shard: int) -> bool:
        """Returns True if the shard of that index, counted from 0, belongs to this part."""
        return shard % self.total == self.number - 1


WHOLE = Part()
_NAMED = 20  # bad samples in one message
P = TypeVar("P", bound=Piece)


def cut(pieces: Sequence[P], shard_bytes: int) -> Iterator[tuple[int, tuple[P, ...]]]:
    """Yields for each shard the index of its first sample, and its pieces, at least one."""
    first, samples, begin, length = 0, 0, 0, 0
    for number, piece in enumerate(pieces):
        if length and length + piece.size > shard_bytes:
            yield first, tuple(pieces[begin:number])
            first, begin, length = samples, number, 0
        length += piece.size
        samples += piece.samples
    yield first, tuple(pieces[begin:])


def samples_of(pieces: Sequence[Piece], shard_bytes: int, part: Part) -> int:
    """Returns the number of samples in the shards of `part`."""
    shards = enumerate(cut(pieces, shard_bytes))
    return sum(piece.samples for n, (_, own) in shards if part.has(n) for piece in own)


def digest_of(values: list[Any]) -> str:
    """Returns the SHA-256, in hex, of values that JSON can encode."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# --- jobs -------------------------------------------------------------------------------------------------------------


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one finished shard: its entry for the index, and digests of its sources.

    `made_from` covers the files' times. `holds` does not, since these differ between copies on several machines.
    """

    shard: Shard
    made_from: str
    holds: str = ""


R = TypeVar("R", bound=ShardRecord)


@dataclass(frozen=True, kw_only=True)
class BadSamples:
    """Samples of one shard that can't be used: their number, and the first of them with the reasons."""

    number: int = 0
    named: tuple[str, ...] = ()

    def plus(self, reason: str) -> BadSamples:
        """Returns these and one more."""
        return BadSamples(number=self.number + 1, named=(*self.named, reason)[:_NAMED])


@dataclass(frozen=True, kw_only=True)
class ShardResult(Generic[R]):
    """The result of one shard. `size`: see `ShardJob`. `is_reused`: it was finished before. If there are bad samples,
    the shard is not made and has no record.
    """

    size: int
    record: R | None = None
    is_reused: bool = False
    bad: BadSamples = field(default_factory=BadSamples)


@dataclass(frozen=True, kw_only=True)
class ShardJob(ABC, Generic[R]):
    """The job of making one shard, as it is sent to a process.

    Attributes:
        url, name: the folder, and the shard's name in it.
        suffix: of the shard's file.
        samples_are: the plural of what a shard holds, for messages.
        sized_in_samples: `size` is the number of samples.
        record_type: the kind of its record.
    """

    url: str
    name: str
    suffix: ClassVar[str]
    samples_are: ClassVar[str]
    sized_in_samples: ClassVar[bool] = False
    record_type: ClassVar[type[Any]]

    @property
    @abstractmethod
    def made_from(self) -> str: ...

    @property
    @abstractmethod
    def holds(self) -> str: ...

    @property
    @abstractmethod
    def size(self) -> int:
        """The amount of the work, as a progress bar counts it."""

    @abstractmethod
    def write(self, file: BinaryIO) -> tuple[int, dict[str, Any]] | BadSamples:
        """Writes the shard's content. Returns the number of samples and the other fields of the record."""

    def accepts(self, record: R) -> bool:
        """Returns True if the record is that of a shard like this one, apart from the digests."""
        del record
        return True

    def written(self, shard: Shard) -> None:
        """Called when the shard's file is complete."""


def make_shards(
    jobs: Sequence[ShardJob[R]],
    url: str,
    part: Part,
    *,
    processes: int,
    begin: Callable[[int], None],
    on_result: Callable[[ShardResult[R]], None],
) -> list[R] | int:
    """Runs phase 3: makes the shards of `part`. Returns the records of all shards, or how many of them other machines
    have not made yet.

    Each process first calls `begin` with this process's id; `on_result` is called with the result of each shard.

    Raises:
        BadSample: some samples can't be used; all shards without such samples are made.
        FarandoleError: a process was killed.
    """
    place, path = filesystem(url)
    place.makedirs(path, exist_ok=True)
    if place.exists(f"{path}/{INDEX}"):
        place.rm_file(f"{path}/{INDEX}")  # an index must describe the shards beside it, which change now
    results = make_all(_make, [job for n, job in enumerate(jobs) if part.has(n)], processes, begin, on_result)
    if number := sum(result.bad.number for result in results):
        named = [each for result in results for each in result.bad.named][:_NAMED]
        more = f"\n  and {number - len(named)} more" if number > len(named) else ""
        of_all = f" of {sum(result.size for result in results)}" if jobs[0].sized_in_samples else ""
        raise BadSample(
            f"{number}{of_all} {jobs[0].samples_are} can't be used; repair or remove them and start again, which keeps "
            f"the shards without them:\n  " + "\n  ".join(named) + more
        )
    own_results = iter(results)
    records = [next(own_results).record if part.has(n) else _of_others(job) for n, job in enumerate(jobs)]
    whole = [record for record in records if record is not None]
    return whole if len(whole) == len(jobs) else len(jobs) - len(whole)


def put_index(url: str, index: msgspec.Struct, part: Part) -> None:
    """Runs phase 4: writes the index."""
    put(f"{url}/{INDEX}", io.BytesIO(msgspec.json.format(msgspec.json.encode(index))), by=f".{part.number}")


def _make(job: ShardJob[R]) -> ShardResult[R]:
    if (record := _finished(job)) is not None:
        return ShardResult(size=job.size, record=record, is_reused=True)
    with tempfile.TemporaryFile() as file:
        written = job.write(file)
        if isinstance(written, BadSamples):
            return ShardResult(size=job.size, bad=written)
        samples, fields = written
        size = file.tell()
        shard = Shard(url=f"{job.name}{job.suffix}", nsamples=samples, filesize=size, md5sum=md5_of(file))
        put(f"{job.url}/{shard.url}", file)
    job.written(shard)
    record = job.record_type(shard=shard, made_from=job.made_from, holds=job.holds, **fields)
    put(f"{job.url}/{job.name}.json", io.BytesIO(msgspec.json.encode(record)))
    return ShardResult(size=job.size, record=record)


def _finished(job: ShardJob[R]) -> R | None:
    """Returns the record if the shard was made from the same files in the same way, and its MD5 verifies; else None."""
    record = _record(job)
    if record is None or record.made_from != job.made_from:
        return None
    files, path = filesystem(job.url)
    try:
        with files.open(f"{path}/{record.shard.url}", "rb") as file:
            return record if md5_of(cast(BinaryIO, file)) == record.shard.md5sum else None
    except FileNotFoundError:
        return None


def _of_others(job: ShardJob[R]) -> R | None:
    """Returns the record if another machine made the shard from equal files, else None. Its maker verified it."""
    record = _record(job)
    return record if record is not None and record.holds == job.holds else None


def _record(job: ShardJob[R]) -> R | None:
    files, path = filesystem(job.url)
    try:
        record = msgspec.json.decode(files.cat_file(f"{path}/{job.name}.json"), type=job.record_type)
        return record if job.accepts(record) else None
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


# --- making -----------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20
_J = TypeVar("_J")
_M = TypeVar("_M")


@contextlib.contextmanager
def alone_at(url: str, part: Part) -> Generator[None]:
    """Makes the folder, and locks the part in it against other processes of this machine. Remote folders have no lock.

    Raises:
        UsageError: another process holds the lock.
    """
    local = local_path(url)
    if local is None:
        yield
        return
    Path(local).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(local, f"prepare.{part.number}-{part.total}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"another `farandole data prepare` is making part {part.number}/{part.total} in {url}; wait for its end"
        ) from None
    try:
        yield
    finally:
        lock.release()


def make_all(
    make: Callable[[_J], _M],
    jobs: Iterable[_J],
    processes: int,
    begin: Callable[[int], None],
    on_result: Callable[[_M], None],
) -> list[_M]:
    """Returns the results of `make` for all jobs, in their order.

    Each process first calls `begin` with this process's id; `on_result` is called with each result when it is done.
    With `processes=1` the jobs run in this process.

    Raises:
        FarandoleError: a process was killed.
        UsageError: the system refuses the resources for several processes.
    """
    if processes == 1:
        return [_reported(make(job), on_result) for job in jobs]
    shared_memory.check("give --processes 1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin, initargs=(os.getpid(),))
    with pool:
        futures = [pool.submit(make, job) for job in jobs]
        try:
            for completed in as_completed(futures):
                on_result(completed.result())
        except BrokenProcessPool:
            raise FarandoleError(
                f"one of the {processes} processes was killed, perhaps because memory ran out; "
                f"start again with fewer --processes, which keeps the finished shards"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _reported(result: _M, on_result: Callable[[_M], None]) -> _M:
    on_result(result)
    return result


def put(url: str, file: Any, by: str = "") -> None:
    """Writes all of `file` to `url`, or nothing. `by`: a suffix that differs between concurrent writers."""
    file.seek(0)
    local = local_path(url)
    if local is None:
        files, path = filesystem(url)
        with files.open(path, "wb") as target:  # an object becomes visible when it is closed
            shutil.copyfileobj(file, target, _BLOCK)
        return
    part = Path(f"{local}{by}.part")
    with part.open("wb") as target:
        shutil.copyfileobj(file, target, _BLOCK)
        target.flush()
        os.fsync(target.fileno())
    os.replace(part, local)


def md5_of(file: Any) -> str:
    """Returns the MD5, in hex, of an open file."""
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
