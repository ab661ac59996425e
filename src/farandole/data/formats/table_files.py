"""Parquet and Arrow files as groups of rows, each of which can be read by itself, from this machine or any URL.

| kind | group | read to count its rows |
| --- | --- | --- |
| Parquet | row group | the file's footer |
| Arrow file ("feather") | record batch | local: its header, since the file is mapped; remote: one column |
| Arrow stream, as in Hugging Face's cache | record batch | its header; it has no table of contents: local only |

Invariant: a group has as many rows as were counted, and columns of the types of the first file, or it is a
`ShardError` that names the file. Arrow itself does not check the offsets of an Arrow file; so they are checked before
a group is used for the first time in a process. A Parquet file's offsets are made here, by decoding it.
Left out: truncating a mapped file while it is read ends the process by SIGBUS, as with any mapping.
Everything is read on the calling thread: Arrow's own threads would read one file object at two positions at once.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from farandole.data.cache import filesystem, local_path
from farandole.data.object_store import reading
from farandole.errors import ShardError, UsageError
from farandole.platform.extras import how_to_install

ENDINGS = (".parquet", ".arrow", ".feather", ".ipc")
_PARQUET, _ARROW = b"PAR1", b"ARROW1"


class TableFile(Protocol):
    """One open file. `rows`: the number of rows of each group. `decoded_bytes`: the size of all columns after decoding,
    from the footer; 0 if nothing has to be decoded.
    """

    schema: Any
    rows: tuple[int, ...]
    decoded_bytes: int

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Returns the group's columns as one `pyarrow.RecordBatch`."""
        ...


def require_pyarrow() -> None:
    """Raises `UsageError` if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise UsageError(f"tables are read with pyarrow, which is not installed: {how_to_install('tables')}")


def files_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Returns the files that `source` names: files, patterns such as `data/train-*.parquet` or folders, sorted.

    Raises:
        UsageError: there are none.
        ShardError: a folder or pattern can't be listed.
    """
    if not isinstance(source, str | os.PathLike):
        if not source:
            raise UsageError("a Table needs at least one file")
        return tuple(file for each in source for file in files_of(each))
    url = os.fspath(source).rstrip("/")
    local = local_path(url)
    if local is not None and os.path.isfile(local):
        return (url,)
    with reading(url):
        store, path = filesystem(url)
        if any(sign in path for sign in "*?["):
            matches = [str(name) for name in store.glob(path)]
        elif not store.isdir(path):
            return (url,)  # if it does not exist, opening it raises
        else:
            matches = [str(name) for name in store.find(path) if str(name).endswith(ENDINGS)]
        names = sorted(name for name in matches if not _hidden(name, path))
    if not names:
        raise UsageError(f"{url} holds no files of {', '.join(ENDINGS)}; name a file, a folder or a pattern")
    return tuple(names if local is not None else (str(store.unstrip_protocol(name)) for name in names))


def _hidden(name: str, under: str) -> bool:
    """Returns True for files that writers leave beside their tables: `_temporary`, `.crc`."""
    return any(part.startswith((".", "_")) for part in name.removeprefix(under).split("/") if part)


def opened(url: str) -> TableFile:
    """Opens the file at `url`. Detects its format by the content, not by the name.

    Raises:
        ShardError: it does not exist, or is neither Parquet nor Arrow.
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
            f"{url} is neither Parquet nor an Arrow file; a remote Arrow stream has no random access: copy it to this "
            f"machine, or write it as an Arrow file"
        )


def _ranged(store: Any) -> bool:
    """Returns True if the store's files take `cache_type`; then each read is one request for just those bytes."""
    kinds = (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)
    return any(fnmatch.fnmatch(kind, pattern) for kind in kinds for pattern in ("s3*", "http*", "gs", "gcs", "abfs*"))


class _Parquet:
    def __init__(self, url: str, source: Any) -> None:
        import pyarrow.parquet as pq

        self.url = url
        self._file = pq.ParquetFile(source, pre_buffer=False)
        self.schema = self._file.schema_arrow
        about = self._file.metadata
        groups = [about.row_group(n) for n in range(about.num_row_groups)]
        self.rows = tuple(group.num_rows for group in groups)
        # the sum over all columns: reading the metadata of one column chunk crashes if its statistics are damaged
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
        self._batches = list(stream)  # views of mapped memory: a kilobyte each, for any content
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
        raise ValueError(f"group {group} has {batch.num_rows} rows, but had {rows} when the file was opened")
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
