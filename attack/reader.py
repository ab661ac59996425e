"""`python -m attack.reader FOLDER`: what a worker does with the files of `files.py`, and one line of JSON of what came.

A process of its own, so that what it took can be measured, and with a program `gs` on its PATH that leaves a mark.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from attack import files
from farandole.checkpoint import content
from farandole.checkpoint.store import DamagedError
from farandole.data.images import ShardedImages
from farandole.data.transforms import RandomResizedCrop
from farandole.errors import ShardError

MARK, PRECIOUS = "gs-was-called", "precious"


def main(folder: Path) -> dict[str, object]:
    """`read`: of what was given out that should not be, by name. `mib`: how much memory all of it took at most."""
    bait(folder)
    warnings.simplefilter("ignore")
    checkpoints = {name: make() for name, make in files.BAD_CHECKPOINTS.items()}
    shards = {name: make(folder) for name, make in files.BAD_SHARDS.items()}
    content.load(io.BytesIO(files.saved(files.honest())), "a good one")
    assert ShardedImages(files.images(folder / "good", [files.picture()]))[0][1] == 0
    before = _most_mib()
    read = [name for name, data in checkpoints.items() if not _damaged(lambda data=data: checkpoint(data))]
    read += [name for name, place in shards.items() if not _damaged(lambda place=place: shard(place))]
    mark = folder / MARK
    return {"tried": len(checkpoints) + len(shards), "read": read, "mib": _most_mib() - before, "called": mark.exists()}


def bait(folder: Path) -> None:
    """A `gs` that leaves a mark, and a file that is the reader's own."""
    program = folder / "bin" / "gs"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {folder / MARK}\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    (folder / PRECIOUS).write_bytes(b"of the reader\n" * 100)


def checkpoint(data: bytes) -> None:
    content.load(io.BytesIO(data), "x")


def shard(place: Path) -> None:
    """The last sample is the bad one; read as a PIL image, and by a transform that decodes for itself."""
    by_transform = ShardedImages(place, transform=RandomResizedCrop(8))
    if _damaged(lambda: by_transform[-1]):
        ShardedImages(place)[-1]


def _damaged(act: Callable[[], None]) -> bool:
    try:
        act()
    except (DamagedError, ShardError, ValueError, OSError):
        return True
    except Exception as error:  # noqa: BLE001  Pillow's own are of many kinds
        return type(error).__module__.startswith("PIL")
    return False


def _most_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).absolute())))
