"""Parquet and Arrow files as a map-style dataset: any worker can read any row, from local files or from any URL.

When a `Table` is made, it reads the files' footers and keeps the numbers of rows, nothing else. To read a row, it finds
the row's group (section "table files": row groups, record batches), decodes the group and keeps it in memory, up to
`memory_bytes` of groups in each process. Arrow files of this machine are mapped and not decoded: a row takes 2 us a
column. A Parquet row whose group is not in memory costs the decoding of the whole group. So if the memory can't hold
all decoded files, a shuffled order decodes a group for most rows; a warning states this.

Invariant: row i is row i of the files in their order, in every process; reading a remote file does not change a
sample's random numbers (`object_store.reading`). Each process opens the files itself, because a file's position would
be shared. Left out: writing; predicates; Arrow's extension types except tensors.
"""

from __future__ import annotations

import bisect
import fnmatch
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from farandole.data.cache import filesystem, local_path
from farandole.data.formats import webdataset
from farandole.data.object_store import LruBytes, reading
from farandole.errors import ShardError, UsageError
from farandole.platform.extras import how_to_install

# --- columns ----------------------------------------------------------------------------------------------------------
#
# The Python types of Arrow columns in samples and in micro-batches.
#
# | type | in a sample | in a micro-batch |
# | --- | --- | --- |
# | integer, boolean, float | int, bool, float | tensor of int64, bool, float64; shape `(samples,)` |
# | text, bytes | str, bytes | list, as from `default_collate` |
# | list of numbers, none of them missing | NumPy array of that type | tensor of that type; shape `(samples, length)` |
# | tensor of a fixed shape | NumPy array | as from `default_collate` |
# | image, by Hugging Face's note in the schema | PIL image in RGB | needs the script's `transform` |
# | any other type, or a missing value | Python's type: datetime, list, dict, None | as from `default_collate` |
#
# The right column is what torch's `default_collate` makes of the middle one, bit for bit. For numbers and lists of
# numbers `flat` returns whole groups, from which a micro-batch is taken at once; it returns None if it can't.

Reader = Callable[[Any, int], Any]  # (array, row) -> value
_NOTE = b"huggingface"  # the key that Hugging Face's `datasets` writes into the schema
_IMAGE = "Image"


def feature_of(schema: Any, column: str) -> Mapping[str, Any]:
    """Returns the note of `datasets` about `column`, like `{"_type": "ClassLabel", "names": [...]}`; empty if none."""
    try:
        note: Any = msgspec.json.decode((schema.metadata or {}).get(_NOTE, b"{}"))
        feature = note["info"]["features"][column]
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return {}
    return feature if isinstance(feature, dict) else {}


def reader_of(schema: Any, column: str) -> Reader:
    """Returns the function that reads one value of `column`."""
    import pyarrow as pa

    kind = schema.field(column).type
    if feature_of(schema, column).get("_type") == _IMAGE and pa.types.is_struct(kind):
        return _image
    if _is_list(kind) and _is_number(kind.value_type):
        return _numbers
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor
    return _value


def stackable(schema: Any, column: str) -> bool:
    """Returns True if `flat` supports this column's type: numbers, and lists of them."""
    import pyarrow as pa

    kind = schema.field(column).type
    if reader_of(schema, column) is _numbers:
        return True
    whole = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)  # torch raises an error for values beyond int64
    return whole or pa.types.is_boolean(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)


def flat(array: Any) -> npt.NDArray[Any] | None:
    """Returns a group's `stackable` column as a NumPy array: shape `(rows,)`, or `(rows, length)` for lists.

    It is mostly a view of Arrow's memory. Returns None if values are missing, or lists differ in length.
    """
    import pyarrow as pa

    if array.null_count or not len(array):
        return None
    if not _is_list(array.type):
        return array.to_numpy(zero_copy_only=False)
    values = array.flatten()
    length, rest = divmod(len(values), len(array))
    if values.null_count or rest:
        return None
    if not pa.types.is_fixed_size_list(array.type):
        offsets = array.offsets.to_numpy()
        if not (offsets[1:] - offsets[:-1] == length).all():
            return None
    return values.to_numpy(zero_copy_only=False).reshape(len(array), length)


