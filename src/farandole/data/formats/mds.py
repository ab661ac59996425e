"""MDS shards, as mosaicml-streaming writes them, as a map-style dataset: read unchanged, without that package.

A shard that is not compressed is read by samples: two `pread`, 5 us, from the file on this machine, or from the cache's
copy if the index has its MD5. A compressed shard, and a remote one without an MD5, is read into memory as a whole, up
to `memory_bytes` of shards in each process: for a shuffled order that should hold all of the data, or a warning says
so.

Invariant: the index and a shard are trusted only within the length of the shard (section "mds index"). Nothing is
unpickled (section "mds values"). Reading a remote shard does not change a sample's random numbers
(`object_store.reading`).
Left out: shards compressed with Brotli or Snappy; hashes other than MD5; the formats json, csv and xsv.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from farandole.data.cache import DEFAULT_FOLDER, Copies, filesystem, local_path, torn
from farandole.data.decoding import open_image
from farandole.data.formats import fields
from farandole.data.index import INDEX, MAX_INDEX_BYTES
from farandole.data.object_store import LruBytes, reading
from farandole.errors import FarandoleError, ShardError, UsageError
from farandole.platform.extras import how_to_install

# --- mds values -------------------------------------------------------------------------------------------------------
#
# The values of MDS columns are decoded by the encodings that the index names. Nothing is unpickled.
#
# | encoding | value |
# | --- | --- |
# | bytes, str, json | bytes, str, the decoded JSON |
# | int, str_int, str_float, str_decimal | int, int, float, Decimal |
# | uint8 ... int64, float16 ... float64 | a NumPy scalar |
# | ndarray, ndarray:DTYPE, ndarray:DTYPE:SHAPE | a NumPy array |
# | jpeg, png, pil | a PIL image in its own mode |
#
# `pkl` has no decoder here: a pickle can run any program.
#
# Invariant: a value takes no more memory than its bytes, except images, for which Pillow's limit of pixels holds;
# content that does not fit the encoding is a `ValueError`, or an error of Pillow.

Decoder = Callable[[bytes], Any]
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "I;16")


def decoder_of(encoding: str) -> Decoder | None:
    """Returns the decoder of values of `encoding`, or None if it is not supported."""
    name, _, options = encoding.partition(":")
    if name == "ndarray":
        return _array_of(options)
    return None if options else _DECODERS.get(name)


def _array_of(options: str) -> Decoder | None:
    kind, _, extents = options.partition(":")
    if kind and kind not in _SCALARS:
        return None
    try:
        shape = tuple(int(extent) for extent in extents.split(",")) if extents else None
    except ValueError:
        return None
    return functools.partial(_array, kind, shape)


def _array(kind: str, shape: tuple[int, ...] | None, data: bytes) -> npt.NDArray[Any]:
    """Returns an array. `kind` and `shape` come from the index; if they are missing, the value begins with them."""
    at = 0
    try:
        if not kind:
            kind, at = _DTYPES[data[0]], 1
        if shape is None:
            axes, wide = data[at] >> 2, 1 << (data[at] & 3)
            begin, at = at + 1, at + 1 + axes * wide
            if at > len(data):
                raise IndexError
            shape = tuple(int.from_bytes(data[n : n + wide], "little") for n in range(begin, at, wide))
    except (IndexError, KeyError):
        raise ValueError(f"{data[:8]!r} is not the header of an array of {len(data)} bytes") from None
    dtype = np.dtype(kind).newbyteorder("<")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - at:
        raise ValueError(f"an array of {kind} and shape {shape} in {len(data) - at} bytes")
    return np.frombuffer(data, dtype, offset=at).astype(np.dtype(kind)).reshape(shape)  # a copy: bytes are read-only


def _scalar(kind: str, data: bytes) -> Any:
    return _array(kind, (1,), data)[0]


def _decimal(data: bytes) -> Decimal:
    try:
        return Decimal(data.decode())
    except InvalidOperation:
        raise ValueError(f"{data[:20]!r} is not a decimal number") from None


def _image(data: bytes) -> Any:
    with open_image(data) as opened:
        opened.load()
        return opened


def _pixels(data: bytes) -> Any:
    """Returns the image in `data`: `width, height, length of the mode` as uint32, the mode, and Pillow's raw pixels."""
    import PIL.Image

    if len(data) < 12:
        raise ValueError(f"{len(data)} bytes are too short for an image")
    width, height, length = struct.unpack_from("<III", data)
    mode = data[12 : 12 + length].decode()
    pixels = data[12 + length :]
    if mode not in _MODES or min(width, height) < 1 or (width * height + 7) // 8 > len(pixels):
        raise ValueError(f"an image of {width} x {height} pixels, mode {mode[:8]!r}, in {len(pixels)} bytes")
    return PIL.Image.frombytes(mode, (width, height), pixels)


def _integer(data: bytes) -> int:
    return int(_scalar("int64", data))


def _digits(data: bytes) -> int:
    return int(data.decode())


