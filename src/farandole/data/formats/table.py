"""Parquet and Arrow files as a map-style dataset: any worker reaches any row, here or at any URL, where the files lie.

When a `Table` is made, the files' footers are read, of which the numbers of rows are kept; nothing else. A row is found
by its number's place among the groups (section "table files": row groups, record batches), and its group is decoded
and kept in memory, up to `memory_bytes` of them in each process. Arrow files of this machine are mapped and not
decoded: a row is 2 us a column. Of Parquet a row whose group is not in memory costs all of the group, so where the
memory can't hold what the files decode to, a shuffled order decodes a group for most rows. Then a warning says so.

Invariant: row i is row i of the files in their order, in every process; what is read elsewhere leaves no trace in what
a sample draws (`remote.py`). No file is read by a process that has not opened it itself: a position would be shared.
Left out: writing; predicates; Arrow's extension types but tensors.
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
# Columns of Arrow, as samples and as micro-batches have them.
#
# | type | in a sample | in a micro-batch |
# | --- | --- | --- |
# | integer, boolean, float | int, bool, float | tensor of int64, bool, float64; shape `(samples,)` |
# | text, bytes | str, bytes | list, as `default_collate` has it |
# | list of numbers, none of them missing | NumPy array of that type | tensor of that type; shape `(samples, length)` |
# | tensor of a fixed shape | NumPy array | as `default_collate` has it |
# | image, by Hugging Face's note in the schema | PIL image in RGB | the script's `transform` comes first |
# | anything else, or nothing | what Python has: datetime, list, dict, None | as `default_collate` has it |
#
# The right column is what torch's `default_collate` makes of the middle one, bit for bit. Of numbers and lists of
# numbers `flat` gives whole groups, from which a micro-batch is taken at once; and it says so where it can't.

Reader = Callable[[Any, int], Any]  # of an array and a row
_NOTE = b"huggingface"  # whose `datasets` writes this into the schema
_IMAGE = "Image"


def feature_of(schema: Any, column: str) -> Mapping[str, Any]:
    """What `datasets` has noted of `column`, as `{"_type": "ClassLabel", "names": [...]}`; empty if nothing."""
    try:
        found: Any = msgspec.json.decode((schema.metadata or {}).get(_NOTE, b"{}"))
        feature = found["info"]["features"][column]
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return {}
    return feature if isinstance(feature, dict) else {}


def reader_of(schema: Any, column: str) -> Reader:
    """How one value of `column` is read."""
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
    """Whether `flat` knows this column's type: numbers, and lists of them."""
    import pyarrow as pa

    kind = schema.field(column).type
    if reader_of(schema, column) is _numbers:
        return True
    whole = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)  # beyond int64 torch has an error
    return whole or pa.types.is_boolean(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)


def flat(array: Any) -> npt.NDArray[Any] | None:
    """A group's column that is `stackable`, as NumPy has it: shape `(rows,)`, or `(rows, length)` of lists; mostly a
    view of Arrow's memory. None where values are missing, or lists differ in length.
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
    """Room for a micro-batch of such a column, in the type that `default_collate` gives Python's own numbers."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.empty((samples, *like.shape[1:]), like.dtype if like.ndim > 1 else kinds[like.dtype.kind])


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    """Those that torch has, too."""
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
    return np.array(values.to_numpy(zero_copy_only=False))  # of its own: Arrow's memory can't be written to


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
            f"an image that lies elsewhere, at {value.get('path')!r}: only images that are stored in the table are read"
        )
    return webdataset.image(data)


# --- table files ------------------------------------------------------------------------------------------------------
#
# Parquet and Arrow files as groups of rows, each of which can be read by itself, here or from any URL.
#
# | kind | group | what is read to count its rows |
# | --- | --- | --- |
# | Parquet | row group | the file's footer |
# | Arrow file ("feather") | record batch | here, its head, since the file is mapped; elsewhere, one column |
# | Arrow stream, as Hugging Face's cache has | record batch | its head; without a table of contents, it must lie here |
#
# Invariant: a group has as many rows as were counted, and columns of the types that the first file has, or it is a
# `ShardError` that names the file. Offsets of an Arrow file, which Arrow itself believes, are checked before a group is
# used for the first time in a process; a Parquet file's are made here, by decoding it.
# Left out: a mapped file that somebody cuts off while it is read ends the process by SIGBUS, as with any mapping.
# Everything is read on the thread that asks: Arrow's own threads would read one file object at two places at once.

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


# --- table ------------------------------------------------------------------------------------------------------------

_OPEN = 64  # files that one process keeps open
_AT_ONCE = 16  # footers that are fetched at the same time, where each takes a journey
_MAX_ROWS = 1 << 53
Footer = tuple[Any, tuple[int, ...], int]  # schema, rows of each group, bytes once they are decoded


class _Group:
    """A group's columns, in the order of `columns`, and the same as NumPy has them, once they are asked for."""

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.arrays = arrays

    @functools.cached_property
    def flat(self) -> list[npt.NDArray[Any] | None]:
        return list(map(flat, self.arrays))


