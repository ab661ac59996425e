"""Parquet and Arrow files as a map-style dataset: any worker reaches any row, here or at any URL, where the files lie.

When a `Table` is made, the files' footers are read, of which the numbers of rows are kept; nothing else. A row is found
by its number's place among the groups (`table_files.py`: row groups, record batches), and its group is decoded and kept
in memory, up to `memory_bytes` of them in each process. Arrow files of this machine are mapped and not decoded: a row
is 2 us a column. Of Parquet a row whose group is not in memory costs all of the group, so where the memory can't hold
what the files decode to, a shuffled order decodes a group for most rows. Then a warning says so.

Invariant: row i is row i of the files in their order, in every process; what is read elsewhere leaves no trace in what
a sample draws (`remote.py`). No file is read by a process that has not opened it itself: a position would be shared.
Left out: writing; predicates; Arrow's extension types but tensors.
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
from farandole.data.columns import Reader, empty, feature_of, flat, reader_of, stackable
from farandole.data.kept import Kept
from farandole.data.remote import reading
from farandole.data.table_files import TableFile, files_of, opened, require_pyarrow
from farandole.errors import ShardError, UsageError

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
    """Samples are dicts: of each column by its name what `farandole.data.columns` says.

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
        self._kept: Kept[_Group] = Kept(self._memory_bytes)
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
