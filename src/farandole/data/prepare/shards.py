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
from itertools import groupby, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from filelock import FileLock, Timeout

from farandole.data import workers
from farandole.data.cache import filesystem, local_path
from farandole.data.formats.table import ENDINGS, files_of, opened, require_pyarrow
from farandole.data.object_store import reading
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
    workers.check("give --processes 1")
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


# --- table pieces -----------------------------------------------------------------------------------------------------
#
# Tables as the source of shards: runs of rows that processes and machines can read by themselves.
#
# A file's rows count as equally long, since to know better all of it would have to be read. So a cut is arithmetic on
# the files' lengths and footers. A process that reads a piece decodes the row groups in which it lies, whole.


class TableRows(NamedTuple):
    """Rows [start, stop) of a file, its path being that under the source's folder. `size`: about their bytes.
    `changed_ns`: 0 of files elsewhere.
    """

    path: str
    start: int
    stop: int
    size: int
    changed_ns: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def content(self) -> tuple[Any, ...]:
        return self[:4]


class Tables(NamedTuple):
    """`folder` ends with a slash, or is nothing. `schema`: the first file's, as pyarrow has it. `passed_over`: files of
    a named folder that are no tables by their names.
    """

    folder: str
    pieces: tuple[TableRows, ...]
    schema: Any
    passed_over: int


def is_table(source: str) -> bool:
    """Whether `source` names tables: by its ending, as a pattern, or as a folder whose own files are tables."""
    if source.endswith(ENDINGS) or any(sign in source for sign in "*?["):
        return True
    local = local_path(source)
    if local is None:
        return True  # images and texts are read where they lie, on this machine
    try:
        return any(name.endswith(ENDINGS) for name in os.listdir(local))
    except OSError:
        return False


def tables(source: str, piece_bytes: int) -> Tables:
    """All rows of the files that `source` names (`table_files.files_of`), in pieces of about `piece_bytes`.

    Raises:
        UsageError: pyarrow is not installed, or there are no such files.
        ShardError: a file can't be read.
    """
    require_pyarrow()
    files = files_of(source)
    folder = _shared(files)
    pieces: list[TableRows] = []
    schema: Any = None
    for file in files:
        size, changed_ns = _stat(file)
        its = opened(file)
        schema = its.schema if schema is None else schema
        rows = sum(its.rows)
        step = max(rows * piece_bytes // size, 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            about = size * stop // rows - size * start // rows
            pieces.append(TableRows(file.removeprefix(folder), start, stop, about, changed_ns))
    local = local_path(source)
    there = sum(len(names) for _, _, names in os.walk(local)) if local is not None else 0
    return Tables(folder, tuple(pieces), schema, max(there - len(files), 0))


def read(folder: str, pieces: Sequence[TableRows], columns: Sequence[str]) -> Iterator[tuple[TableRows, int, dict[str, Any]]]:
    """Each row of the pieces, as `Table` has it without decoding, after its piece and its number in the file.

    Raises:
        UsageError: a file has no such column.
        ShardError: it can't be read.
    """
    from farandole.data.formats.table import Table  # with torch, which folders of images and texts do without

    for path, its in groupby(pieces, lambda piece: piece.path):
        table = Table(folder + path, columns, decode=False, memory_bytes=1 << 62)  # as much as the pieces lie in
        for piece in its:
            for row in range(piece.start, piece.stop):
                yield piece, row, table[row]


def _shared(files: Sequence[str]) -> str:
    """The folder that all have in common, with a slash at its end; nothing, if there is none."""
    folders = zip(*(file.split("/")[:-1] for file in files), strict=False)
    return "".join(f"{names[0]}/" for names in takewhile(lambda names: len(set(names)) == 1, folders))


def _stat(file: str) -> tuple[int, int]:
    local = local_path(file)
    with reading(file):
        if local is not None:
            found = os.stat(local)
            return max(found.st_size, 1), found.st_mtime_ns
        store, path = filesystem(file)
        return max(int(store.info(path)["size"]), 1), 0
