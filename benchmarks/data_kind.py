"""What `benchmarks/data.py` lets take turns. Each kind of data has a file of its own, such as `data_images.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """`ours`: the contestants that each other one is compared with. `peers`: the environment (`make bench-peers`) that
    a contestant runs in. `warm_up`: batches before the clock runs; with none it runs from the contestant's beginning,
    over one pass. `beside`: what runs meanwhile, such as a server, given the data's folder.
    """

    make: Callable[[Path, Path | None, int], str]
    contestants: Mapping[str, Contestant]
    ours: tuple[str, ...]
    peers: Mapping[str, str] = field(default_factory=dict)
    warm_up: int = 12
    beside: Callable[[Path], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
