"""MDS shards, as mosaicml-streaming writes them, as a map-style dataset: read where they lie, without that package.

A shard that is not compressed is read by samples: two `pread`, 5 us, on this machine, or in the cache's copy of it if
the index has its MD5. A compressed one, and one elsewhere without an MD5, is taken into memory whole, up to
`memory_bytes` of them in each process: in a shuffled order that should hold all of the data, and a warning says so.

Invariant: what the index and a shard say is believed no further than the shard is long (`mds_index.py`). Nothing is
unpickled (`mds_values.py`). What is read elsewhere leaves no trace in what a sample draws (`remote.py`).
Left out: shards compressed with Brotli or Snappy; hashes other than MD5; the formats json, csv and xsv.
"""

from __future__ import annotations

import bisect
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from farandole.data.cache import DEFAULT_FOLDER, Copies, filesystem, local_path, torn
from farandole.data.index import INDEX
from farandole.data.kept import Kept
from farandole.data.mds_index import Shard, columns_of, read_index
from farandole.data.mds_values import Decoder, decoder_of
from farandole.data.remote import reading
from farandole.errors import FarandoleError, UsageError
from farandole.platform.extras import how_to_install


class MDS(Dataset[Any]):
    """Samples are dicts: of each column by its name what `farandole.data.mds_values` says.

    Attributes:
        columns: their names, in the order in which samples have them.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        columns: Collection[str] | None = None,
        decode: bool | Mapping[str, Decoder] = True,
        cache: str | os.PathLike[str] = DEFAULT_FOLDER,
        cache_bytes: int = 50 << 30,
        memory_bytes: int = 1 << 30,
    ) -> None:
        """Reads the index, nothing else. `url`: the folder that holds it, a path or a URL that fsspec knows.

        `transform` is given each sample, and what it returns is the sample. `columns`: those that samples have; all, if
        not given. `decode`: by the index; or functions of bytes by a column's name, which go before that; or `False`,
        for bytes. `cache` and `cache_bytes` are as `ShardedImages` has them; `memory_bytes`: of whole shards, in each
        process.

        Raises:
            UsageError: no such place or column, or a column of an encoding that is not read, such as `pkl`.
            ShardError: no index there, or not one that can be used.
        """
        self.url = os.fspath(url).rstrip("/")
        self.transform = transform
        self._shards = read_index(f"{self.url}/{INDEX}").shards
        names = self._shards[0].column_names
        self.columns = names if columns is None else tuple(name for name in names if name in columns)
        if columns is not None and (others := set(columns) - set(names)):
            raise UsageError(f"{self.url} has no column {', '.join(sorted(others))}; it has {', '.join(names)}")
        self._own = {} if isinstance(decode, bool) else dict(decode)
        self._raw = decode is False
        if not self._raw:
            for encoding in {e for shard in self._shards for e in zip(names, shard.column_encodings, strict=True)}:
                self._compare(*encoding)
        self._ends = list(accumulate(shard.samples for shard in self._shards))
        self._copies = Copies(cache, cache_bytes)
        self._kept: Kept[bytes] = Kept(memory_bytes)
        self._warn(cache_bytes, memory_bytes)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": Kept[bytes](self._kept.limit_bytes)}

    def __getitem__(self, index: int) -> Any:
        """Raises `IndexError` out of range, `ShardError` without the shard, and what a decoder raises of bad data."""
        number, within = self._find(index)
        shard = self._shards[number]
        found = columns_of(self._bytes(number, within), shard.column_sizes)
        sample: dict[str, Any] = {}
        for name, encoding, data in zip(shard.column_names, shard.column_encodings, found, strict=True):
            if name not in self.columns:
                continue
            decoder = None if self._raw else self._own.get(name) or decoder_of(encoding)
            sample[name] = data if decoder is None else _decoded(decoder, data, name)
        return sample if self.transform is None else self.transform(sample)

    # --- what there is ----------------------------------------------------------------------------------------

    def _compare(self, name: str, encoding: str) -> None:
        if name in self._own or name not in self.columns or decoder_of(encoding) is not None:
            return
        why = (
            "a pickle, which can run any program"
            if encoding == "pkl"
            else f"of an encoding that is not read, {encoding}"
        )
        raise UsageError(
            f"column {name!r} of {self.url} is {why}; name the columns without it (columns=), or give a function of "
            f"its bytes (decode={{{name!r}: ...}})"
        )

    def _warn(self, cache_bytes: int, memory_bytes: int) -> None:
        local = local_path(self.url) is not None
        whole = sum(shard.raw_data.bytes for shard in self._shards if self._is_whole(shard))
        copied = 0 if local else sum(shard.stored.bytes for shard in self._shards if shard.stored.md5)
        for what, size, limit in (("memory_bytes", whole, memory_bytes), ("cache_bytes", copied, cache_bytes)):
            if size > limit:
                warnings.warn(
                    f"{self.url} takes {size} bytes where {what} is {limit}: in a shuffled order most samples will "
                    f"take in a whole shard; raise {what}, or use fewer of the shards",
                    stacklevel=3,
                )

    def _is_whole(self, shard: Shard) -> bool:
        """Whether it is taken into memory."""
        return shard.zip_data is not None or (local_path(self.url) is None and not shard.raw_data.md5)

    def _find(self, index: int) -> tuple[int, int]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index %= length
        number = bisect.bisect_right(self._ends, index)
        return number, index - self._ends[number] + self._shards[number].samples

    # --- one sample -------------------------------------------------------------------------------------------

    def _bytes(self, number: int, within: int) -> bytes:
        shard = self._shards[number]
        url = f"{self.url}/{shard.stored.basename}"
        read = self._reader(number, shard, url)
        behind = 4 * (shard.samples + 2)
        place = read(8, 4 * (within + 1))
        begin, end = struct.unpack("<II", place) if len(place) == 8 else (0, 0)
        if not behind <= begin <= end <= shard.raw_data.bytes:
            raise ValueError(f"{url} says that its sample {within} lies from {begin} to {end}, where there is none")
        data = read(end - begin, begin)
        if len(data) != end - begin:
            raise torn(url, f"it ends within its sample {within}")
        return data

    def _reader(self, number: int, shard: Shard, url: str) -> Callable[[int, int], bytes]:
        """What reads so many bytes from there on."""
        if not self._is_whole(shard):
            descriptor = self._copies.open(url, shard.stored.bytes, shard.stored.md5)
            return lambda size, begin: os.pread(descriptor, size, begin)
        whole = self._kept.get(number)
        if whole is None:
            whole = self._kept.put(number, self._whole(shard, url), shard.raw_data.bytes)
        return lambda size, begin: whole[begin : begin + size]

    def _whole(self, shard: Shard, url: str) -> bytes:
        if shard.raw_data.bytes > self._kept.limit_bytes:
            raise UsageError(
                f"shard {url} takes {shard.raw_data.bytes} bytes of memory, and memory_bytes is "
                f"{self._kept.limit_bytes}; raise it"
            )
        stored = shard.stored
        if local_path(url) is not None or stored.md5:
            data = os.pread(self._copies.open(url, stored.bytes, stored.md5), stored.bytes, 0)
        else:
            with reading(url):
                files, path = filesystem(url)
                data = files.cat_file(path, start=0, end=stored.bytes)
        if len(data) != stored.bytes:
            raise torn(url, f"it has {len(data)} bytes where the index says {stored.bytes}")
        if shard.zip_data is not None:
            data = _decompressed(data, shard.algorithm, shard.raw_data.bytes, url)
        if len(data) != shard.raw_data.bytes:
            raise torn(url, f"it holds {len(data)} bytes or more, where the index says {shard.raw_data.bytes}")
        return data


def _decoded(decoder: Decoder, data: bytes, name: str) -> Any:
    try:
        return decoder(data)
    except FarandoleError:
        raise  # no fault of the sample's
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error


def _decompressed(data: bytes, algorithm: str, most: int, url: str) -> bytes:
    """No more than one byte beyond `most`."""
    import bz2

    try:
        if algorithm == "gz":
            return zlib.decompressobj(wbits=31).decompress(data, most + 1)
        if algorithm == "bz2":
            return bz2.BZ2Decompressor().decompress(data, most + 1)
        return _zstd(data, most + 1)
    except UsageError:
        raise
    except (OSError, ValueError, zlib.error) as error:
        raise torn(url, f"it can't be decompressed ({error})") from None


def _zstd(data: bytes, most: int) -> bytes:
    try:
        import pyarrow as pa
    except ImportError:
        raise UsageError(
            f"shards compressed with zstd are read with pyarrow, which is not installed: {how_to_install('tables')}"
        ) from None
    with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
        return stream.read(most)
