"""WebDataset's tar files with any fields, as a map-style dataset: any worker can read any sample directly.

The tars are not changed. The index that the `wids` package defines (`data/index.py`), with each tar's number of
samples, length and MD5, lies beside them or elsewhere; `widsindex` and `farandole data index`
(`data/prepare/webdataset_index.py`) write it. A sample takes one `pread` a field. Each process reads a tar's table of
contents once, 45 us an entry; it takes 24 bytes an entry beside the key.

Invariant: a sample comes from a tar with the index's MD5, or it is an error that names the tar. (Local tars are
compared by length alone.) Nothing is unpickled (section "fields"). A field that claims more bytes than its tar has is a
bad sample. So are all samples after it, since their places are unknown.
Left out: compressed tars, where reading a sample means reading everything before it.
"""

from __future__ import annotations

import bisect
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from farandole.data.cache import DEFAULT_FOLDER, Copies, local_path, torn
from farandole.data.formats.fields import Decoder, decoder_of
from farandole.data.index import INDEX, LEAST, UNREADABLE, entries, mapped, read_index
from farandole.errors import FarandoleError

# --- webdataset -------------------------------------------------------------------------------------------------------

KEY = "__key__"
_BEYOND = -2  # offset of a field that lies beyond the end of its tar


@dataclass(frozen=True)
class TarContents:
    """The places of the fields of a tar's samples.

    `rows`: field (an index of `fields`), offset, size; shape `(entries, 3)`. `ends`: the index after each sample's last
    row; shape `(samples,)`. `keys`: all keys joined, each ends at its `key_ends`.
    """

    fields: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    keys: bytes
    key_ends: npt.NDArray[np.int64]

    def key(self, sample: int) -> str:
        """Returns the key of a sample of this tar."""
        begin = self.key_ends[sample - 1] if sample else 0
        return self.keys[begin : self.key_ends[sample]].decode(errors="surrogateescape")

    def rows_of(self, sample: int) -> list[list[int]]:
        """Returns the rows of a sample of this tar."""
        begin = self.ends[sample - 1] if sample else 0
        return self.rows[begin : self.ends[sample]].tolist()


