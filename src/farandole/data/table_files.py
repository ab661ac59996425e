"""Parquet and Arrow files as groups of rows, each of which can be read by itself, here or from any URL.

| kind | group | what is read to count its rows |
| --- | --- | --- |
| Parquet | row group | the file's footer |
| Arrow file ("feather") | record batch | here, its head, since the file is mapped; elsewhere, one column |
| Arrow stream, as Hugging Face's cache has | record batch | its head; without a table of contents, it must lie here |

Invariant: a group has as many rows as were counted, and columns of the types that the first file has, or it is a
`ShardError` that names the file. Offsets of an Arrow file, which Arrow itself believes, are checked before a group is
used for the first time in a process; a Parquet file's are made here, by decoding it.
Left out: a mapped file that somebody cuts off while it is read ends the process by SIGBUS, as with any mapping.
Everything is read on the thread that asks: Arrow's own threads would read one file object at two places at once.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from farandole.data.cache import filesystem, local_path
from farandole.data.remote import reading
from farandole.errors import ShardError, UsageError
from farandole.platform.extras import how_to_install

ENDINGS = (".parquet", ".arrow", ".feather", ".ipc")
_PARQUET, _ARROW = b"PAR1", b"ARROW1"


class TableFile(Protocol):
    """One open file. `rows`: how many each group has. `decoded_bytes`: what all columns take once they
    are decoded, by the footer; 0 where nothing has to be decoded.
    """

    schema: Any
    rows: tuple[int, ...]
    decoded_bytes: int

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """The group's columns as one `pyarrow.RecordBatch`."""
        ...


def require_pyarrow() -> None:
    """Raises `UsageError` where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise UsageError(f"tables are read with pyarrow, which is not installed: {how_to_install('tables')}")


def files_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The files that `source` names: themselves, a pattern such as `data/train-*.parquet`, or a folder's, sorted.

    Raises:
        UsageError: none.
        ShardError: a place that can't be listed.
    """
    if not isinstance(source, str | os.PathLike):
        if not source:
            raise UsageError("a Table of no files; name at least one")
        return tuple(file for each in source for file in files_of(each))
    url = os.fspath(source).rstrip("/")
    local = local_path(url)
    if local is not None and os.path.isfile(local):
        return (url,)
    with reading(url):
        store, path = filesystem(url)
        if any(sign in path for sign in "*?["):
            found = [str(name) for name in store.glob(path)]
        elif not store.isdir(path):
            return (url,)  # if it is not there, that is said where it is opened
        else:
            found = [str(name) for name in store.find(path) if str(name).endswith(ENDINGS)]
        names = sorted(name for name in found if not _hidden(name, path))
    if not names:
        raise UsageError(f"{url} holds no files of {', '.join(ENDINGS)}; name a file, a folder or a pattern")
    return tuple(names if local is not None else (str(store.unstrip_protocol(name)) for name in names))


def _hidden(name: str, under: str) -> bool:
    """What writers leave beside their tables: `_temporary`, `.crc`."""
    return any(part.startswith((".", "_")) for part in name.removeprefix(under).split("/") if part)


def opened(url: str) -> TableFile:
    """The file at `url`, by what it holds, whatever its name.

    Raises:
        ShardError: it is not there, or neither Parquet nor Arrow.
    """
    import pyarrow as pa

    local = local_path(url)
    with reading(url):
        if local is not None:
            with open(local, "rb") as file:
                head = file.read(len(_ARROW))
            if head.startswith(_PARQUET):
                return _Parquet(url, pa.OSFile(local))
            source = pa.memory_map(local)
            return _ArrowFile(url, source, mapped=True) if head == _ARROW else _ArrowStream(url, source)
        store, path = filesystem(url)
        file = store.open(path, "rb", cache_type="none") if _ranged(store) else store.open(path, "rb")
        head = file.read(len(_ARROW))
        file.seek(0)
        if head.startswith(_PARQUET):
            return _Parquet(url, pa.PythonFile(file, mode="r"))
        if head == _ARROW:
            return _ArrowFile(url, pa.PythonFile(file, mode="r"), mapped=False)
        raise ShardError(
            f"{url} is neither Parquet nor an Arrow file; an Arrow stream can't be read at random from elsewhere: copy "
            f"it to this machine, or write it as a file"
        )


def _ranged(store: Any) -> bool:
    """Whether its files take `cache_type`: each read is then one request for just that."""
    kinds = (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)
    return any(fnmatch.fnmatch(kind, known) for kind in kinds for known in ("s3*", "http*", "gs", "gcs", "abfs*"))


class _Parquet:
    def __init__(self, url: str, source: Any) -> None:
        import pyarrow.parquet as pq

        self.url = url
        self._file = pq.ParquetFile(source, pre_buffer=False)
        self.schema = self._file.schema_arrow
        about = self._file.metadata
        groups = [about.row_group(n) for n in range(about.num_row_groups)]
        self.rows = tuple(group.num_rows for group in groups)
        # of all columns together: to look at one chunk of a column ends the process, where its statistics are damaged
        self.decoded_bytes = sum(group.total_byte_size for group in groups)

    def read(self, group: int, columns: Sequence[str]) -> Any:
        with reading(self.url):
            table = self._file.read_row_group(group, columns=list(columns), use_threads=False)
            return _whole(table, self.rows[group], columns)


class _ArrowFile:
    decoded_bytes = 0

    def __init__(self, url: str, source: Any, *, mapped: bool) -> None:
        import pyarrow as pa

        self.url = url
        self._file = pa.ipc.open_file(source)
        self.schema = self._file.schema
        self._checked: set[int] = set()
        counted = self._file if mapped else pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[0]))
        self.rows = tuple(counted.get_batch(n).num_rows for n in range(counted.num_record_batches))

    def read(self, group: int, columns: Sequence[str]) -> Any:
        with reading(self.url):
            return _checked(self._file.get_batch(group), group, self._checked, self.rows[group], columns)


class _ArrowStream:
    decoded_bytes = 0

    def __init__(self, url: str, source: Any) -> None:
        import pyarrow as pa

        self.url = url
        stream = pa.ipc.open_stream(source)
        self.schema = stream.schema
        self._checked: set[int] = set()
        self._batches = list(stream)  # of mapped memory: a kilobyte each, whatever is in it
        self.rows = tuple(batch.num_rows for batch in self._batches)

    def read(self, group: int, columns: Sequence[str]) -> Any:
        with reading(self.url):
            return _checked(self._batches[group], group, self._checked, self.rows[group], columns)


def _checked(batch: Any, group: int, checked: set[int], rows: int, columns: Sequence[str]) -> Any:
    batch = batch.select(list(columns))
    if group not in checked:
        batch.validate(full=True)
        checked.add(group)
    if batch.num_rows != rows:
        raise ValueError(f"group {group} has {batch.num_rows} rows, and had {rows} when the file was opened")
    return batch


def _whole(table: Any, rows: int, columns: Sequence[str]) -> Any:
    import pyarrow as pa

    if table.num_rows != rows:
        raise ValueError(f"a row group has {table.num_rows} rows where the footer says {rows}")
    table = table.select(list(columns)).combine_chunks()
    arrays = [
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else pa.array([], column.type)
        for column in table.columns
    ]
    return pa.record_batch(arrays, schema=table.schema)