def _float(data: bytes) -> float:
    return float(data.decode())


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "str": fields.text,
    "json": fields.document,
    "int": _integer,
    "str_int": _digits,
    "str_float": _float,
    "str_decimal": _decimal,
    "jpeg": _image,
    "png": _image,
    "pil": _pixels,
    **{kind: functools.partial(_scalar, kind) for kind in _SCALARS},
}


# --- mds index --------------------------------------------------------------------------------------------------------
#
# The `index.json` of a folder of MDS shards, and the layout of a shard:
#
#     uint32 samples | uint32 offsets, samples + 1 of them, from the file's begin | the columns once more | the samples
#
# A sample consists of the lengths, as uint32, of its columns without a fixed length, and then the bytes of all columns.
#
# A folder may come from an untrusted author: names must be those of files below the index, and numbers must be in
# range. The shard is trusted only within its length.

_PART = re.compile(r"\w[\w .,+=@~-]*")
_LONGEST = 200
_MAX_BYTES = 1 << 32  # offsets are uint32
COMPRESSIONS = ("gz", "bz2", "zstd")


class MdsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a shard, as it is stored or after decompression."""

    basename: str
    bytes: int
    hashes: dict[str, str] = {}

    def __post_init__(self) -> None:
        parts = self.basename.split("/")
        if not all(_PART.fullmatch(part) for part in parts) or len(self.basename.encode()) > _LONGEST:
            raise ValueError(f"basename {self.basename[:_LONGEST]!r} is not that of a file below the index")
        if not 0 <= self.bytes <= _MAX_BYTES:
            raise ValueError(f"bytes {self.bytes} of {self.basename} is not from 0 to 2^32")

    @property
    def md5(self) -> str:
        """The MD5 in hex; empty if the index has none. The writer stores it only on request."""
        digest = self.hashes.get("md5", "")
        return digest if re.fullmatch(r"[0-9a-f]{32}", digest) else ""


class MdsShard(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of one shard in the index."""

    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    raw_data: MdsFile
    samples: int
    compression: str | None = None
    zip_data: MdsFile | None = None
    format: str = "mds"
    version: int = 2

    def __post_init__(self) -> None:
        name = self.raw_data.basename
        if self.format != "mds" or self.version != 2:
            raise ValueError(f"{name} is {self.format!r}, version {self.version}: only 'mds', version 2, is supported")
        columns = len(self.column_names)
        if not columns == len(self.column_encodings) == len(self.column_sizes) == len(set(self.column_names)):
            raise ValueError(f"{name} has {columns} names of columns, which its encodings and sizes do not match")
        if any(size is not None and not 0 <= size <= _MAX_BYTES for size in self.column_sizes):
            raise ValueError(f"{name} has column_sizes {self.column_sizes}")
        if not 0 <= self.samples <= self.raw_data.bytes // 4:
            raise ValueError(f"{name} has {self.raw_data.bytes} bytes, too few for {self.samples} samples")
        if (self.zip_data is None) != (self.compression is None):
            raise ValueError(f"{name} has compression {self.compression!r} and zip_data {self.zip_data}")
        if self.compression is not None and self.algorithm not in COMPRESSIONS:
            raise ValueError(
                f"{name} is compressed with {self.compression!r}: only {', '.join(COMPRESSIONS)} are supported"
            )

    @property
    def algorithm(self) -> str:
        return (self.compression or "").partition(":")[0]

    @property
    def stored(self) -> MdsFile:
        """The file that is stored."""
        return self.raw_data if self.zip_data is None else self.zip_data


class MdsIndex(msgspec.Struct, frozen=True, kw_only=True):
    """All shards, in the order of their samples."""

    shards: tuple[MdsShard, ...]
    version: int = 2

    def __post_init__(self) -> None:
        for shard in self.shards:
            if shard.column_names != self.shards[0].column_names:
                raise ValueError(f"{shard.raw_data.basename} has other columns than {self.shards[0].raw_data.basename}")


