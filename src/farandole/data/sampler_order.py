"""The order of a torch sampler or batch sampler, which every worker lists for itself, so that no index is sent.

An epoch begins with random state from (run's seed, epoch): torch's, NumPy's and Python's global generators, and those
among the sampler's attributes. `set_epoch(epoch)` is called if the sampler, or one that it wraps, has it. Then its
indices are listed. So the list depends on the seed and the epoch alone, and a joiner or a resumed run has the same one.
All generators get their previous state back, because workers list an epoch at different moments.

A sampler must have a length, and may repeat or omit samples. A batch sampler may have another number of batches, and of
samples, in each epoch. `SamplerOrder.digest` belongs to the signature of a worker: one whose sampler gives another
first epoch is refused.

Cost: 8 bytes an index for each of `_KEPT` epochs in each process that reads samples, and the time of one iteration over
the sampler at the beginning of an epoch; three of them when the loader is made.

Left out: samplers that keep state from one iteration to the next, and keys other than integers. Both are refused.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farandole.data.order import (
    RandomGenerator,
    check_range,
    derive,
    keep_random_state,
    own_generators,
    seed_all,
    set_random_state,
)
from farandole.errors import UsageError

_KEPT = 2  # epochs: the present one, and the next, which is prefetched
_Listing = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]  # indices, and the ends of the batches


class SamplerOrder:
    """The order in which `sampler` visits the `samples` samples of a dataset; made for one run with its `seed`.

    Attributes:
        length: the number of indices in epoch 0; of a plain sampler, in each epoch.
        batches: the number of batches in epoch 0, each of which is a step; 0 if the batch policy makes the batches.
        largest: the number of indices in the largest batch of epoch 0; 0 without batches.
        digest: the first 16 hex digits of a SHA-256 over epoch 0.
        shuffle: True: no assumption is possible about which samples are neighbours.
    """

    shuffle = True

    def __init__(self, sampler: Any, samples: int, *, seed: int, batches: bool = False) -> None:
        """List the first two epochs. `batches`: `sampler` yields lists of indices, and each is the batch of one step.

        Raises:
            UsageError: the sampler can't be taken over; says what it lacks.
        """
        self.seed = seed
        self._sampler, self._samples, self._batches = sampler, samples, batches
        self._kind = type(sampler).__name__
        self._lists: dict[int, _Listing] = {}
        _check(sampler, self._kind)
        first, second = self._listed(0), self._listed(1)
        if not _equal(first, self._listed(0)):
            raise UsageError(
                f"run.loader: two iterations over the {self._kind} give different orders for the same epoch and random "
                f"state, so it keeps state between them; draw its numbers from torch's global generator or its own "
                f"`generator`, or derive the order from the epoch in set_epoch(epoch)"
            )
        self._lists = {0: first, 1: second}
        self.length = len(first[0])
        self.batches = 0 if first[1] is None else len(first[1])
        self.largest = 0 if first[1] is None else int(np.diff(first[1], prepend=0).max())
        digest = hashlib.sha256()
        for array in first:
            digest.update(b"" if array is None else array.astype("<i8").tobytes())
        self.digest = digest.hexdigest()[:16]
        if len(second[0]) != self.length and not batches:
            raise self._of_another_length(1, len(second[0]))

    def __str__(self) -> str:
        return f"that of a {self._kind}, first epoch {self.digest}"

    def batches_in(self, epoch: int) -> int:
        """Returns the number of batches in `epoch`; 0 if the batch policy makes the batches."""
        ends = self._epoch(epoch)[1]
        return 0 if ends is None else len(ends)

    def length_in(self, epoch: int) -> int:
        """Returns the number of indices in `epoch`."""
        return len(self._epoch(epoch)[0])

    def samples(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns a new array of the indices at positions [start, stop) of `epoch`; shape `(stop - start,)`, int64."""
        indices = self._epoch(epoch)[0]
        check_range(epoch, start, stop, len(indices))
        return indices[start:stop].copy()

    def draws(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns a number for each of these positions, from which its random state is derived.

        It is the position: a sample that is drawn twice in an epoch gets two different augmentations.
        """
        check_range(epoch, start, stop, self.length_in(epoch))
        return np.arange(start, stop, dtype=np.int64)

    def batch(self, epoch: int, start: int) -> tuple[int, int]:
        """Returns how many batches of `epoch` lie before position `start`, and where the one that begins there ends."""
        ends = self._epoch(epoch)[1]
        assert ends is not None
        number = int(np.searchsorted(ends, start, side="right"))
        return number, int(ends[number]) if number < len(ends) else start

    def _epoch(self, epoch: int) -> _Listing:
        if epoch not in self._lists:
            listing = self._listed(epoch)
            if len(listing[0]) != self.length and not self._batches:
                raise self._of_another_length(epoch, len(listing[0]))
            for old in sorted(self._lists, key=lambda each: abs(each - epoch))[_KEPT - 1 :]:
                del self._lists[old]
            self._lists[epoch] = listing
        return self._lists[epoch]

    def _listed(self, epoch: int) -> _Listing:
        generators = own_generators(self._sampler)
        put_back: list[Callable[[], object]] = [keep_random_state(), *map(_keep, generators)]
        try:
            value = derive(self.seed, "sampler", epoch)
            set_random_state(value)
            seed_all(generators, value)
            for each in _chain(self._sampler):
                if callable(getattr(each, "set_epoch", None)):
                    each.set_epoch(epoch)
            return self._list(epoch)
        finally:
            for restore in put_back:
                restore()

    def _list(self, epoch: int) -> _Listing:
        length = len(self._sampler)
        entries = list(islice(iter(self._sampler), length + 1))
        what = "batches" if self._batches else "indices"
        if len(entries) > length:
            raise UsageError(
                f"run.loader: the {self._kind} has len() {length}, and yields more {what} than that in epoch {epoch}; "
                f"its __len__() must return how many it yields at most in an epoch"
            )
        if not entries:
            raise UsageError(f"run.loader: the {self._kind} yields no {what} in epoch {epoch}; it must yield some")
        if not self._batches:
            return self._indices(entries, epoch), None
        lists = [self._indices(self._entries(batch, epoch), epoch) for batch in entries]
        return np.concatenate(lists), np.cumsum([len(batch) for batch in lists], dtype=np.int64)

    def _entries(self, batch: Any, epoch: int) -> list[Any]:
        entries: list[Any] = list(batch) if isinstance(batch, Iterable) else []
        if not entries:
            raise UsageError(
                f"run.loader: the {self._kind} yields the batch {batch!r:.100} in epoch {epoch}; each batch must be a "
                f"list of at least one index"
            )
        return entries

    def _indices(self, entries: list[Any], epoch: int) -> npt.NDArray[np.int64]:
        try:
            indices = np.fromiter(map(operator.index, entries), dtype=np.int64, count=len(entries))
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"run.loader: the {self._kind} yields something that is no index in epoch {epoch} ({error}); it must "
                f"yield integers from 0 to {self._samples - 1}"
            ) from error
        for wrong in indices[(indices < 0) | (indices >= self._samples)][:1]:
            raise UsageError(
                f"run.loader: the {self._kind} yields index {wrong} in epoch {epoch}, and the dataset has "
                f"{self._samples} samples, 0 to {self._samples - 1}; correct the sampler"
            )
        return indices

    def _of_another_length(self, epoch: int, length: int) -> UsageError:
        return UsageError(
            f"run.loader: the {self._kind} yields {self.length} indices in epoch 0 and {length} in epoch {epoch}; a "
            f"sampler must yield as many in each epoch, and a batch sampler may yield other numbers"
        )


def _check(sampler: Any, kind: str) -> None:
    """Raise UsageError if `sampler` has no length, or is one of several for the ranks of a process group."""
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"run.loader: the {kind} has no __len__(), so nothing says where an epoch ends; give it a __len__() that "
            f"returns how many it yields in an epoch"
        )
    for each in _chain(sampler):
        replicas = getattr(each, "num_replicas", 1)
        if replicas != 1:
            raise UsageError(
                f"run.loader: the {type(each).__name__} has num_replicas={replicas}, so it yields one rank's part of "
                f"an epoch; make it with num_replicas=1, rank=0: the workers divide each batch among them"
            )


def _chain(sampler: Any) -> Iterator[Any]:
    """Yield `sampler`, and the samplers that it wraps, the outermost first."""
    visited: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is other for other in visited):
            visited.append(each)
            yield each
            waiting += [getattr(each, name, None) for name in ("sampler", "batch_sampler")]


def _keep(generator: RandomGenerator) -> Callable[[], object]:
    """Return a function that gives `generator` its present state back."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return partial(generator.set_state, state)
    if isinstance(generator, np.random.Generator):
        bits, kept = generator.bit_generator, generator.bit_generator.state
        return partial(setattr, bits, "state", kept)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _equal(one: _Listing, two: _Listing) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(one, two, strict=True)
    )
