"""What `benchmarks/data.py` lets take turns. Each kind of data has a file of its own, such as `data_images.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where the data lies: `folder/raw`, as others take it, and `folder/shards`, made of the same."""

    folder: str
    side: int  # pixels, of what comes out
    batch: int  # samples

    @property
    def raw(self) -> str:
        return f"{self.folder}/raw"

    @property
    def shards(self) -> str:
        return f"{self.folder}/shards"


Contestant = Callable[[Here], Iterator[Any]]  # the versions in one line, then what has `len()` samples


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[[Path, Path | None, int], str]
    contestants: dict[str, Contestant]
