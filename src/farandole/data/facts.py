"""What a dataset says of itself, to be equal in all workers of a run: pairs of a name and a value, by its `facts()`.

A dataset may have that method, or not. Those that torch wraps around others (`Subset`, `ConcatDataset`, `StackDataset`)
say what these say; one of the user's own that wraps another may do so by `facts_of`. A name under `likeness.DECODING`
is one of numerics: who differs is judged by the run's `--bits`. All others are the job's: who differs is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset

from farandole.errors import UsageError

Facts = dict[str, str]


def facts_of(dataset: Any) -> Facts:
    """By name; where several parts give different values under one name, all of them in their order.

    Raises:
        UsageError: `facts()` gives something else than pairs of texts.
    """
    found: dict[str, list[str]] = {}
    for part in _parts(dataset):
        for name, value in _said(part):
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: "; ".join(values) for name, values in found.items()}


def picked(dataset: Any) -> str:
    """A digest of the samples that `Subset`s pick, "" without any: another split has others, as many."""
    digest = hashlib.sha256()
    found = list(subsets(dataset))
    for subset in found:
        digest.update(np.asarray(subset.indices, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16] if found else ""


def subsets(dataset: Any) -> Iterator[Subset[Any]]:
    """All `Subset`s in it, the outermost first."""
    if isinstance(dataset, Subset):
        yield cast("Subset[Any]", dataset)
        yield from subsets(cast("Subset[Any]", dataset).dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        for inner in _inner(dataset):
            yield from subsets(inner)


def _inner(dataset: Any) -> Iterable[Any]:
    inner: Any = dataset.datasets
    return inner.values() if isinstance(inner, Mapping) else inner


def _parts(dataset: Any) -> Iterator[Any]:
    """The dataset itself where it has facts, else what torch has wrapped."""
    if callable(getattr(dataset, "facts", None)):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _parts(cast("Subset[Any]", dataset).dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        for each in _inner(dataset):
            yield from _parts(each)


def _said(dataset: Any) -> Iterable[tuple[str, str]]:
    said: Any = dataset.facts()
    pairs: list[Any] = list(said.items() if isinstance(said, Mapping) else said)
    for pair in pairs:
        if not (type(pair) is tuple and list(map(type, pair)) == [str, str]):
            raise UsageError(f"{type(dataset).__name__}.facts() gives {pair!r}: pairs (name, value) of texts are asked")
    return pairs
