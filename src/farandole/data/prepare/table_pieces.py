"""Tables as the source of shards: ranges of rows that processes and machines can read by themselves.

All rows of a file count as equally long, since the real lengths would require reading all of it. So a cut is arithmetic
on the files' lengths and footers. A process that reads a piece decodes whole row groups, those that contain the piece.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from farandole.data.cache import filesystem, local_path
from farandole.data.formats.table_files import ENDINGS, files_of, opened, require_pyarrow
from farandole.data.object_store import reading


class TableRows(NamedTuple):
    """Rows [start, stop) of a file. `path` is relative to the source's folder. `size`: their approximate bytes.
    `changed_ns`: the file's mtime, 0 for remote files.
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
    """A source of tables. `folder` ends with a slash, or is empty. `schema`: the first file's pyarrow schema.
    `passed_over`: number of files in a local folder that are not tables.
    """

    folder: str
    pieces: tuple[TableRows, ...]
    schema: Any
    passed_over: int


def is_table(source: str) -> bool:
    """Returns True if `source` names tables: by its ending, as a pattern, or as a folder that holds tables directly."""
    if source.endswith(ENDINGS) or any(sign in source for sign in "*?["):
        return True
    local = local_path(source)
    if local is None:
        return True  # image files and text files must be on this machine
    try:
        return any(name.endswith(ENDINGS) for name in os.listdir(local))
    except OSError:
        return False


def tables(source: str, piece_bytes: int) -> Tables:
    """Returns all rows of the files that `source` names (`formats.table.files_of`), in pieces of about `piece_bytes`.

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
        table = opened(file)
        schema = table.schema if schema is None else schema
        rows = sum(table.rows)
        step = max(rows * piece_bytes // size, 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            about = size * stop // rows - size * start // rows
            pieces.append(TableRows(file.removeprefix(folder), start, stop, about, changed_ns))
    local = local_path(source)
    total = sum(len(names) for _, _, names in os.walk(local)) if local is not None else 0
    return Tables(folder, tuple(pieces), schema, max(total - len(files), 0))


def read(
    folder: str, pieces: Sequence[TableRows], columns: Sequence[str]
) -> Iterator[tuple[TableRows, int, dict[str, Any]]]:
    """Yields (piece, row, values) for each row of the pieces: its number in the file, its undecoded values by column.

    Raises:
        UsageError: a file has no such column.
        ShardError: it can't be read.
    """
    from farandole.data.formats.table import Table  # imports torch, which folders of images and texts do not need

    for path, of_file in groupby(pieces, lambda piece: piece.path):
        table = Table(folder + path, columns, decode=False, memory_bytes=1 << 62)  # keeps all groups of the pieces
        for piece in of_file:
            for row in range(piece.start, piece.stop):
                yield piece, row, table[row]


def _shared(files: Sequence[str]) -> str:
    """Returns the folder that all files have in common, with a slash at its end; "" if there is none."""
    folders = zip(*(file.split("/")[:-1] for file in files), strict=False)
    return "".join(f"{names[0]}/" for names in takewhile(lambda names: len(set(names)) == 1, folders))


def _stat(file: str) -> tuple[int, int]:
    local = local_path(file)
    with reading(file):
        if local is not None:
            status = os.stat(local)
            return max(status.st_size, 1), status.st_mtime_ns
        store, path = filesystem(file)
        return max(int(store.info(path)["size"]), 1), 0
