"""Labelled images in tar files, in a folder or on S3, as a map-style dataset: any worker reaches any sample at once.

The format is WebDataset's, which many tools write and read: tar files ("shards", not to be confused with a step's) of
`KEY.jpg` and `KEY.cls`, and the index `index.json` that the `wids` package defines, with each shard's number of
samples, length and MD5. `farandole data prepare` makes it, and so do WebDataset's own `ShardWriter` and `widsindex`.

Tried and not taken: MosaicML's MDS, whose package asks for NumPy below 2.2, transformers, and the clients of four
clouds; the reader in `wids`, which downloads by shell commands (no fsspec, no limit on the cache, torn files stay) and
unpickles what a shard holds if its name says so. A tar's table of contents is read by Python's own `tarfile`, 90 us
a sample, once a process; a sample is then one `pread`, 3.5 us for 9 kB, before decoding.

Invariant: a sample is what the index's MD5 vouches for, or an error that names the shard. (Local shards are compared by
length alone; `prepare` compares their MD5.) An MD5 says nothing of who made a shard: so reading one allocates no more
than the shard is long, and an entry that claims more is a bad sample, as those behind it are, which nobody can find.
Left out: samples with several images, labels other than an integer.
"""

from __future__ import annotations

import bisect
import mmap
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from farandole.data import pictures
from farandole.data.cache import DEFAULT_FOLDER, Copies, filesystem, local_path, torn
from farandole.data.decoding import IMAGES, open_image, require_pillow
from farandole.data.facts import facts_of
from farandole.data.index import INDEX, MAX_INDEX_BYTES, Index
from farandole.data.pictures import picture_of
from farandole.data.transforms import Fit
from farandole.errors import ShardError

_LONGEST_LABEL = 20  # bytes; 2^63 has 19 digits
_BEYOND = -2  # where an image lies that the shard does not have


class ShardedImages(Dataset[tuple[Any, Any]]):
    """Samples `(transform(image), label)`: `image` a PIL image in RGB, `label` its class's index.

    `farandole.RandomResizedCrop` and `farandole.Resize` are given the file instead, and decode what they need of it.

    Attributes:
        classes: names of the classes, by label; empty where the index has none.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        cache: str | os.PathLike[str] = DEFAULT_FOLDER,
        cache_bytes: int = 50 << 30,
    ) -> None:
        """Reads the index, nothing else. `url`: the folder that holds it, a path or a URL that fsspec knows.

        Shards that are not on this machine are kept in the folder `cache`, of at most `cache_bytes`, which all
        processes of the machine share. A shuffled order visits all shards all the time: a cache smaller than the data
        fetches a shard for almost every sample, and says so in a warning.

        Raises:
            UsageError: Pillow is not installed, or there is no such place.
            ShardError: no index there, or not one that can be used.
        """
        require_pillow()
        self.url = os.fspath(url).rstrip("/")
        self.transform = transform
        self.target_transform = target_transform
        index = _read(self.url)
        self.classes = index.classes
        self._shards = index.shardlist
        self._ends = list(accumulate(shard.nsamples for shard in self._shards))
        self._contents: dict[int, npt.NDArray[np.int64]] = {}
        self._copies = Copies(cache, cache_bytes)
        total = sum(shard.filesize for shard in self._shards)
        if local_path(self.url) is None and total > cache_bytes:
            warnings.warn(
                f"{self.url} holds {total} bytes and its cache at most {cache_bytes}: in a shuffled order most samples "
                f"will fetch a whole shard; raise cache_bytes, or use fewer of the shards",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": {}}  # each process reads those that it needs

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Raises `IndexError` out of range, `ShardError` without the shard, Pillow's errors for a bad image."""
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
        """What decodes, and what the transform says of itself by its own `facts()`: to be equal in all workers."""
        yield from pictures.facts(fast=isinstance(self.transform, Fit))
        yield from facts_of(self.transform).items()

    def read(self, index: int) -> tuple[bytes, int]:
        """The image as it is stored, and its label.

        Raises:
            IndexError: out of range.
            ShardError: without the shard.
            ValueError: the shard says that it lies beyond the shard's end.
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
        offset, size, label = contents[index - self._ends[number] + shard.nsamples].tolist()
        if offset == _BEYOND:
            raise ValueError(
                f"shard {url}: it ends before this image does, by the length that this entry or one before it claims"
            )
        data = os.pread(descriptor, size, offset)
        if len(data) != size:
            raise torn(url, f"it ends within sample {index}")
        return data, label


def _read(url: str) -> Index:
    place = f"{url}/{INDEX}"
    files, path = filesystem(place)
    try:
        length = files.size(path) or 0  # not every server says
        if length > MAX_INDEX_BYTES:
            raise ShardError(f"{place} has {length} bytes, and an index at most {MAX_INDEX_BYTES}; make larger shards")
        index = msgspec.json.decode(files.cat_file(path), type=Index)
    except FileNotFoundError:
        raise ShardError(
            f"{place} is not there; `farandole data prepare` writes it last, so run it to its end"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{place} is no index of WebDataset shards: {error}") from None
    except ShardError:
        raise
    except Exception as error:
        raise ShardError(
            f"{place} can't be read ({type(error).__name__}: {error}); see that it can be reached from here"
        ) from error
    if sum(shard.nsamples for shard in index.shardlist) == 0:
        raise ShardError(f"{place} names no samples")
    return index


def _contents(descriptor: int, url: str, samples: int) -> npt.NDArray[np.int64]:
    """Where each sample's image lies in a shard, how long it is, and its label; shape `(samples, 3)`, 24 bytes each."""
    rows: list[list[int]] = []
    last, end, length = "", 0, os.fstat(descriptor).st_size
    try:
        # mapped: a descriptor's position is shared with the processes that were forked since it was opened
        with (
            mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file,
            tarfile.open(fileobj=cast(Any, file), mode="r:") as archive,
        ):
            for member in archive:
                if member.size < 0 or member.offset_data <= end:
                    raise ValueError(f"entry {member.name!r} leads back")
                end = member.offset_data
                if len(rows) > samples:
                    break
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if (key := f"{folder}/{stem}") != last:
                    rows.append([-1, 0, -1])
                    last = key
                if end + member.size > length:
                    rows[-1] = [_BEYOND, 0, 0]
                    rows += [[_BEYOND, 0, 0]] * (samples - len(rows))
                    break
                if f".{extension.lower()}" in IMAGES:
                    rows[-1][:2] = member.offset_data, member.size
                elif extension == "cls":
                    rows[-1][2] = _label(os.pread(descriptor, min(member.size, _LONGEST_LABEL + 1), end))
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise torn(url, f"it can't be read as a tar file of images and labels ({error})") from None
    if len(rows) != samples:
        raise torn(url, f"it has {len(rows)} samples where the index says {samples}")
    for number, row in enumerate(rows):
        if row[0] != _BEYOND and min(row) < 0:
            raise torn(url, f"its sample {number} lacks {'an image' if row[0] < 0 else 'a label (KEY.cls)'}")
    return np.array(rows, dtype=np.int64)


def _label(text: bytes) -> int:
    label = int(text)
    if len(text) > _LONGEST_LABEL or not 0 <= label < 1 << 63:
        raise ValueError(f"label {text[:_LONGEST_LABEL]!r}: a whole number from 0 to 2^63 - 1")
    return label
