"""What a dataset says of itself, to be equal in all workers of a run: pairs of a name and a value, by its `facts()`.

A dataset may have that method, or not. Those that torch wraps around others (`Subset`, `ConcatDataset`, `StackDataset`)
say what these say; one of the user's own that wraps another may do so by `facts_of`. A name under `likeness.DECODING`
is one of numerics: who differs is judged by the run's `--bits`. All others are the job's: who differs is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

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


def _parts(dataset: Any) -> Iterator[Any]:
    """The dataset itself where it has facts, else what torch has wrapped."""
    if callable(getattr(dataset, "facts", None)):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _parts(cast("Subset[Any]", dataset).dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        inner: Any = dataset.datasets
        for each in inner.values() if isinstance(inner, Mapping) else inner:
            yield from _parts(each)


def _said(dataset: Any) -> Iterable[tuple[str, str]]:
    said: Any = dataset.facts()
    pairs: list[Any] = list(said.items() if isinstance(said, Mapping) else said)
    for pair in pairs:
        if not (type(pair) is tuple and list(map(type, pair)) == [str, str]):
            raise UsageError(f"{type(dataset).__name__}.facts() gives {pair!r}: pairs (name, value) of texts are asked")
    return pairs
