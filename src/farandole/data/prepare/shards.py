"""What all preparations of data share: processes that make shards, files that appear whole, one at work in a place.

Invariants. A file that `put` writes is all there under its name, or is not. Processes end with the one that started
them. One that is killed is an error, and what the others have finished stays.
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
# A list of pieces, cut into shards that are to be made of it: arithmetic, so who cuts the same list has the same.


class Piece(Protocol):
    """What is not cut further: one image, some bytes of a text, some rows of a table.

    Attributes:
        size: in bytes, or about so many.
        samples: how many it holds.
        content: what tells it from another piece, on every machine that has a copy: without the time of its change.
    """

    @property
    def size(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def content(self) -> tuple[Any, ...]: ...


class Part(msgspec.Struct, frozen=True):
    """Which of the shards are made here: of each `of` the one at `number`, from 1 on."""

    number: int = 1
    of: int = 1

    def has(self, shard: int) -> bool:
        return shard % self.of == self.number - 1


WHOLE = Part()
P = TypeVar("P", bound=Piece)


def cut(pieces: Sequence[P], shard_bytes: int) -> Iterator[tuple[int, tuple[P, ...]]]:
    """The number of each shard's first sample, and its pieces, at least one."""
    first, samples, begin, length = 0, 0, 0, 0
    for number, piece in enumerate(pieces):
        if length and length + piece.size > shard_bytes:
            yield first, tuple(pieces[begin:number])
            first, begin, length = samples, number, 0
        length += piece.size
        samples += piece.samples
    yield first, tuple(pieces[begin:])


def samples_of(pieces: Sequence[Piece], shard_bytes: int, part: Part) -> int:
    """How many samples that part's shards hold."""
    return sum(piece.samples for n, (_, its) in enumerate(cut(pieces, shard_bytes)) if part.has(n) for piece in its)


def digest_of(of: list[Any]) -> str:
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()


# --- making -----------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20
_J = TypeVar("_J")
_M = TypeVar("_M")


@contextlib.contextmanager
def alone_at(url: str, part: Part) -> Generator[None]:
    """The folder is there, and nobody else of this machine makes the same part in it; elsewhere nobody is asked.

    Raises:
        UsageError: somebody does.
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
            f"another `farandole data prepare` is at work on part {part.number}/{part.of} in {url}; wait for its end"
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
    """What `make` makes of each job, in their order. Each process first calls `begin` with this process's id; `made`
    hears of each as it is done. One process is this one.

    Raises:
        FarandoleError: a process was killed.
        UsageError: the system refuses what several processes need.
    """
    if processes == 1:
        return [_heard(make(job), made) for job in jobs]
    shared_memory.check("give --processes 1")
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin, initargs=(os.getpid(),))
    with pool:
        futures = [pool.submit(make, job) for job in jobs]
        try:
            for done in as_completed(futures):
                made(done.result())
        except BrokenProcessPool:
            raise FarandoleError(
                f"one of the {processes} processes was killed, perhaps for want of memory; "
                f"start again, which keeps what is finished, with fewer --processes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _heard(result: _M, made: Callable[[_M], None]) -> _M:
    made(result)
    return result


def put(url: str, file: Any, by: str = "") -> None:
    """All of `file` at `url`, or nothing. `by`: who else may be at it has another one."""
    file.seek(0)
    local = local_path(url)
    if local is None:
        files, path = filesystem(url)
        with files.open(path, "wb") as target:  # objects appear when they are closed
            shutil.copyfileobj(file, target, _BLOCK)
        return
    part = Path(f"{local}{by}.part")
    with part.open("wb") as target:
        shutil.copyfileobj(file, target, _BLOCK)
        target.flush()
        os.fsync(target.fileno())
    os.replace(part, local)


def md5_of(file: Any) -> str:
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
