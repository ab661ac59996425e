"""Contestants of `benchmarks/data.py tokens`: shuffled windows of 1,024 tokens of one file (`tokens.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from data_kind import PROCESSES, Here, Kind
from tokens import Draw, Memmap, by_hand, data_loader, farandole, written

LENGTH = 1024


def _ours(here: Here) -> Draw:
    from farandole.data.tokens import Tokens
    from farandole.training.run_state import keep_freed_memory

    keep_freed_memory()  # as `farandole.join()` does
    return farandole(Tokens(here.folder, LENGTH), here.batch, PROCESSES)


def _data_loader(here: Here) -> Draw:
    return data_loader(Memmap(Path(here.folder, "shard.bin"), LENGTH), here.batch, PROCESSES)


def _by_hand(here: Here) -> Draw:
    return by_hand(Path(here.folder, "shard.bin"), LENGTH, here.batch)


def _batches(here: Here, *, of: Callable[[Here], Draw]) -> Iterator[Any]:
    yield f"torch {metadata.version('torch')}, NumPy {metadata.version('numpy')}"
    draw = of(here)
    while True:
        draw(10 * here.batch)
        yield range(10 * here.batch)


def _make(folder: Path, _: Path | None, __: int) -> str:
    written(folder)
    return f"windows of {LENGTH} of 50 million tokens"


TOKENS = Kind(
    make=_make,
    contestants={
        "farandole": functools.partial(_batches, of=_ours),
        "DataLoader over a memmap": functools.partial(_batches, of=_data_loader),
        "gathered by hand, no loader": functools.partial(_batches, of=_by_hand),
    },
    ours=("farandole",),
)
