"""Shared code of all preparations of data: processes that make shards, atomic writes, one command per folder.

Invariants. A file that `put` writes exists completely, or not at all. Processes end with the process that started them.
If one is killed, it is an error, and the finished work of the others stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from filelock import FileLock, Timeout

from farandole.data import shared_memory
from farandole.data.cache import filesystem, local_path
from farandole.errors import FarandoleError, UsageError

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
    """The shards that this machine makes: number `number` of each `of`, counted from 1."""

    number: int = 1
    of: int = 1

    def has(self, shard: int) -> bool:
        """Returns True if the shard of that index, counted from 0, belongs to this part."""
        return shard % self.of == self.number - 1


WHOLE = Part()
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
    lock = FileLock(Path(local, f"prepare.{part.number}-{part.of}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"another `farandole data prepare` is making part {part.number}/{part.of} in {url}; wait for its end"
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
    made: Callable[[_M], None],
) -> list[_M]:
    """Returns the results of `make` for all jobs, in their order.

    Each process first calls `begin` with this process's id; `made` is called with each result when it is done. With
    `processes=1` the jobs run in this process.

    Raises:
        FarandoleError: a process was killed.
        UsageError: the system refuses the resources for several processes.
    """
    if processes == 1:
        return [_reported(make(job), made) for job in jobs]
    shared_memory.check("give --processes 1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin, initargs=(os.getpid(),))
    with pool:
        futures = [pool.submit(make, job) for job in jobs]
        try:
            for done in as_completed(futures):
                made(done.result())
        except BrokenProcessPool:
            raise FarandoleError(
                f"one of the {processes} processes was killed, perhaps because memory ran out; "
                f"start again with fewer --processes, which keeps the finished shards"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _reported(result: _M, made: Callable[[_M], None]) -> _M:
    made(result)
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
