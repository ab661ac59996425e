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
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from farandole.data.cache import local_path
from farandole.data.formats.columns import Reader, empty, feature_of, flat, reader_of, stackable
from farandole.data.formats.table_files import TableFile, files_of, opened, require_pyarrow
from farandole.data.object_store import LruBytes, reading
from farandole.errors import ShardError, UsageError

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
