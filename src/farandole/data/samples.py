"""Where each sample of a folder of shards lies, and what its bytes are: a table of four whole numbers a sample.

    offset, size    of the image within its shard, in bytes
    label           the class's number
    checksum        xxHash's XXH3 (64 bits) of the image as it is stored

`farandole data prepare` writes it as one file beside the index, 32 bytes a sample, little-endian, in the order of the
samples; the index has its MD5. It is mapped, not read: a table of 10^8 samples takes no memory of its own.

The checksum is looked at whenever a sample is read, wherever from: 1.2 us for 45 kB that are in the cache. It finds
what disks, copies and servers do to bytes, not what somebody does on purpose. What is on purpose is the index's
author's, who is believed in what a sample is, but not in how long a shard is: a row that leads out of its shard is
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.errors import UsageError
from farandole.platform.extras import how_to_install

NAME = "samples.bin"
COLUMNS = 4
ROW_BYTES = 8 * COLUMNS
OFFSET, SIZE, LABEL, CHECKSUM = range(COLUMNS)

Rows = npt.NDArray[np.int64]  # shape (samples, COLUMNS)


def require_xxhash() -> None:
    """Raises `UsageError` where it is not installed: before anything is begun, not at the first sample."""
    try:
        import xxhash  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError:
        raise UsageError(
            f"samples are checked with xxHash, which is not installed: {how_to_install('images')}"
        ) from None


def checksum(data: bytes | memoryview) -> int:
    """Of a sample as it is stored; signed, so that it fits into a row."""
    import xxhash

    unsigned: int = xxhash.xxh3_64_intdigest(data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def rows_of(content: Any, samples: int) -> Rows:
    """The table in `content`, which stays what it is.

    Raises:
        ValueError: it is none of so many samples.
    """
    found = memoryview(content).nbytes
    if found != samples * ROW_BYTES:
        raise ValueError(f"it has {found} bytes where {samples} samples take {samples * ROW_BYTES}")
    return np.frombuffer(content, dtype="<i8").reshape(samples, COLUMNS)


def to_bytes(rows: Rows) -> bytes:
    return np.ascontiguousarray(rows, dtype="<i8").tobytes()


def check(rows: Rows, length: int) -> None:
    """All of them lie in a shard of `length` bytes, and have a label.

    Raises:
        ValueError: one does not; names the first.
    """
    offset, size = rows[:, OFFSET], rows[:, SIZE]
    wrong = (offset < 0) | (size < 0) | (size > length) | (offset > length - size) | (rows[:, LABEL] < 0)
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"its sample {number} is said to lie at {offset[number]}, with {size[number]} bytes and label "
            f"{rows[number, LABEL]}, and the shard has {length} bytes"
        )
