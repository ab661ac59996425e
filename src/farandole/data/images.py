"""Labelled images in tar files, in a folder or on S3, as a map-style dataset: any worker reaches any sample at once.

The format is WebDataset's, which many tools write and read: tar files ("shards", not to be confused with a step's) of
`KEY.jpg` and `KEY.cls`, and the index `index.json` that the `wids` package defines, with each shard's number of
samples, length and MD5. `farandole data prepare` makes it, and so do WebDataset's own `ShardWriter` and `widsindex`.

Tried and not taken: MosaicML's MDS, whose package asks for NumPy below 2.2, transformers, and the clients of four
clouds; the reader in `wids`, which downloads by shell commands (no fsspec, no limit on the cache, torn files stay) and
unpickles what a shard holds if its name says so.

What `prepare` makes has a table of its samples beside the index (`samples.py`): so a sample can be read of a shard that
is not here. Of shards without one it is made here, once a machine, of the first copy that has the index's MD5; a tar's
contents are read by Python's own `tarfile`, 90 us a sample. (`contents.py`)

Invariant: a sample is what its checksum vouches for, whoever reads it and wherever from, or an error that names shard,
file and sample. Neither checksum nor MD5 says who made a shard: so reading one allocates no more than the shard is
long. Left out: samples with several images, labels other than an integer.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from farandole.data import pictures, store_clock
from farandole.data.cache import DEFAULT_FOLDER, BadAtSource, Copies
from farandole.data.contents import BEYOND, Tables
from farandole.data.decoding import open_image, require_pillow
from farandole.data.facts import facts_of
from farandole.data.index import INDEX, read_index
from farandole.data.keeping import File
from farandole.data.pictures import picture_of
from farandole.data.samples import require_xxhash
from farandole.data.store import DEADLINE_S
from farandole.data.transforms import Fit
from farandole.errors import ShardError


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
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Reads the index, nothing else. `url`: the folder that holds it, a path or a URL that fsspec knows.

        Shards that are not on this machine are kept in the folder `cache`, of at most `cache_bytes`, which all
        processes of the machine share; of those for which there is no room, samples are read one by one. `deadline_s`:
        how long the store may take for a request, with all that is tried again.

        Raises:
            UsageError: Pillow is not installed, or there is no such place.
            ShardError: no index there, or not one that can be used.
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
        self._files = [File(f"{self.url}/{s.url}", s.filesize, s.md5sum) for s in index.shardlist]
        self._ends = list(accumulate(shard.nsamples for shard in index.shardlist))
        self._tables = Tables(self.url, index, self._copies)
        self._expecting = False

    def __len__(self) -> int:
        return self._ends[-1]

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
            ShardError: without the shard, or where this machine's is damaged.
            ValueError: it is bad at its source, or the shard says that it lies beyond the shard's end.
        """
        file, (offset, size, label, expected) = self._row(index)
        if offset == BEYOND:
            raise ValueError(
                f"shard {file.url}: it ends before this image does, by the length that this or an earlier entry claims"
            )
        if not self._expecting:  # whoever reads it knows no order
            self.expect(np.array([index % len(self)]), shuffled=True)
        try:
            with store_clock.reading():
                return self._copies.read(file, (offset, size), expected), label
        except (BadAtSource, ShardError) as error:
            name = self._copies.name(file, offset)
            raise type(error)(f"sample {index} of {self.url}, which is {name!r} of {file.url}: {error}") from None

    def _row(self, index: int) -> tuple[File, list[int]]:
        """A sample's shard, and its row of the table."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        index %= length
        shard = bisect.bisect_right(self._ends, index)
        return self._files[shard], self._tables.row(shard, index)

    # --- what a loader says --------------------------------------------------------------------------------------

    def expect(self, samples: npt.NDArray[np.int64], *, shuffled: bool) -> None:
        """The order comes to these next, shape (n,): their shards are copied ahead of need. Does not wait.

        In a `shuffled` order all other shards are wanted after them.
        """
        self._expecting = True
        numbers = np.searchsorted(self._ends, samples, side="right")
        _, firsts = np.unique(numbers, return_index=True)
        wanted = [int(number) for number in numbers[np.sort(firsts)]]
        if shuffled:
            known = set(wanted)
            wanted += [number for number in range(len(self._files)) if number not in known]
        self._copies.expect([self._files[number] for number in wanted])

    def ahead(self, samples: npt.NDArray[np.int64]) -> None:
        """These are read next, all of them, shape (n,): what is not here comes at once, not one after the other."""
        if not self._tables.known:
            return
        wanted: list[tuple[File, tuple[int, int]]] = []
        for sample in samples.tolist():
            file, (offset, size, _, _) = self._row(sample)
            if offset != BEYOND:
                wanted.append((file, (offset, size)))
        self._copies.ahead(wanted)

    def settle(self, at_most_s: float) -> bool:
        """Wait until the shards that are expected are here, as far as there is room. False: it takes longer."""
        return self._copies.settle(at_most_s)