class WebDataset(Dataset[Any]):
    """Samples are dicts: `__key__`, and each field by its name without the first dot, like `jpg`, `cls`, `seg.png`."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        fields: Collection[str] | None = None,
        decode: bool | Mapping[str, Decoder] = True,
        index: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] = DEFAULT_FOLDER,
        cache_bytes: int = 50 << 30,
    ) -> None:
        """Reads the index, nothing else. `url`: the folder of the tars, a path or a URL that fsspec knows.

        `transform` gets each sample and returns the final one. `fields`: the fields to read; default: all. `decode`:
        `True` uses the rules of `farandole.data.formats.webdataset`; a mapping from a field's name to a function of
        bytes overrides them; `False` returns bytes. `index`: its path or URL, if it does not lie beside the tars.
        `cache` and `cache_bytes`: see `ShardedImages`.

        Raises:
            UsageError: the kind of URL is unknown.
            ShardError: there is no index, or no valid one.
        """
        self.url = os.fspath(url).rstrip("/")
        self.transform = transform
        self._fields = None if fields is None else frozenset(fields)
        self._decode = decode if isinstance(decode, bool) else dict(decode)
        self._shards = read_index(f"{self.url}/{INDEX}" if index is None else os.fspath(index)).shardlist
        self._ends = list(accumulate(shard.nsamples for shard in self._shards))
        self._contents: dict[int, TarContents] = {}
        self._copies = Copies(cache, cache_bytes)
        total = sum(shard.filesize for shard in self._shards)
        if local_path(self.url) is None and total > cache_bytes:
            warnings.warn(
                f"{self.url} holds {total} bytes and its cache at most {cache_bytes}: in a shuffled order most samples "
                f"will fetch a whole tar; raise cache_bytes, or use fewer of the tars",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": {}}  # each process reads the tables that it needs

    def __getitem__(self, index: int) -> Any:
        """Returns a sample. Raises `IndexError` if out of range, `ShardError` without the tar, and decoders' errors."""
        sample = self.read(index)
        if self._decode is not False:
            own = {} if self._decode is True else self._decode
            for field, data in sample.items():
                decoder = None if field == KEY else decoder_of(field, own)
                if decoder is not None:
                    sample[field] = _decoded(decoder, data, field, sample[KEY])
        return sample if self.transform is None else self.transform(sample)

    def read(self, index: int) -> dict[str, Any]:
        """Returns the sample's key, as `__key__`, and its fields in bytes.

        Raises:
            IndexError: out of range.
            ShardError: the tar can't be read.
            ValueError: the sample lies beyond the tar's end, has a field twice, or lacks one of `fields`.
        """
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index %= length
        number = bisect.bisect_right(self._ends, index)
        shard = self._shards[number]
        url = f"{self.url}/{shard.url}"
        descriptor = self._copies.open(url, shard.filesize, shard.md5sum)
        contents = self._contents.get(number)
        if contents is None:
            contents = self._contents[number] = _contents(descriptor, url, shard.nsamples)
        within = index - self._ends[number] + shard.nsamples
        sample: dict[str, Any] = {KEY: contents.key(within)}
        for field, offset, size in contents.rows_of(within):
            if offset == _BEYOND:
                raise ValueError(f"{url} ends before this sample, by the length that one of its entries claims")
            name = contents.fields[field]
            if self._fields is not None and name not in self._fields:
                continue
            if name in sample:
                raise ValueError(f"{url} has the field {name} of {sample[KEY]!r} twice")
            data = os.pread(descriptor, size, offset)
            if len(data) != size:
                raise torn(url, f"it ends within sample {index}")
            sample[name] = data
        if self._fields is not None and (missing := self._fields - sample.keys()):
            has = ", ".join(contents.fields[row[0]] for row in contents.rows_of(within))
            raise ValueError(f"{sample[KEY]!r} of {url} lacks {', '.join(sorted(missing))}; it has {has}")
        return sample


def _decoded(decoder: Decoder, data: bytes, field: str, key: str) -> Any:
    try:
        return decoder(data)
    except FarandoleError:
        raise  # the sample is not the cause
    except ValueError as error:  # other kinds can't be raised again with another text
        raise ValueError(f"field {field} of {key!r}: {error}") from error


def _contents(descriptor: int, url: str, samples: int) -> TarContents:
    length = os.fstat(descriptor).st_size
    if samples > length // LEAST:
        raise torn(url, f"it has {length} bytes, too few for the {samples} samples that the index says")
    numbers: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []
    ends: list[int] = []  # ends of all samples except the last
    keys: list[bytes] = []
    last: str | None = None
    try:
        with mapped(descriptor) as archive:
            for key, field, offset, size in entries(archive):
                if key != last:
                    if last is not None:
                        ends.append(len(rows))
                    keys.append(key.encode(errors="surrogateescape"))
                    last = key
                if len(keys) > samples:
                    break
                number = numbers.setdefault(field, len(numbers))
                if offset + size > length:
                    rows.append((number, _BEYOND, 0))
                    for _ in range(samples - len(keys)):
                        ends.append(len(rows))
                        rows.append((number, _BEYOND, 0))
                        keys.append(b"?")
                    break
                rows.append((number, offset, size))
    except UNREADABLE as error:
        raise torn(url, f"it can't be read as a tar file ({error})") from None
    if len(keys) != samples:
        raise torn(url, f"it has {len(keys)} samples where the index says {samples}")
    return TarContents(
        fields=tuple(numbers),
        rows=np.array(rows, dtype=np.int64).reshape(-1, 3),
        ends=np.array([*ends, len(rows)], dtype=np.int64),
        keys=b"".join(keys),
        key_ends=np.array(list(accumulate(map(len, keys))), dtype=np.int64),
    )
