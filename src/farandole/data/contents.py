"""The table of a shard's samples (`samples.py`): beside the index, or made of the tar's own contents.

Where the index names none, as WebDataset's own tools leave it, the table of a shard is made of the first copy that has
the index's MD5, checksums and all, and noted in the cache for all processes of the machine; it takes 90 us a sample. A
local shard is compared with its MD5 for that, once.

A tar's table of contents is believed no further than the shard is long: an entry that claims more is a bad sample, as
those behind it are, which nobody can find.
"""

from __future__ import annotations

import logging
import mmap
import os
from typing import Any

import numpy as np

from farandole.data.cache import Copies, torn
from farandole.data.decoding import IMAGES
from farandole.data.index import Index
from farandole.data.keeping import File
from farandole.data.samples import COLUMNS, ROW_BYTES, Rows, check, checksum, rows_of, to_bytes
from farandole.data.tars import LEAST, UNREADABLE, entries, mapped
from farandole.data.verification import md5_of

BEYOND = -2  # where an image lies that the shard does not have
_LONGEST_LABEL = 20  # bytes; 2^63 has 19 digits
_log = logging.getLogger(__name__)


class Tables:
    """Of all shards of a folder. Picklable.

    `known`: the index names a table, so nothing has to be here for a sample's place to be known.
    """

    def __init__(self, url: str, index: Index, copies: Copies) -> None:
        self._url, self._index, self._copies = url, index, copies
        self._firsts = [0, *np.cumsum([shard.nsamples for shard in index.shardlist]).tolist()]
        self.known = index.samples is not None
        self._all: Rows | None = None
        self._each: dict[int, Rows] = {}
        self._told = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_all": None, "_each": {}}  # each process maps what it needs

    def row(self, shard: int, sample: int) -> list[int]:
        """Of that sample of all, which is in that shard: offset, size, label, checksum.

        Raises:
            ShardError: there is no table, and none can be made.
        """
        if self.known:
            if self._all is None:
                self._all = self._map()
            return self._all[sample].tolist()
        rows = self._each.get(shard)
        if rows is None:
            rows = self._each[shard] = self._of_shard(shard)
        return rows[sample - self._firsts[shard]].tolist()

    def _map(self) -> Rows:
        """The table beside the index."""
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
                raise torn(f"{self._url}/{shard.url}", f"by {table.url}, {error}") from None
        return rows

    def _of_shard(self, number: int) -> Rows:
        shard = self._index.shardlist[number]
        file = File(f"{self._url}/{shard.url}", shard.filesize, shard.md5sum)
        descriptor = self._copies.open(file.url, file.size, file.md5)
        if noted := self._copies.folder.table(file):
            try:
                return rows_of(noted, shard.nsamples)
            except ValueError:
                pass  # it is made again
        if not self._told:
            self._told = True
            _log.warning(
                "%s has no checksums of samples: they are made of the first copy of each shard that has its MD5, "
                "and kept in %s", self._url, self._copies.folder.path,
            )  # fmt: skip
        if self._copies.is_local(file.url) and md5_of(descriptor) != file.md5:
            raise torn(file.url, "its MD5 is not the one in the index")
        rows = contents(descriptor, file.url, shard.nsamples)
        self._copies.folder.note_table(file, to_bytes(rows))
        return rows


def contents(descriptor: int, url: str, samples: int) -> Rows:
    """Of a shard that is open: where each sample's image lies, how long it is, its label, and its checksum."""
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
        raise ValueError(f"label {text[:_LONGEST_LABEL]!r}: a whole number from 0 to 2^63 - 1")
    return label
