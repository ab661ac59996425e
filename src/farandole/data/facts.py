"""The facts of a dataset, which must be equal in all workers of a run: pairs (name, value), from its `facts()` method.

The method is optional. torch's wrappers (`Subset`, `ConcatDataset`, `StackDataset`) have the facts of the datasets that
they wrap; a user's own wrapper may get these by `facts_of`. A name that begins with `numeric_facts.DECODING` is one of
numerics: the run's `--bits` decides about a worker that differs in it. All other names are facts of the job: a worker
that differs is refused.
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
    """Returns the facts of `dataset`, by name. If parts give different values for a name, joins them in their order.

    Raises:
        UsageError: `facts()` returns anything else than pairs of strings.
    """
    facts: dict[str, list[str]] = {}
    for part in _parts(dataset):
        for name, value in _pairs(part):
            if value not in facts.setdefault(name, []):
                facts[name].append(value)
    return {name: "; ".join(values) for name, values in facts.items()}


def picked(dataset: Any) -> str:
    """Returns a digest of the indices of all `Subset`s, "" without any: another split may have the same length."""
    digest = hashlib.sha256()
    all_subsets = list(subsets(dataset))
    for subset in all_subsets:
        digest.update(np.asarray(subset.indices, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16] if all_subsets else ""


def subsets(dataset: Any) -> Iterator[Subset[Any]]:
    """Yields all `Subset`s within `dataset`, the outermost first."""
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
    """Yields the dataset itself if it has facts, else those that torch's wrappers wrap."""
    if callable(getattr(dataset, "facts", None)):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _parts(cast("Subset[Any]", dataset).dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        for each in _inner(dataset):
            yield from _parts(each)


def _pairs(dataset: Any) -> Iterable[tuple[str, str]]:
    facts: Any = dataset.facts()
    pairs: list[Any] = list(facts.items() if isinstance(facts, Mapping) else facts)
    for pair in pairs:
        if not (type(pair) is tuple and list(map(type, pair)) == [str, str]):
            raise UsageError(
                f"{type(dataset).__name__}.facts() gives {pair!r}: it must give pairs (name, value) of strings"
            )
    return pairs