def empty(like: npt.NDArray[Any], samples: int) -> npt.NDArray[Any]:
    """Returns an empty array for a micro-batch of a column, in the type that `default_collate` gives Python numbers."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.empty((samples, *like.shape[1:]), like.dtype if like.ndim > 1 else kinds[like.dtype.kind])


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    """Returns True for the number types that torch has, too."""
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _value(array: Any, row: int) -> Any:
    return array[row].as_py()


def _numbers(array: Any, row: int) -> Any:
    values = array[row].values
    if values is None:
        return None
    if values.null_count:
        return values.to_pylist()
    return np.array(values.to_numpy(zero_copy_only=False))  # a copy: Arrow's memory is read-only


def _tensor(array: Any, row: int) -> Any:
    scalar = array[row]
    return np.array(scalar.to_numpy()) if scalar.is_valid else None


def _image(array: Any, row: int) -> Any:
    value = array[row].as_py()
    if value is None:
        return None
    data = value.get("bytes")
    if data is None:
        raise ValueError(
            f"an image that is stored outside the table, at {value.get('path')!r}: only images in the table are read"
        )
    return webdataset.image(data)


# --- table files ------------------------------------------------------------------------------------------------------
#
# Parquet and Arrow files as groups of rows, each of which can be read by itself, from this machine or any URL.
#
# | kind | group | read to count its rows |
# | --- | --- | --- |
# | Parquet | row group | the file's footer |
# | Arrow file ("feather") | record batch | local: its header, since the file is mapped; remote: one column |
# | Arrow stream, as in Hugging Face's cache | record batch | its header; it has no table of contents: local only |
#
# Invariant: a group has as many rows as were counted, and columns of the types of the first file, or it is a
# `ShardError` that names the file. Arrow itself does not check the offsets of an Arrow file; so they are checked before
# a group is used for the first time in a process. A Parquet file's offsets are made here, by decoding it.
# Left out: truncating a mapped file while it is read ends the process by SIGBUS, as with any mapping.
# Everything is read on the calling thread: Arrow's own threads would read one file object at two positions at once.

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


# --- table ------------------------------------------------------------------------------------------------------------

_OPEN = 64  # files that one process keeps open
_AT_ONCE = 16  # remote footers that are read in parallel, since each takes a round trip
_MAX_ROWS = 1 << 53
Footer = tuple[Any, tuple[int, ...], int]  # schema, rows of each group, bytes after decoding


class _Group:
    """A group's columns, in the order of `columns`, as Arrow arrays and, on first use, as NumPy arrays (`flat`)."""

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.arrays = arrays

    @functools.cached_property
    def flat(self) -> list[npt.NDArray[Any] | None]:
        return list(map(flat, self.arrays))


