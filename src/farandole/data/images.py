"""Labelled images in tar files, in a folder or on S3, as a map-style dataset: any worker can read any sample directly.

The format is WebDataset's, which many tools write and read: tar files ("shards", not the shards of a step) of `KEY.jpg`
and `KEY.cls`, and the index `index.json` that the `wids` package defines, with each shard's number of samples, length
and MD5. `farandole data prepare` writes it, and so do WebDataset's own `ShardWriter` and `widsindex`.

Tried and not taken: MosaicML's MDS, whose package requires NumPy below 2.2, transformers, and the clients of four
clouds; the reader in `wids`, which downloads by shell commands (no fsspec, no limit on the cache, torn files stay) and
unpickles fields of a shard whose name asks for it.

`prepare` writes a table of the samples beside the index (`index.py`): so a sample of a shard that has no copy here can
be read. For shards without a table it is made here (`ShardTables`), once a machine, from the first copy that has the
index's MD5; Python's own `tarfile` reads the tar's contents, 90 us a sample.

Invariant: a sample has the bytes of its checksum, for any reader and any source, or it is an error that names shard,
file and sample. Neither checksum nor MD5 authenticates the author of a shard: so reading a shard allocates no more than
its length. Left out: samples with several images, labels other than an integer.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from farandole.data import object_store, transforms
from farandole.data.cache import DEFAULT_FOLDER, BadAtSource, Copies, torn
from farandole.data.cache_folder import RemoteFile, md5_of
from farandole.data.decoding import IMAGES, open_image, require_pillow
from farandole.data.facts import facts_of
from farandole.data.index import (
    COLUMNS,
    INDEX,
    LEAST,
    ROW_BYTES,
    UNREADABLE,
    Index,
    Rows,
    check,
    checksum,
    entries,
    mapped,
    read_index,
    require_xxhash,
    rows_of,
    to_bytes,
)
from farandole.data.object_store import DEADLINE_S
from farandole.data.order import derive
from farandole.data.transforms import Fit, picture_of
from farandole.errors import ShardError, UsageError

# --- contents ---------------------------------------------------------------------------------------------------------
#
# The table of a shard's samples (`index.py`): beside the index, or made from the tar's contents.
#
# If the index names no table, as with WebDataset's own tools, the table of a shard is made from the first copy that
# has the index's MD5, with checksums, and stored in the cache for all processes of the machine; it takes 90 us a
# sample. For this, a local shard is compared with its MD5, once.
#
# A tar's entries are trusted only within the length of the shard: an entry that claims more is a bad sample. So are all
# those after it, since their places are unknown.

BEYOND = -2  # offset of an image that lies beyond the end of its shard
_LONGEST_LABEL = 20  # bytes; 2^63 has 19 digits
_log = logging.getLogger(__name__)


class ShardTables:
    """The tables of all shards of a folder. Picklable.

    `has_samples_file`: the index names a table, so a sample's place is known without a copy of its shard.
    """

    def __init__(self, url: str, index: Index, copies: Copies) -> None:
        self._url, self._index, self._copies = url, index, copies
        self._firsts = [0, *np.cumsum([shard.nsamples for shard in index.shardlist]).tolist()]
        self.has_samples_file = index.samples is not None
        self._all: Rows | None = None
        self._each: dict[int, Rows] = {}
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_all": None, "_each": {}}  # each process maps the tables that it needs

    def row(self, shard: int, sample: int) -> list[int]:
        """Returns offset, size, label and checksum of a sample. `sample` counts through all shards; `shard` holds it.

        Raises:
            ShardError: there is no table, and none can be made.
        """
        if self.has_samples_file:
            if self._all is None:
                self._all = self._map()
            return self._all[sample].tolist()
        rows = self._each.get(shard)
        if rows is None:
            rows = self._each[shard] = self._of_shard(shard)
        return rows[sample - self._firsts[shard]].tolist()

    def _map(self) -> Rows:
        """Maps the table beside the index."""
        table, total = self._index.samples, self._firsts[-1]
        assert table is not None
        url = f"{self._url}/{table.url}"
        descriptor = self._copies.open(url, total * ROW_BYTES, table.md5sum)
        if self._copies.is_local(url) and md5_of(descriptor) != table.md5sum:
            raise torn(url, "its MD5 is not the one in the index")
        rows = rows_of(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), total)
        for number, shard in enumerate(self._index.shardlist):
            try:
                check(rows[self._firsts[number] : self._firsts[number + 1]], shard.filesize)
            except ValueError as error:
                raise torn(f"{self._url}/{shard.url}", f"according to {table.url}, {error}") from None
        return rows

    def _of_shard(self, number: int) -> Rows:
        shard = self._index.shardlist[number]
        file = RemoteFile(f"{self._url}/{shard.url}", shard.filesize, shard.md5sum)
        descriptor = self._copies.open(file.url, file.size, file.md5)
        if stored := self._copies.folder.table(file):
            try:
                return rows_of(stored, shard.nsamples)
            except ValueError:
                pass  # the table is made again
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s has no checksums of samples: they are computed from the first copy of each shard that has its MD5, "
                "and stored in %s", self._url, self._copies.folder.path,
            )  # fmt: skip
        if self._copies.is_local(file.url) and md5_of(descriptor) != file.md5:
            raise torn(file.url, "its MD5 is not the one in the index")
        rows = contents(descriptor, file.url, shard.nsamples)
        self._copies.folder.note_table(file, to_bytes(rows))
        return rows


def contents(descriptor: int, url: str, samples: int) -> Rows:
    """Returns the table of an open shard: for each sample the image's offset and size, the label, and the checksum.

    Raises:
        ShardError: it is no tar of images and labels, or has another number of samples.
    """
    rows: list[list[int]] = []
    last, length = "", os.fstat(descriptor).st_size
    if samples > length // LEAST:
        raise torn(url, f"it has {length} bytes, too few for the {samples} samples that the index says")
    try:
        with mapped(descriptor) as archive:
            for key, field, offset, size in entries(archive):
                if len(rows) > samples:
                    break
                if key != last:
                    rows.append([-1, 0, -1])
                    last = key
                if offset + size > length:
                    rows[-1] = [BEYOND, 0, 0]
                    rows += [[BEYOND, 0, 0] for _ in range(samples - len(rows))]
                    break
                if f".{field}" in IMAGES:
                    rows[-1][:2] = offset, size
                elif field == "cls":
                    rows[-1][2] = _label(os.pread(descriptor, min(size, _LONGEST_LABEL + 1), offset))
    except UNREADABLE as error:
        raise torn(url, f"it can't be read as a tar file of images and labels ({error})") from None
    if len(rows) != samples:
        raise torn(url, f"it has {len(rows)} samples where the index says {samples}")
    for number, row in enumerate(rows):
        if row[0] != BEYOND and min(row) < 0:
            raise torn(url, f"its sample {number} lacks {'an image' if row[0] < 0 else 'a label (KEY.cls)'}")
        row.append(0 if row[0] == BEYOND else checksum(os.pread(descriptor, row[1], row[0])))
    return np.array(rows, dtype=np.int64).reshape(samples, COLUMNS)


def _label(text: bytes) -> int:
    label = int(text)
    if len(text) > _LONGEST_LABEL or not 0 <= label < 1 << 63:
        raise ValueError(f"label {text[:_LONGEST_LABEL]!r} is not an integer from 0 to 2^63 - 1")
    return label


# --- images -----------------------------------------------------------------------------------------------------------


class ShardedImages(Dataset[tuple[Any, Any]]):
    """Samples `(transform(image), label)`: `image` is a PIL image in RGB, `label` is the index of its class.

    `farandole.RandomResizedCrop` and `farandole.Resize` get the file instead, and decode only the part that they need.

    Attributes:
        classes: names of the classes, by label; empty if the index has none.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        cache: str | os.PathLike[str] = DEFAULT_FOLDER,
        cache_bytes: int = 50 << 30,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Reads the index, nothing else. `url`: the folder that holds it, a path or a URL that fsspec knows.

        Remote shards are copied to the folder `cache`, of at most `cache_bytes`, which all processes of the machine
        share. Samples of shards for which there is no room are read one by one. `deadline_s`: the limit for one request
        to the store in seconds, all retries included.

        Raises:
            UsageError: Pillow or xxHash is not installed, or the kind of URL is unknown.
            ShardError: there is no index, or no valid one.
        """
        require_pillow()
        require_xxhash()
        self.url = os.fspath(url).rstrip("/")
        self.transform = transform
        self.target_transform = target_transform
        self._copies = Copies(cache, cache_bytes, deadline_s)
        self._copies.begin(self.url)
        index = read_index(f"{self.url}/{INDEX}")
        self.classes = index.classes
        self._files = [RemoteFile(f"{self.url}/{s.url}", s.filesize, s.md5sum) for s in index.shardlist]
        self._ends = list(accumulate(shard.nsamples for shard in index.shardlist))
        self._tables = ShardTables(self.url, index, self._copies)
        self._expecting = False

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Returns a sample. Raises `IndexError` if out of range, `ShardError` without its shard, Pillow's errors for a
        bad image.
        """
        data, label = self.read(index)
        if isinstance(self.transform, Fit):
            image: Any = self.transform(picture_of(data))
        else:
            with open_image(data) as opened:
                image = opened.convert("RGB")
            if self.transform is not None:
                image = self.transform(image)
        return image, self.target_transform(label) if self.target_transform is not None else label

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yields the decoders' versions and the transform's own `facts()`, which must be equal in all workers."""
        yield from transforms.facts(fast=isinstance(self.transform, Fit))
        yield from facts_of(self.transform).items()

    def read(self, index: int) -> tuple[bytes, int]:
        """Returns the image as it is stored, and its label.

        Raises:
            IndexError: out of range.
            ShardError: the shard can't be read, or this machine's is damaged.
            ValueError: the image is bad at its source, or lies beyond the shard's end according to the shard.
        """
        file, (offset, size, label, expected) = self._row(index)
        if offset == BEYOND:
            raise ValueError(
                f"shard {file.url}: it ends before this image, by the length that this or an earlier entry claims"
            )
        if not self._expecting:  # the caller has announced no order
            self.expect(np.array([index % len(self)]), shuffled=True)
        try:
            with object_store.time_reading():
                return self._copies.read(file, (offset, size), expected), label
        except (BadAtSource, ShardError) as error:
            name = self._copies.name(file, offset)
            raise type(error)(f"sample {index} of {self.url}, which is {name!r} of {file.url}: {error}") from None

    def _row(self, index: int) -> tuple[RemoteFile, list[int]]:
        """Returns a sample's shard, and its row of the table."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index %= length
        shard = bisect.bisect_right(self._ends, index)
        return self._files[shard], self._tables.row(shard, index)

    # --- hooks for the loader (`workers.hook`) -------------------------------------------------------------------

    def expect(self, samples: npt.NDArray[np.int64], *, shuffled: bool) -> None:
        """Announces the next samples of the order, shape (n,): their shards are prefetched. Does not wait.

        In a `shuffled` order all other shards are wanted after them.
        """
        self._expecting = True
        numbers = np.searchsorted(self._ends, samples, side="right")
        _, firsts = np.unique(numbers, return_index=True)
        shard_numbers = [int(number) for number in numbers[np.sort(firsts)]]
        if shuffled:
            listed = set(shard_numbers)
            shard_numbers += [number for number in range(len(self._files)) if number not in listed]
        self._copies.expect([self._files[number] for number in shard_numbers])

    def ahead(self, samples: npt.NDArray[np.int64]) -> None:
        """Requests these samples, shape (n,), if they have no copy here: all at once. Does not wait."""
        if not self._tables.has_samples_file:
            return
        pieces: list[tuple[RemoteFile, tuple[int, int]]] = []
        for sample in samples.tolist():
            file, (offset, size, _, _) = self._row(sample)
            if offset != BEYOND:
                pieces.append((file, (offset, size)))
        self._copies.ahead(pieces)

    def settle(self, at_most_s: float) -> bool:
        """Waits until the expected shards are here, as far as there is room. Returns False after `at_most_s` s."""
        return self._copies.settle(at_most_s)