class Table(Dataset[Any]):
    """Samples are dicts: of each column by its name what `farandole.data.formats.table` says.

    Attributes:
        columns: their names, in the order in which samples have them.
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
        """Reads the files' footers. `source`: a file, a folder, a pattern as `data/train-*.parquet`, or several; each a
        path or a URL that fsspec knows.

        `columns`: those that are read; all, if not given. `transform` is given each sample, and what it returns is the
        sample. `decode`: images by Hugging Face's note in the schema; or functions of a value by a column's name, which
        go before that; or `False`, for values as they are stored. `memory_bytes`: of decoded rows, in each process.

        Raises:
            UsageError: pyarrow is not installed; no files, no such column, or files that differ in one.
            ShardError: a file is not there, can't be read, or is neither Parquet nor Arrow.
        """
        require_pyarrow()
        self.files = files_of(source)
        self.transform = transform
        self._decode = decode if isinstance(decode, bool) else dict(decode)
        self._memory_bytes = memory_bytes
        self._begin_anew()
        decoded = self._count(columns)
        if decoded > memory_bytes:
            warnings.warn(
                f"all columns of {self.files[0]} and the others decode to {decoded} bytes, and memory_bytes is "
                f"{memory_bytes}: where those that are read don't fit, most samples of a shuffled order decode a whole "
                f"row group; raise memory_bytes, which each loader process takes, name fewer columns, or keep the data "
                f"as Arrow files, which are mapped and not decoded",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Raises `IndexError` out of range, `ShardError` without the file, and what a decoder raises of bad data."""
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
        """Whole micro-batches by their samples' numbers, int64 of shape `(samples,)`: what `default_collate` makes of
        the samples, without making them. There only where samples draw nothing: without `transform` and functions in
        `decode`, and where all columns are numbers or lists of numbers.
        """
        plain = self.transform is None and isinstance(self._decode, bool)
        if not plain or not all(stackable(self._schema, name) for name in self.columns):
            raise AttributeError("gather: this table's samples have to be made one by one")
        return self._gather

    def class_names(self, column: str) -> tuple[str, ...]:
        """Names of the classes of a label column, as Hugging Face's `datasets` notes them; empty where it has none."""
        names = feature_of(self._schema, column).get("names")
        return tuple(map(str, names)) if isinstance(names, list) else ()  # pyright: ignore[reportUnknownArgumentType]

    def __getstate__(self) -> dict[str, Any]:
        mine = {
            "_opened": None,
            "_kept": None,
            "_readers": None,
            "_process": 0,
        }  # each process has its own
        return {**self.__dict__, **mine}

    # --- when it is made --------------------------------------------------------------------------------------

    def _count(self, columns: Sequence[str] | None) -> int:
        """Which rows lie where, by the footers; returns how many bytes they decode to."""
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
                    raise ShardError(f"{self.files[number]} says that a group has {count} rows; it is damaged")
                self._places.append((number, group))
                ends.append(count)
        self._ends = list(accumulate(ends))
        if not ends or self._ends[-1] == 0:
            raise UsageError(f"{self.files[0]} and the others hold no rows; name files that do")
        return decoded

    def _footers(self) -> list[Footer]:
        if all(local_path(file) is not None for file in self.files):
            return list(map(_footer, self.files))
        with reading(self.files[0]), ThreadPoolExecutor(_AT_ONCE) as pool:  # threads can't each put back what was drawn
            return list(pool.map(_footer, self.files))

    def _compare(self, file: str, schema: Any) -> None:
        """Raises `UsageError` where `file` has other columns than the first one."""
        if len(set(self.columns)) != len(self.columns) or not self.columns:
            raise UsageError(f"columns {list(self.columns)} of {file}: each once, and at least one")
        for name in self.columns:
            if schema.names.count(name) != 1:
                raise UsageError(f"{file} has no column {name!r}; it has {', '.join(map(repr, schema.names))}")
            first, here = self._schema.field(name).type, schema.field(name).type
            if first != here:
                raise UsageError(
                    f"column {name!r} is {first} in {self.files[0]} and {here} in {file}; name files alike"
                )

    # --- in each process --------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self._opened: OrderedDict[int, TableFile] = OrderedDict()
        self._kept: LruBytes[_Group] = LruBytes(self._memory_bytes)
        self._readers: list[tuple[str, Reader]] | None = None
        self._process = os.getpid()

    def _begin(self, group: int) -> int:
        return self._ends[group - 1] if group else 0

    def _group(self, group: int) -> _Group:
        if self._process != os.getpid():
            self._begin_anew()
        found = self._kept.get(group)
        if found is not None:
            return found
        number, within = self._places[group]
        batch = self._file(number).read(within, self.columns)
        rows = self._ends[group] - self._begin(group)
        if batch.num_rows != rows or any(field.type != self._schema.field(field.name).type for field in batch.schema):
            raise ShardError(f"{self.files[number]} is not what it was when this Table was made; make it anew")
        return self._kept.put(group, _Group(tuple(batch.columns)), batch.nbytes)

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
            own = {} if isinstance(self._decode, bool) else self._decode
            plain = self._schema.remove_metadata() if self._decode is False else self._schema
            self._readers = [
                (name, _through(own[name]) if name in own else reader_of(plain, name)) for name in self.columns
            ]
        return self._readers

    def _gather(self, samples: npt.NDArray[np.int64]) -> dict[str, Any]:
        groups = np.searchsorted(np.array(self._ends, dtype=np.int64), samples, side="right")
        batch: dict[str, npt.NDArray[Any]] = {}
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            rows = samples[mine] - self._begin(group)
            for name, column in zip(self.columns, self._group(group).flat, strict=True):
                if column is not None and name not in batch:
                    batch[name] = empty(column, len(samples))
                if column is None or batch[name].shape[1:] != column.shape[1:]:  # collate knows what comes of it
                    return default_collate([self[sample] for sample in samples.tolist()])
                batch[name][mine] = column[rows]
        return {name: torch.from_numpy(column) for name, column in batch.items()}


def _footer(file: str) -> Footer:
    found = opened(file)
    with reading(file):
        _ = found.schema.names  # may be no text
    return found.schema, found.rows, found.decoded_bytes


def _through(function: Callable[[Any], Any]) -> Reader:
    return lambda array, row: function(array[row].as_py())