class Table(Dataset[Any]):
    """Samples are dicts: column name -> value, of the types in the table of `farandole.data.formats.table`.

    Attributes:
        columns: the names of the columns, in the order of the samples.
        files: paths or URLs of the files, in the order of their rows.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        decode: bool | Mapping[str, Callable[[Any], Any]] = True,
        memory_bytes: int = 1 << 30,
    ) -> None:
        """Reads the files' footers. `source`: a file, a folder, a pattern like `data/train-*.parquet`, or several; each
        a path or a URL that fsspec knows.

        `columns`: the columns to read; default: all. `transform` gets each sample and returns the final one. `decode`:
        `True` decodes images by Hugging Face's note in the schema; a mapping from a column's name to a function of a
        value overrides that; `False` returns values as they are stored. `memory_bytes`: limit of decoded rows in each
        process.

        Raises:
            UsageError: pyarrow is not installed; there are no files, no such column, or the files differ in one.
            ShardError: a file does not exist, can't be read, or is neither Parquet nor Arrow.
        """
        require_pyarrow()
        self.files = files_of(source)
        self.transform = transform
        self._decode = decode if isinstance(decode, bool) else dict(decode)
        self._memory_bytes = memory_bytes
        self._reset()
        decoded = self._count(columns)
        if decoded > memory_bytes:
            warnings.warn(
                f"all columns of {self.files[0]} and the others decode to {decoded} bytes, and memory_bytes is "
                f"{memory_bytes}: if the columns that are read don't fit, most samples of a shuffled order decode a "
                f"whole row group; raise memory_bytes, which each loader process takes, name fewer columns, or store "
                f"the data as Arrow files, which are mapped and not decoded",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Returns a sample. Raises `IndexError` if out of range, `ShardError` without the file, and decoder errors."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index %= length
        group = bisect.bisect_right(self._ends, index)
        arrays, row = self._group(group).arrays, index - self._begin(group)
        sample = {name: read(array, row) for (name, read), array in zip(self._read_by(), arrays, strict=True)}
        return sample if self.transform is None else self.transform(sample)

    @property
    def gather(self) -> Callable[[npt.NDArray[np.int64]], dict[str, Any]]:
        """The function that makes whole micro-batches from sample indexes, int64 of shape `(samples,)`: the same result
        as `default_collate`, without making the samples.

        It exists only if samples draw no random numbers: without `transform` and functions in `decode`, and if all
        columns are numbers or lists of numbers. Otherwise raises `AttributeError`.
        """
        plain = self.transform is None and isinstance(self._decode, bool)
        if not plain or not all(stackable(self._schema, name) for name in self.columns):
            raise AttributeError("gather: this table's samples have to be made one by one")
        return self._gather

    def class_names(self, column: str) -> tuple[str, ...]:
        """Returns the class names of a label column, from the note of Hugging Face's `datasets`; empty if none."""
        names = feature_of(self._schema, column).get("names")
        return tuple(map(str, names)) if isinstance(names, list) else ()  # pyright: ignore[reportUnknownArgumentType]

    def __getstate__(self) -> dict[str, Any]:
        fresh = {
            "_opened": None,
            "_groups": None,
            "_readers": None,
            "_process": 0,
        }  # each process has its own
        return {**self.__dict__, **fresh}

    # --- construction -----------------------------------------------------------------------------------------

    def _count(self, columns: Sequence[str] | None) -> int:
        """Reads the places of all rows from the footers; returns the number of bytes after decoding."""
        ends: list[int] = []
        self._places: list[tuple[int, int]] = []  # file and group within it, by the number of a group
        decoded = 0
        for number, (schema, rows, size) in enumerate(self._footers()):
            if number == 0:
                self._schema, self.columns = schema, tuple(schema.names if columns is None else columns)
            self._compare(self.files[number], schema)
            decoded += size
            for group, count in enumerate(rows):
                if not 0 <= count <= _MAX_ROWS:
                    raise ShardError(f"{self.files[number]} states that a group has {count} rows; it is damaged")
                self._places.append((number, group))
                ends.append(count)
        self._ends = list(accumulate(ends))
        if not ends or self._ends[-1] == 0:
            raise UsageError(f"{self.files[0]} and the others hold no rows; name files that do")
        return decoded

    def _footers(self) -> list[Footer]:
        if all(local_path(file) is not None for file in self.files):
            return list(map(_footer, self.files))
        with (
            reading(self.files[0]),
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):  # once around all threads: they share the random state that `reading` restores
            return list(pool.map(_footer, self.files))

    def _compare(self, file: str, schema: Any) -> None:
        """Raises `UsageError` if the columns of `file` differ from those of the first one."""
        if len(set(self.columns)) != len(self.columns) or not self.columns:
            raise UsageError(f"columns {list(self.columns)} of {file}: give each once, and at least one")
        for name in self.columns:
            if schema.names.count(name) != 1:
                raise UsageError(f"{file} has no column {name!r}; it has {', '.join(map(repr, schema.names))}")
            first, kind = self._schema.field(name).type, schema.field(name).type
            if first != kind:
                raise UsageError(
                    f"column {name!r} is {first} in {self.files[0]} and {kind} in {file}; name files of equal types"
                )

    # --- in each process --------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._opened: OrderedDict[int, TableFile] = OrderedDict()
        self._groups: LruBytes[_Group] = LruBytes(self._memory_bytes)
        self._readers: list[tuple[str, Reader]] | None = None
        self._process = os.getpid()

    def _begin(self, group: int) -> int:
        return self._ends[group - 1] if group else 0

    def _group(self, group: int) -> _Group:
        if self._process != os.getpid():
            self._reset()
        loaded = self._groups.get(group)
        if loaded is not None:
            return loaded
        number, within = self._places[group]
        batch = self._file(number).read(within, self.columns)
        rows = self._ends[group] - self._begin(group)
        if batch.num_rows != rows or any(field.type != self._schema.field(field.name).type for field in batch.schema):
            raise ShardError(f"{self.files[number]} has changed since this Table was made; make a new Table")
        return self._groups.put(group, _Group(tuple(batch.columns)), batch.nbytes)

    def _file(self, number: int) -> TableFile:
        file = self._opened.get(number)
        if file is None:
            if len(self._opened) >= _OPEN:
                self._opened.popitem(last=False)
            file = self._opened[number] = opened(self.files[number])
        self._opened.move_to_end(number)
        return file

    def _read_by(self) -> list[tuple[str, Reader]]:
        if self._readers is None:
            functions = {} if isinstance(self._decode, bool) else self._decode
            plain = self._schema.remove_metadata() if self._decode is False else self._schema
            self._readers = [
                (name, _through(functions[name]) if name in functions else reader_of(plain, name))
                for name in self.columns
            ]
        return self._readers

    def _gather(self, samples: npt.NDArray[np.int64]) -> dict[str, Any]:
        groups = np.searchsorted(np.array(self._ends, dtype=np.int64), samples, side="right")
        batch: dict[str, npt.NDArray[Any]] = {}
        for group in np.unique(groups).tolist():
            positions = np.flatnonzero(groups == group)
            rows = samples[positions] - self._begin(group)
            for name, column in zip(self.columns, self._group(group).flat, strict=True):
                if column is not None and name not in batch:
                    batch[name] = empty(column, len(samples))
                if column is None or batch[name].shape[1:] != column.shape[1:]:  # let `default_collate` decide
                    return default_collate([self[sample] for sample in samples.tolist()])
                batch[name][positions] = column[rows]
        return {name: torch.from_numpy(column) for name, column in batch.items()}


def _footer(file: str) -> Footer:
    table_file = opened(file)
    with reading(file):
        _ = table_file.schema.names  # raises here if the names are not valid text
    return table_file.schema, table_file.rows, table_file.decoded_bytes


def _through(function: Callable[[Any], Any]) -> Reader:
    return lambda array, row: function(array[row].as_py())
