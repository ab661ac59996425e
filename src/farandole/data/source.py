"""How one micro-batch is made: the part of the loader that runs in the training process or in a loader process alike.

A micro-batch is a function of its key, whichever worker and process makes it:

- its samples come from the order; random state is set before each from (seed, epoch, sample), and before a collate
  function of the user's own from (seed, epoch, start);
- torch computes on one thread, as loader processes do anyway: the number of threads shows in the last bits of a sum;
- what `default_collate` makes is contiguous. It gives samples in channels-last memory other strides in a loader process
  than in the training process, and strides choose a convolution's kernel;
- CPU tensors are 64-byte aligned (`aligned`), which also shows in last bits.

A plain `TensorDataset` draws nothing, so its rows are taken by the whole id vector: 43 us for 64 rows of 784 values
where going sample by sample takes 0.85 ms, with the same bits and strides.

Other datasets whose samples draw nothing may do the same by a method

    gather(samples) -> batch        samples: (n,) int64, each from 0 to len(dataset) - 1

which gives what torch's `default_collate` would make of these samples: the same containers, values, dtypes and strides.
It is asked where there is no collate function of the user's own, also through torch's `Subset`, and no random state is
set for it. It counts only if it belongs to the dataset's `__getitem__`: a subclass that overrides that alone, and a
wrapper that passes other attributes on, are asked for their samples. Where it raises, its samples are asked for one by
one, so that the bad one is named, or left out.

`ProcessStart` makes loader processes mortal: as orphans they would hold a dead worker's sockets open and hide its death
from its peers. On Linux the kernel kills them with the thread that started them. Everywhere, and under a fork server,
whose children the kernel counts as the server's, a thread of theirs waits for the training process's end. They ignore
SIGINT and SIGTERM: a notice is the training process's to act on, and it must be fed until it has left. DataLoader ends
stuck processes by SIGTERM, one after the other with 10 seconds for each; `stop` ends all of them within one.

Left out: `__getitems__` (random state is per sample), alignment of NumPy arrays in a batch.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sized
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from farandole.data import store_clock
from farandole.data.epochs import Epochs, warn_of_own_changes
from farandole.data.hooks import hook
from farandole.data.order import Order
from farandole.data.own_generators import own_generators, seed_all
from farandole.data.prefetch import Key
from farandole.data.seeding import derive, set_random_state
from farandole.data.sending import sendable, wrapped
from farandole.data.slots import ALIGNMENT, Slots, is_plain
from farandole.errors import BadSample, FarandoleError, ShardError
from farandole.platform import cpu
from farandole.platform.output import guard

# what the system says of the machine, not of the file: another host may have the sample
OF_THE_HOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
WATCHED = 2  # micro-batches of a process in whose making changes of the data set are looked for
_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, not between fork and use


Gather = Callable[[npt.NDArray[np.int64]], Any]


class Incomplete(NamedTuple):
    """A micro-batch without its bad samples, each with what is wrong with it; None if it has no others."""

    batch: Any
    bad: dict[int, str]


class Source(Dataset[tuple[Key | None, Any]]):
    """The dataset as loader processes see it: indexed by slots and keys, giving whole micro-batches."""

    slots: Slots | None = None  # set before the processes start
    timed = False  # whether micro-batches come with what their making took, as `Timed`

    def __init__(
        self, dataset: Dataset[Any], order: Order, collate: Callable[[list[Any]], Any] | None, *, skips: bool = False
    ) -> None:
        """`skips`: samples that raise are left out, and the result is an `Incomplete`."""
        self.dataset = dataset
        self._skips = skips
        self._order = order
        self._collate = collate
        self._tensors = _rows(dataset) if collate is None else None
        self._ahead = hook(dataset, "ahead")
        self._gather = gather_of(dataset) if collate is None else None
        self.epochs = Epochs(dataset, collate)
        self._to_watch = WATCHED

    def __getitem__(self, index: tuple[int, Key | None]) -> tuple[Key | None, Any]:
        process, (slot, key) = get_worker_info(), index
        if key is None:
            return None, None
        if process is None:
            return key, self.timed_batch(key) if self.timed else self.micro_batch(key)
        try:
            if self.timed:
                return key, self.timed_batch(key, slot)
            batch = self.micro_batch(key)
            return key, sendable(batch if self.slots is None else self.slots.put(slot, batch))
        except BaseException:  # noqa: BLE001  whatever the dataset raises travels with its key, `sys.exit` included
            return key, wrapped(f"in DataLoader worker process {process.id}")

    def timed_batch(self, key: Key, slot: int | None = None) -> store_clock.Timed:
        """`micro_batch`, in its slot if it has one, and what that took."""
        with store_clock.making():
            batch = self.micro_batch(key)
            if slot is not None:
                with store_clock.handing_over():
                    batch = sendable(batch if self.slots is None else self.slots.put(slot, batch))
        return store_clock.Timed(batch, store_clock.take(key.stop - key.start))

    def micro_batch(self, key: Key) -> Any:
        self.epochs.enter(key.epoch)
        samples = self._order.samples(key.epoch, key.start, key.stop)
        if self._tensors is not None:
            index = torch.from_numpy(samples)
            return [tensor.index_select(0, index) for tensor in self._tensors]
        if self._to_watch:
            self._to_watch -= 1
            with warn_of_own_changes(self.dataset, self._collate):
                return self._make(samples, key)
        return self._make(samples, key)

    def _make(self, samples: npt.NDArray[np.int64], key: Key) -> Any:
        if self._ahead is not None:
            self._ahead(samples)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the number of threads is part of what comes out of a sum; 0.2 us
        try:
            return self._one_by_one(samples, key) if self._gather is None else self._at_once(self._gather, samples, key)
        finally:
            torch.set_num_threads(threads)

    def _at_once(self, gather: Gather, samples: npt.NDArray[np.int64], key: Key) -> Any:
        try:
            return gather(samples)
        except (FarandoleError, MemoryError):
            raise
        except Exception:
            found = self._one_by_one(samples, key)
            if not isinstance(found, Incomplete):
                raise  # no sample is bad: `gather` itself is
            return found

    def _one_by_one(self, samples: npt.NDArray[np.int64], key: Key) -> Any:
        seed = derive(self._order.seed, "sample", key.epoch)
        items: list[Any] = []
        bad: dict[int, str] = {}
        own = own_generators(self.dataset)
        for sample in samples.tolist():
            set_random_state(derive(seed, sample))
            seed_all(own, derive(seed, sample))
            try:
                items.append(self.dataset[sample])
            except (FarandoleError, MemoryError):
                raise  # a shard that is away, a machine that is full: no fault of the sample's
            except Exception as error:
                if isinstance(error, OSError) and error.errno in OF_THE_HOST:
                    raise ShardError(f"sample {sample} can't be had here: {error}; see to this host") from error
                said = f"sample {sample} of {type(self.dataset).__name__}: {type(error).__name__}: {error}"
                if not self._skips:
                    raise BadSample(
                        f'{said}; mend it, or leave such samples out, counted, by run.loader(..., on_bad_sample="skip")'
                    ) from error
                bad[sample] = said
        with store_clock.collating():
            batch = self._collated(items, key) if items else None
        return Incomplete(batch, bad) if bad else batch

    def _collated(self, items: list[Any], key: Key) -> Any:
        if self._collate is None:
            return _map_tensors(default_collate(items), torch.Tensor.contiguous)
        seed = derive(self._order.seed, "collate", key.epoch, key.start)
        set_random_state(seed)
        seed_all(own_generators(self._collate), seed)
        return self._collate(items)


class ProcessStart:
    """What the processes of one start do first; then comes the user's own `worker_init_fn`."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, context: BaseContext | str | None) -> None:
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        # A fork server's children have the server as parent, and it lives as long as they do.
        method = context.get_start_method()
        self.forks = method == "fork"
        self._parent = None if method == "forkserver" else os.getpid()
        self._heard, self._said = context.Pipe(duplex=False)
        self._worker_init_fn = worker_init_fn
        self._cores = cpu.before()

    def __call__(self, number: int) -> None:
        cpu.give(self._cores)
        guard()  # where it is not forked: a dataset that prints must not fail on a full disk
        if sys.platform == "linux" and self._parent is not None:
            if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
            if os.getppid() != self._parent:
                os._exit(1)  # it died before prctl took effect
        threading.Thread(target=self._end_when_told, name="farandole-end", daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        info = get_worker_info()
        assert info is not None
        # torch refuses assignment; the user's function expects its own dataset there, to open files and the like.
        object.__setattr__(info, "dataset", cast(Source, info.dataset).dataset)
        if self._worker_init_fn is not None:
            try:
                self._worker_init_fn(number)
            except BaseException:  # noqa: BLE001  it is raised where the first result is taken
                wrapped(f"in worker_init_fn of DataLoader worker process {number}").reraise()

    def stop(self) -> None:
        """Make the processes end within a second, whatever they do; call it just before DataLoader's own shutdown."""
        self._said.send_bytes(b"stop")  # nobody reads it, so everybody sees it

    def _end_when_told(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        if self._heard in wait([self._heard, parent.sentinel]):
            time.sleep(_GRACE_S)
        os._exit(0)  # anything else would look like a failure to torch


def aligned(batch: Any) -> Any:
    """`batch` with every CPU tensor that does not begin at a multiple of 64 bytes replaced by a copy that does."""
    return _map_tensors(batch, _aligned)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    if tensor.is_pinned():
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.clone()


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed, in nested dicts, lists, tuples; the same object where nothing changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        mapping = cast("MutableMapping[Any, Any]", value)
        changed = {name: new for name, old in mapping.items() if (new := _map_tensors(old, change)) is not old}
        if not changed:
            return mapping
        mapping = copy.copy(mapping)
        mapping.update(changed)
        return mapping
    if isinstance(value, (list, tuple)):
        old = cast("list[Any] | tuple[Any, ...]", value)
        new = [_map_tensors(item, change) for item in old]
        if all(a is b for a, b in zip(new, old, strict=True)):
            return old
        if isinstance(old, list):
            copied = copy.copy(old)
            copied[:] = new
            return copied
        named = hasattr(old, "_fields")  # a named tuple takes its fields one by one
        return type(old)(*new) if named else type(old)(new)
    return value


def _rows(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a dataset whose samples are nothing but their rows."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        if not is_plain(tensor) or not tensor.is_contiguous():
            return None
    return dataset.tensors


def gather_of(dataset: Dataset[Any]) -> Gather | None:
    """What makes whole micro-batches of a dataset whose samples draw nothing."""
    if type(dataset) is Subset:
        inner, indices = gather_of(dataset.dataset), np.asarray(dataset.indices)
        if inner is None or not _name_samples(indices, len(cast(Sized, dataset.dataset))):
            return None
        return partial(_of_subset, inner, indices.astype(np.int64))
    kind = type(dataset)
    if issubclass(kind, torch.Tensor):  # whose gather is another thing
        return None
    first = next(each for each in kind.__mro__ if {"gather", "__getitem__"} & vars(each).keys() or each is object)
    return getattr(dataset, "gather", None) if "gather" in vars(first) else None  # it may say that it can't


def _name_samples(indices: npt.NDArray[Any], length: int) -> bool:
    """Whether they are numbers from 0 to length - 1, as `gather` takes them."""
    numbers = indices.ndim == 1 and indices.dtype.kind in "iu" and indices.size > 0
    return numbers and bool(indices.min() >= 0 and indices.max() < length)


def _of_subset(inner: Gather, indices: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> Any:
    return inner(indices[samples])