# --- synthetic --------------------------------------------------------------------------------------------------------
#
# Synthetic images: for trying a script, and for timing one without any disk.
#
# A sample is the colour bands of its class plus noise. The noise is a slice of one long array; the sample's index
# determines its begin. So a sample depends on the index alone, is cheap (0.12 ms for 3x224x224 on one core, where
# drawing as many normal numbers takes 0.57), and a model can learn the classes. Left out: realism.

_SPARE = 65_521  # elements of noise beyond one sample: the number of possible begins
_BANDS = 7  # horizontal bands of a pattern, each of one colour


class Synthetic(Dataset[tuple[torch.Tensor, int]]):
    """Samples `(image, label)`: float32 of `shape`, channels first, of variance about 1; `0 <= label < classes`."""

    def __init__(
        self, length: int, shape: Sequence[int] = (3, 224, 224), classes: int = 1000, *, seed: int = 0
    ) -> None:
        """Raises `UsageError` for a length, a number of classes or an extent below 1."""
        if min(length, classes, *shape, len(shape)) < 1:
            raise UsageError(f"Synthetic({length}, {tuple(shape)}, {classes}): each must be at least 1")
        self.length, self.shape, self.classes, self.seed = length, tuple(shape), classes, seed
        generator = torch.Generator().manual_seed(derive(seed, "synthetic") >> 1)
        self._elements = torch.Size(self.shape).numel()
        self._noise = torch.randn(self._elements + _SPARE, generator=generator) * 0.9
        rows = torch.randn(classes, self.shape[0], _BANDS, generator=generator) * 0.44
        if len(self.shape) == 1:
            self._patterns = rows[..., 0]
        else:
            band = torch.arange(self.shape[1]) * _BANDS // self.shape[1]
            self._patterns = rows[..., band].view(classes, *self.shape[:2], *(1 for _ in self.shape[2:]))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not -self.length <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        index %= self.length
        begin = derive(self.seed, "begin", index) % _SPARE
        label = derive(self.seed, "label", index) % self.classes
        noise = self._noise[begin : begin + self._elements]
        return noise.view(self.shape) + self._patterns[label], label

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_synthetic, (self.length, self.shape, self.classes, self.seed)  # without its megabytes of noise


def _rebuild_synthetic(length: int, shape: tuple[int, ...], classes: int, seed: int) -> Synthetic:
    return Synthetic(length, shape, classes, seed=seed)
