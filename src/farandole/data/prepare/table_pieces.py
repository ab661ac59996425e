"""Tables as the source of shards: runs of rows that processes and machines can read by themselves.

A file's rows count as equally long, since to know better all of it would have to be read. So a cut is arithmetic on
the files' lengths and footers. A process that reads a piece decodes the row groups in which it lies, whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from farandole.data.cache import filesystem, local_path
from farandole.data.formats.table import ENDINGS, files_of, opened, require_pyarrow
from farandole.data.object_store import reading


class TableRows(NamedTuple):
    """TableRows [start, stop) of a file, its path being that under the source's folder. `size`: about their bytes.
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


def read(
    folder: str, pieces: Sequence[TableRows], columns: Sequence[str]
) -> Iterator[tuple[TableRows, int, dict[str, Any]]]:
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