def read_index(place: str) -> MdsIndex:
    """Returns the index at `place`. Raises `ShardError` if it does not exist, is invalid, or names no samples."""
    with reading(place):
        files, path = filesystem(place)
        if (length := files.size(path) or 0) > MAX_INDEX_BYTES:
            raise ShardError(f"{place} has {length} bytes, and an index at most {MAX_INDEX_BYTES}; make larger shards")
        content = files.cat_file(path)
    try:
        index = msgspec.json.decode(content, type=MdsIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{place} is not an index of MDS shards: {error}") from None
    if sum(shard.samples for shard in index.shards) == 0:
        raise ShardError(f"{place} names no samples")
    return index


def columns_of(data: bytes, sizes: tuple[int | None, ...]) -> list[bytes]:
    """Returns the columns of one sample. Raises `ValueError` if their lengths do not fit the sample."""
    variable = sum(not size for size in sizes)  # like the format's own reader, takes 0 for no fixed length
    if 4 * variable > len(data):
        raise ValueError(f"a sample of {len(data)} bytes, too few for the lengths of {variable} columns")
    header = iter(struct.unpack_from(f"<{variable}I", data))
    lengths = [size or next(header) for size in sizes]
    if (end := 4 * variable + sum(lengths)) != len(data):
        raise ValueError(f"a sample of {len(data)} bytes, whose columns take {end}")
    columns: list[bytes] = []
    at = 4 * variable
    for length in lengths:
        columns.append(data[at : at + length])
        at += length
    return columns


# --- mds --------------------------------------------------------------------------------------------------------------


class MDS(Dataset[Any]):
    """Samples are dicts: column name -> value, of the types in the table of `farandole.data.formats.mds`.

    Attributes:
        columns: the names of the columns, in the order of the samples.
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

        `transform` gets each sample and returns the final one. `columns`: the columns to read; default: all. `decode`:
        `True` decodes by the index; a mapping from a column's name to a function of bytes overrides that; `False`
        returns bytes. `cache` and `cache_bytes`: see `ShardedImages`. `memory_bytes`: limit of whole shards in memory,
        in each process.

        Raises:
            UsageError: the kind of URL is unknown, there is no such column, or one has an unsupported encoding, such as
                `pkl`.
            ShardError: there is no index, or no valid one.
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
        self._in_memory: LruBytes[bytes] = LruBytes(memory_bytes)
        self._warn(cache_bytes, memory_bytes)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_memory": LruBytes[bytes](self._in_memory.limit_bytes)}

    def __getitem__(self, index: int) -> Any:
        """Returns a sample. Raises `IndexError` if out of range, `ShardError` without its shard, and decoder errors."""
        number, within = self._find(index)
        shard = self._shards[number]
        columns = columns_of(self._bytes(number, within), shard.column_sizes)
        sample: dict[str, Any] = {}
        for name, encoding, data in zip(shard.column_names, shard.column_encodings, columns, strict=True):
            if name not in self.columns:
                continue
            decoder = None if self._raw else self._own.get(name) or decoder_of(encoding)
            sample[name] = data if decoder is None else _decoded(decoder, data, name)
        return sample if self.transform is None else self.transform(sample)

    # --- checks -----------------------------------------------------------------------------------------------

    def _compare(self, name: str, encoding: str) -> None:
        if name in self._own or name not in self.columns or decoder_of(encoding) is not None:
            return
        why = "a pickle, which can run any program" if encoding == "pkl" else f"of an unsupported encoding, {encoding}"
        raise UsageError(
            f"column {name!r} of {self.url} is {why}; name the columns without it (columns=), or give a function of "
            f"its bytes (decode={{{name!r}: ...}})"
        )

    def _warn(self, cache_bytes: int, memory_bytes: int) -> None:
        local = local_path(self.url) is not None
        whole = sum(shard.raw_data.bytes for shard in self._shards if self._is_whole(shard))
        copied = 0 if local else sum(shard.stored.bytes for shard in self._shards if shard.stored.md5)
        for option, size, limit in (("memory_bytes", whole, memory_bytes), ("cache_bytes", copied, cache_bytes)):
            if size > limit:
                warnings.warn(
                    f"{self.url} takes {size} bytes where {option} is {limit}: in a shuffled order most samples will "
                    f"read a whole shard; raise {option}, or use fewer of the shards",
                    stacklevel=3,
                )

    def _is_whole(self, shard: MdsShard) -> bool:
        """Returns True if the shard is read into memory as a whole."""
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
            raise ValueError(f"{url} places its sample {within} from {begin} to {end}, outside its samples")
        data = read(end - begin, begin)
        if len(data) != end - begin:
            raise torn(url, f"it ends within its sample {within}")
        return data

    def _reader(self, number: int, shard: MdsShard, url: str) -> Callable[[int, int], bytes]:
        """Returns a function `read(size, begin)` of the shard's bytes."""
        if not self._is_whole(shard):
            descriptor = self._copies.open(url, shard.stored.bytes, shard.stored.md5)
            return lambda size, begin: os.pread(descriptor, size, begin)
        whole = self._in_memory.get(number)
        if whole is None:
            whole = self._in_memory.put(number, self._whole(shard, url), shard.raw_data.bytes)
        return lambda size, begin: whole[begin : begin + size]

    def _whole(self, shard: MdsShard, url: str) -> bytes:
        if shard.raw_data.bytes > self._in_memory.limit_bytes:
            raise UsageError(
                f"shard {url} takes {shard.raw_data.bytes} bytes of memory, and memory_bytes is "
                f"{self._in_memory.limit_bytes}; raise it"
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
        raise  # the sample is not the cause
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error


def _decompressed(data: bytes, algorithm: str, most: int, url: str) -> bytes:
    """Returns the decompressed data, at most `most` + 1 bytes."""
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
            f"reading shards compressed with zstd needs pyarrow, which is not installed: {how_to_install('tables')}"
        ) from None
    with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
        return stream.read(most)
