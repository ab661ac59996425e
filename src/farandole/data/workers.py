"""Loader processes: `Source` makes one micro-batch, in the training process or in a loader process alike.

A micro-batch is a function of its key. It does not depend on the worker or process that makes it:

- its samples come from the order; random state is set before each sample from (seed, epoch, sample), and before a
  user's collate function from (seed, epoch, start);
- torch computes on one thread, as loader processes do anyway, because the number of threads changes the last bits of a
  sum;
- tensors that `default_collate` makes are contiguous. For samples in channels-last memory it gives other strides in a
  loader process than in the training process, and strides choose a convolution's kernel;
- CPU tensors are 64-byte aligned (`aligned`), because alignment also changes last bits.

A plain `TensorDataset` draws no random numbers, so its rows are taken with the whole index vector: 43 us for 64 rows of
784 values, where going sample by sample takes 0.85 ms, with the same bits and strides.

Other datasets whose samples draw no random numbers may do the same by a method

    gather(samples) -> batch        samples: (n,) int64, each from 0 to len(dataset) - 1

It must return what torch's `default_collate` would make of these samples: the same containers, values, dtypes and
strides. The loader calls it if the user gives no collate function, also through torch's `Subset`, and sets no random
state for it. It is used only if the first class in the method resolution order that defines `gather` or `__getitem__`
defines `gather`: a subclass that overrides `__getitem__` alone, and a wrapper that forwards other attributes, are read
sample by sample. If `gather` raises, its samples are read one by one, so that the bad one is named, or left out.

`ProcessStart` makes sure that loader processes end: as orphans they would hold a dead worker's sockets open and hide
its death from its peers. On Linux the kernel kills them with the thread that started them. On other systems, and under
a fork server, whose children the kernel counts as the server's, one of their threads waits for the end of the training
process. They ignore SIGINT and SIGTERM: the training process handles a preemption notice, and needs data until it has
left. DataLoader ends stuck processes by SIGTERM, one after the other with 10 s for each; `stop` ends all within 1 s.

Left out: `__getitems__` (random state is per sample), alignment of NumPy arrays in a batch.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Sized
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Subset, TensorDataset, _utils, default_collate, get_worker_info

from farandole.data import object_store
from farandole.data.epochs import Epochs, warn_of_own_changes
from farandole.data.order import SampleOrder, derive, own_generators, seed_all, set_random_state
from farandole.data.sampler_order import SamplerOrder
from farandole.data.shared_memory import refused
from farandole.data.stream import Stream, Streamed
from farandole.errors import BadSample, FarandoleError, ShardError, UsageError
from farandole.platform import cpu
from farandole.platform.output import guard

if TYPE_CHECKING:
    pass


# --- prefetch ---------------------------------------------------------------------------------------------------------
#
# `Prefetch` chooses which micro-batches to request next: the pure half of the loader, a sampler for torch's DataLoader.
#
# The DataLoader pipeline has a fixed number of places and returns results in the order of requests. For each result
# that is taken out it asks for one more request. The invariants:
#
# - **It never ends.** An iterator that ended would lose the place for good. If there is nothing to request, it yields
#   None, and the pipeline answers a None at once. The loader exchanges such Nones for requests when there are some.
# - **Memory is bounded.** At most `limit` micro-batches are in flight or waiting, plus the one that is being fetched. A
#   micro-batch that a new plan does not name among its first 256 is dropped, on arrival if it is in flight. So is one
#   of an earlier step.
# - **Nothing is made twice while its first result exists**. A key that is fetched without being expected goes first.
#
# The class is pure: no I/O, no clock, no torch.

_NEAR = 256  # keys; enough for a lost peer's whole share to come before what is already in flight


class Key(NamedTuple):
    """One micro-batch: positions [start, stop) of an epoch's order, which are `shard` of `step`."""

    epoch: int
    step: int
    shard: int
    start: int
    stop: int


class Prefetch:
    """An iterator over requests (None: idle); knows the next requests, those in flight, and the results that wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        self._urgent: Key | None = None  # the key to request first
        self._near: deque[Key] = deque()  # keys read from `_upcoming` and not yet requested
        self._upcoming: Iterator[Key] = iter(())
        self._in_flight: dict[Key, bool] = {}  # keys in flight; False: drop the result on arrival
        self._step = (-1, -1)
        self.under_way: deque[Key | None] = deque()  # requests in flight, in the order of their results
        self.waiting: dict[Key, Any] = {}  # results that arrived and were not fetched yet

    def __iter__(self) -> Iterator[Key | None]:
        return self

    def __next__(self) -> Key | None:
        key, self._urgent = self._urgent, None
        if key is None and (key := self.next_expected()) is not None:
            self._near.popleft()
        if key is not None:
            self._in_flight[key] = True
        self.under_way.append(key)
        return key

    def next_expected(self) -> Key | None:
        """Returns the next key that is expected and not yet requested; None if there is none, or no memory for it."""
        if len(self._in_flight) + len(self.waiting) >= self._limit:
            return None
        while True:
            if not self._near:
                self._near.extend(islice(self._upcoming, 1))
            if not self._near:
                return None
            key = self._near[0]
            if key in self._in_flight:
                self._in_flight[key] = True
            elif key not in self.waiting:
                return key
            self._near.popleft()

    def replace(self, upcoming: Iterable[Key]) -> None:
        self._upcoming = iter(upcoming)
        self._near = deque(islice(self._upcoming, _NEAR))
        near = set(self._near)
        self.waiting = {key: result for key, result in self.waiting.items() if key in near}
        self._in_flight = {key: key in near for key in self._in_flight}

    def ask(self, key: Key) -> None:
        """Requests `key` first, and drops all results of earlier steps: they are never fetched again."""
        if self._step != key[:2]:
            self._step = key[:2]
            self.waiting = {other: result for other, result in self.waiting.items() if other[:2] >= self._step}
            self._in_flight = {
                other: is_needed and other[:2] >= self._step for other, is_needed in self._in_flight.items()
            }
        if key in self._in_flight:
            self._in_flight[key] = True
        elif key not in self.waiting:
            self._urgent = key
            with contextlib.suppress(ValueError):
                self._near.remove(key)

    def begin_again(self) -> None:
        """Resets for a new pipeline: requests that were in flight and are wanted go first, in the same order."""
        interrupted = [key for key in self.under_way if key is not None and self._in_flight[key]]
        self._near = deque([*interrupted, *(key for key in self._near if key not in interrupted)])
        self._in_flight = {}
        self.under_way.clear()

    def receive(self, key: Key | None, result: Any) -> None:
        self.under_way.popleft()
        if key is not None and self._in_flight.pop(key):
            self.waiting[key] = result


# --- hooks ------------------------------------------------------------------------------------------------------------
#
# Methods that a dataset may have beside those of any map-style dataset, and that the loader calls; and `FetchHook`,
# which intercepts fetches. All of them are optional.
#
#     expect(samples, shuffled=...)  the order reaches these next, shape (n,), int64: bring them near. Does not wait
#     ahead(samples)                 all of these are read next: request them at once, not one after the other
#     settle(at_most_s)              wait until the expected samples are near, as far as possible; False: it timed out
#
# None of them changes a sample; `set_epoch(epoch)` (`epochs.py`) does that. `hook` looks through torch's `Subset`, also
# where Subsets are nested.

Samples = npt.NDArray[np.int64]


def hook(dataset: Any, name: str) -> Callable[..., Any] | None:
    """Returns the dataset's method of that name, or None. It takes sample indexes of `dataset`, also for a Subset."""
    if type(dataset) is Subset:
        inner = hook(dataset.dataset, name)
        if inner is None or name == "settle":
            return inner
        indices = np.asarray(dataset.indices, dtype=np.int64)

        def through(samples: Samples, **options: Any) -> Any:
            return inner(indices[samples], **options)

        return through
    method = getattr(dataset, name, None)
    return method if callable(method) else None


class FetchHook(Protocol):
    """Intercepts the fetches of a loader, see `Loader.measure`."""

    def fetch(self, key: Key, direct: Callable[[Key], Any]) -> Any: ...


# --- slots ------------------------------------------------------------------------------------------------------------
#
# Slots: memory that the training process and its loader processes both map, through which they pass tensors.
#
# torch sends a shared-memory file for each tensor, by a connection of its own, with a page fault per 4 KiB, and the
# training step waits for that. Here the loader process copies a tensor into the request's slot, and the receiver copies
# it out again. The receiver owns its copy, which is 64-byte aligned and has the same values and strides. For each
# micro-batch of 32 images `farandole probe examples/cifar10.py` showed 1.9 ms of waiting before, and 0.6 ms with slots.
#
# A slot is free again when its result was received. At most `places` requests are in flight, and the pipeline asks for
# one more before it hands over a result: `places + 1` slots in rotation are enough.
#
# A slot is an unnamed file: it disappears with the last process. It is as long as the largest micro-batch that it ever
# held, and it takes only the pages that were written. The process that fills a slot is its only user at that time, so
# it extends the file without any lock; each side maps the file again if its own map is too short. A tensor that was
# taken out of the shorter map is a copy. A forked process inherits the files; a process that is started anew gets them
# as open files, which needs Linux (memfd_create(2)). On other systems slots are anonymous memory, 16 MiB.
#
# Left out, and sent torch's way: tensors that are not plain CPU memory or lie in other containers than dict, list and
# tuple; tensors for which there is no room (in anonymous memory; or where addresses are limited, `ulimit -v`); all
# tensors for processes that are not forked on systems other than Linux; and pinning (torch's thread receives ahead).

ALIGNMENT = 64  # bytes
GO_ANYWHERE = sys.platform == "linux"  # True: slots reach any process; False: forked processes only
_SIZE = 16 << 20  # bytes of a slot at first


class Placed(NamedTuple):
    """The place of a tensor that lies in a slot; sent instead of the tensor."""

    slot: int
    offset: int  # bytes, from the beginning of the slot
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Slots:
    """Memory for the results in flight; made before the loader processes start."""

    def __init__(self, places: int, files: Sequence[int] = ()) -> None:
        """Makes `places + 1` slots, or takes over `files`: open descriptors of slots that another process made."""
        self._files = list(files)
        if GO_ANYWHERE and not files:
            try:
                for _ in range(places + 1):
                    self._files.append(os.memfd_create("farandole-slots"))
                    os.truncate(self._files[-1], _SIZE)
            except OSError:
                self.__del__()  # close them now: reporting the error needs descriptors as well
                raise
        self._maps = [_map(file) for file in self._files or [-1] * (places + 1)]

    def __reduce__(self) -> Any:
        return _opened, (len(self._maps) - 1, [DupFd(file) for file in self._files])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` is gone
        while self._files:
            close(self._files.pop())

    def numbers(self) -> Iterator[int]:
        """Returns the slot numbers of the requests, in their order; endless."""
        return cycle(range(len(self._maps)))

    def put(self, slot: int, batch: Any) -> Any:
        """Returns `batch` with its tensors moved to `slot`, as far as there is room. For the loader process."""
        offset = 0

        def place(tensor: torch.Tensor) -> Any:
            nonlocal offset
            if not (is_plain(tensor) and tensor.nbytes and _is_dense(tensor)):
                return tensor
            if not self._has_room(slot, offset + tensor.nbytes):
                return tensor
            placed = Placed(slot, offset, tensor.shape, tensor.stride(), tensor.dtype)
            self._view(placed).copy_(tensor)
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            return placed

        return _each(batch, torch.Tensor, place)

    def take(self, batch: Any) -> Any:
        """Returns `batch` with its tensors copied out of its slot. For the training process."""
        return _each(batch, Placed, self._copy)

    def _has_room(self, slot: int, size: int) -> bool:
        """Returns True if `slot` has `size` bytes. Extends it if needed, to 1.5 times `size`, for the next batch."""
        if size <= len(self._maps[slot]):
            return True
        if not self._files:
            return False
        file = self._files[slot]
        try:
            if os.fstat(file).st_size < size:
                os.truncate(file, -(-(size + size // 2) // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._maps[slot] = _map(file)
        except (OSError, ValueError):  # mmap raises either: no addresses, or a wrong length of the file
            return False
        return True

    def _copy(self, placed: Placed) -> torch.Tensor:
        return torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype).copy_(self._view(placed))

    def _view(self, placed: Placed) -> torch.Tensor:
        count = placed.shape.numel()
        if placed.offset + count * placed.dtype.itemsize > len(self._maps[placed.slot]):
            self._maps[placed.slot] = _map(self._files[placed.slot])
        memory = self._maps[placed.slot]
        flat = torch.frombuffer(memory, dtype=placed.dtype, count=count, offset=placed.offset)
        return flat.as_strided(placed.shape, placed.stride)


def _map(file: int) -> mmap.mmap:
    """Maps all of the file; -1: maps anonymous memory that forked processes share."""
    return mmap.mmap(file, _SIZE if file == -1 else os.fstat(file).st_size)


def _opened(places: int, files: list[Any]) -> Slots:
    return Slots(places, [file.detach() for file in files])


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is nothing but values in CPU memory."""
    ordinary = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout == torch.strided
    return ordinary and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if the elements fill their memory without gaps, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _each(inner, kind, change) for name, inner in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)([_each(inner, kind, change) for inner in value])
    return value


# --- sending ----------------------------------------------------------------------------------------------------------
#
# A loader process checks that a result can be pickled before it sends it.
#
# multiprocessing pickles in a thread of the queue. If pickling fails there, the thread prints the error to standard
# error and does nothing else: the result never comes, and the training process waits for ever. So a value that is not
# plain is pickled here, where an error can be sent with its key as any exception of the dataset. The receiver gets the
# object itself from whichever thread takes it out of the queue.
#
# Plain values and arrays, in plain containers, are left to the queue: they can be sent, and pickling them here would
# copy them once more. A tensor outside a slot is not plain: pickling it takes a file of shared memory, which the
# system may refuse. Left out: a value that can be pickled but not unpickled, which is an error of the receiver.

_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, Placed))


class Pickled:
    """A pickled `value`; unpickling this object gives `value`.

    Raises:
        Exception: any exception that pickling `value` raises.
    """

    def __init__(self, value: Any) -> None:
        self._bytes = bytes(ForkingPickler.dumps(value))

    def __reduce__(self) -> Any:
        return ForkingPickler.loads, (self._bytes,)  # pyright: ignore[reportAttributeAccessIssue]  built in, binds nothing


def sendable(batch: Any) -> Any:
    """Returns `batch`, or a `Pickled` that the receiver unpickles to `batch`.

    Raises:
        UsageError: it can't be sent; names the part that can't.
        RuntimeError: the system refuses shared memory; raised by torch.
    """
    if _is_plain(batch):
        return batch
    try:
        return Pickled(batch)
    except Exception as error:
        if refused(error) is not None:
            raise
        path, value = _culprit(batch, "the batch")
        raise UsageError(
            f"{path} is a {type(value).__name__}, which a loader process can't send: {error}; make collate_fn or the "
            f"dataset return values that can be pickled, or load with num_workers=0"
        ) from error


def wrapped(where: str) -> ExceptionWrapper:
    """Wraps the current exception for sending; if it can't be sent, wraps a `UsageError` with its type and message."""
    exception, error = ExceptionWrapper(where=where), sys.exc_info()[1]
    if isinstance(error, Exception) and not isinstance(error, StopIteration) and _can_be_sent(exception):
        return exception
    name = type(error).__name__
    try:
        raise UsageError(f"{name} was raised by the dataset, collate_fn or worker_init_fn: {error}")
    except UsageError:
        return ExceptionWrapper(where=where)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    if kind is np.ndarray:
        return not cast("np.ndarray[Any, Any]", value).dtype.hasobject
    if kind is dict:
        return all(_is_plain(each) for pair in cast("dict[Any, Any]", value).items() for each in pair)
    return kind in (list, tuple) and all(map(_is_plain, cast("list[Any]", value)))


def _culprit(value: Any, path: str) -> tuple[str, Any]:
    """Returns the path and value of the innermost part that can't be sent."""
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(f"{path}[{key!r}]", each) for key, each in cast("dict[Any, Any]", value).items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{path}[{number}]", each) for number, each in enumerate(cast("list[Any]", value))]
    for within, each in inner:
        if not _is_plain(each) and not _can_be_sent(each):
            return _culprit(each, within)
    return path, value


def _can_be_sent(value: Any) -> bool:
    try:
        Pickled(value)
    except Exception:  # noqa: BLE001  the caller reports the reason
        return False
    return True


# --- source -----------------------------------------------------------------------------------------------------------

# errors of the machine, not of the file: another host may be able to read the sample
OF_THE_HOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
WATCHED = 2  # the first micro-batches of a process, during which it checks that the dataset does not change itself
_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, not between fork and use
Gather = Callable[[npt.NDArray[np.int64]], Any]


class Incomplete(NamedTuple):
    """A micro-batch without its bad samples."""

    batch: Any  # None: all its samples are bad
    bad: list[tuple[int, str]]  # each bad sample, and the reason


class Source(Dataset[tuple[Key | None, Any]]):
    """The dataset as loader processes see it: its items are whole micro-batches.

    Its index is a slot, a key and marks of a stream, which the process has not got yet.
    """

    slots: Slots | None = None  # set before the processes start
    timed = False  # True: micro-batches come as `Timed`, with the cost of making them

    def __init__(
        self,
        dataset: Dataset[Any] | Stream,
        order: SampleOrder | SamplerOrder,
        collate: Callable[[list[Any]], Any] | None,
        *,
        skips: bool = False,
    ) -> None:
        """`skips=True`: samples that raise are left out, and the result is an `Incomplete`."""
        self._stream = dataset if isinstance(dataset, Stream) else None
        self._samples: Any = dataset
        self.dataset: Any = dataset.dataset if isinstance(dataset, Stream) else dataset  # the user's
        self._skips = skips
        self._order = order
        self._collate = collate
        self._tensors = _rows(self.dataset) if collate is None else None
        self._ahead = hook(dataset, "ahead")
        self._gather = gather_of(self.dataset) if collate is None and self._stream is None else None
        self.epochs = Epochs(dataset, collate)
        self._to_watch = WATCHED if self._stream is None else 0  # a stream has a place, which changes

    def __getitem__(self, index: tuple[int, Key | None, list[bytes]]) -> tuple[Key | None, Any]:
        process, (slot, key, marks) = get_worker_info(), index
        if self._stream is not None and process is not None:
            self._stream.learn(marks)
        if key is None:
            return None, None
        if process is None:
            return key, self.timed_batch(key) if self.timed else self.micro_batch(key)
        try:
            if self.timed:
                return key, self._with_marks(self.timed_batch(key, slot))
            batch = self.micro_batch(key)
            return key, self._with_marks(sendable(batch if self.slots is None else self.slots.put(slot, batch)))
        except BaseException:  # noqa: BLE001  any exception is sent with its key, `sys.exit` included
            return key, wrapped(f"in DataLoader worker process {process.id}")

    def _with_marks(self, batch: Any) -> Any:
        marks = self._stream.new_marks() if self._stream is not None else []
        return Streamed(batch, marks) if marks else batch

    def timed_batch(self, key: Key, slot: int | None = None) -> object_store.Timed:
        """Returns `micro_batch(key)`, in its slot if it has one, and the cost of making it."""
        with object_store.making():
            batch = self.micro_batch(key)
            if slot is not None:
                with object_store.handing_over():
                    batch = sendable(batch if self.slots is None else self.slots.put(slot, batch))
        return object_store.Timed(batch, object_store.take(key.stop - key.start))

    def micro_batch(self, key: Key) -> Any:
        """Returns the collated micro-batch of `key`, or an `Incomplete` if samples are left out.

        Raises:
            BadSample: a sample can't be read, and bad samples are not skipped.
        """
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
        torch.set_num_threads(1)  # the number of threads changes the bits of a sum; takes 0.2 us
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
            batch = self._one_by_one(samples, key)
            if not isinstance(batch, Incomplete):
                raise  # no sample is bad: the error is in `gather`
            return batch

    def _one_by_one(self, samples: npt.NDArray[np.int64], key: Key) -> Any:
        seed = derive(self._order.seed, "sample", key.epoch)
        items: list[Any] = []
        bad: list[tuple[int, str]] = []
        generators = own_generators(self.dataset) if self._stream is None else []  # a stream seeds them itself
        draws = self._order.draws(key.epoch, key.start, key.stop)
        for sample, draw in zip(samples.tolist(), draws.tolist(), strict=True):
            set_random_state(derive(seed, draw))
            seed_all(generators, derive(seed, draw))
            try:
                items.append(self._samples[sample])
            except (FarandoleError, MemoryError):
                raise  # a missing shard, a full machine: the sample is not the cause
            except Exception as error:
                if isinstance(error, OSError) and error.errno in OF_THE_HOST:
                    raise ShardError(f"sample {sample} can't be read on this host: {error}; check this host") from error
                reason = f"sample {sample} of {type(self.dataset).__name__}: {type(error).__name__}: {error}"
                if not self._skips:
                    raise BadSample(
                        f"{reason}; repair it, or leave out and count such samples by "
                        f'run.loader(..., on_bad_sample="skip")'
                    ) from error
                bad.append((sample, reason))
        with object_store.collating():
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
    """The `worker_init_fn` of one start of the loader processes: sets them up, then calls the user's own."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, context: BaseContext | str | None) -> None:
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        # The children of a fork server have the server as their parent, and it lives as long as they do.
        method = context.get_start_method()
        self.forks = method == "fork"
        self._parent = None if method == "forkserver" else os.getpid()
        self._receiver, self._sender = context.Pipe(duplex=False)
        self._worker_init_fn = worker_init_fn
        self._cores = cpu.before()

    def __call__(self, number: int) -> None:
        cpu.give(self._cores)
        guard()  # if the process is not forked: a dataset that prints must not fail on a full disk
        if sys.platform == "linux" and self._parent is not None:
            if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
            if os.getppid() != self._parent:
                os._exit(1)  # the parent died before prctl took effect
        threading.Thread(target=self._end_when_stopped, name="farandole-end", daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        info = get_worker_info()
        assert info is not None
        # torch refuses assignment. The user's function expects its own dataset there, for example to open files.
        object.__setattr__(info, "dataset", cast(Source, info.dataset).dataset)
        if self._worker_init_fn is not None:
            try:
                self._worker_init_fn(number)
            except BaseException:  # noqa: BLE001  raised where the first result is taken
                wrapped(f"in worker_init_fn of DataLoader worker process {number}").reraise()

    def stop(self) -> None:
        """Makes the processes end within 1 s, whatever they do. Call it just before DataLoader's own shutdown."""
        self._sender.send_bytes(b"stop")  # no process reads it, so all processes see it

    def _end_when_stopped(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        if self._receiver in wait([self._receiver, parent.sentinel]):
            time.sleep(_GRACE_S)
        os._exit(0)  # torch takes any other exit for a failure


def aligned(batch: Any) -> Any:
    """Returns `batch` with a copy of each CPU tensor that does not begin at a multiple of 64 bytes, aligned so."""
    return _map_tensors(batch, _aligned)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    if tensor.is_pinned():
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.clone()


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns `value` with `change` applied to its tensors, also in nested dicts, lists and tuples.

    Returns the same object if nothing changed.
    """
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
        is_named = hasattr(old, "_fields")  # a named tuple takes its fields one by one
        return type(old)(*new) if is_named else type(old)(new)
    return value


def _rows(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    """Returns the tensors of a dataset whose samples are nothing but rows of these tensors; None for other datasets."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        if not is_plain(tensor) or not tensor.is_contiguous():
            return None
    return dataset.tensors


def gather_of(dataset: Dataset[Any]) -> Gather | None:
    """Returns the function that makes whole micro-batches of a dataset (`gather`, see above), or None."""
    if type(dataset) is Subset:
        inner, indices = gather_of(dataset.dataset), np.asarray(dataset.indices)
        if inner is None or not _name_samples(indices, len(cast(Sized, dataset.dataset))):
            return None
        return partial(_of_subset, inner, indices.astype(np.int64))
    kind = type(dataset)
    if issubclass(kind, torch.Tensor):  # torch.Tensor.gather is something else
        return None
    first = next(each for each in kind.__mro__ if {"gather", "__getitem__"} & vars(each).keys() or each is object)
    return getattr(dataset, "gather", None) if "gather" in vars(first) else None  # may be None: can't gather


def _name_samples(indices: npt.NDArray[Any], length: int) -> bool:
    """Returns True if the indices are integers from 0 to length - 1, as `gather` takes them."""
    are_integers = indices.ndim == 1 and indices.dtype.kind in "iu" and indices.size > 0
    return are_integers and bool(indices.min() >= 0 and indices.max() < length)


def _of_subset(inner: Gather, indices: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> Any:
    return inner(indices[samples])


# --- deaths -----------------------------------------------------------------------------------------------------------
#
# Deaths of loader processes: these functions detect, describe and clean up, so that the loader can start new ones.
#
# If a loader process dies, torch's handler of SIGCHLD raises in the training process, anywhere in the script, and the
# script fails. `adopt` removes our processes from the handler's list. The user's own DataLoaders stay on it, and a
# user's own handler stays in place. The loader checks by itself (`dead`) before each result that it takes, and while it
# waits torch checks every 5 s.
#
# The queues of a dead process can't be used: it may hold a queue's lock for ever. So the other processes have to end as
# well, without any help of the pipeline (`clear_away`). A process that dies during a write of more than 16 KiB can
# leave half a message. The loader then waits for the rest, as in any other stall of a worker. Results in slots are
# never that long.

_torch: Any = _utils  # torch's annotations leave out private names
LIMIT = 3  # deaths in a row, without a sample delivered in between
_END_S = 2.0  # time for a process to end before it is killed
_CAUSES = {
    signal.SIGKILL: "as the kernel does when the machine or the container runs out of memory",
    signal.SIGBUS: "as happens when /dev/shm is full; containers get 64 MB of it by default (--shm-size)",
    signal.SIGSEGV: "a crash in the dataset's code, or in a library that it uses",
}


def adopt(results: Any) -> None:
    """Removes the new processes of `results`, torch's iterator, from torch's handler, so that it does not raise."""
    if results._worker_pids_set:
        _torch.signal_handling._remove_worker_pids(id(results))
        results._worker_pids_set = False


def dead(results: Any) -> list[BaseProcess]:
    """Returns the processes that have ended; takes 1 us each."""
    return [process for process in results._workers if process.exitcode is not None]


def cause_of_death(died: Sequence[BaseProcess]) -> str:
    """Returns a sentence part that states why the processes died."""
    for process in died:
        code = process.exitcode or 0
        if code < 0:
            number = signal.Signals(-code)
            cause = f", {_CAUSES[number]}" if number in _CAUSES else ""
            return f"a DataLoader process (pid {process.pid}) was ended by {number.name}{cause}"
    if died:
        return f"a DataLoader process (pid {died[0].pid}) ended with exit code {died[0].exitcode}"
    return "a DataLoader process was gone when its result was to be read"


def clear_away(results: Any, start: ProcessStart) -> None:
    """Ends all processes and drops the pipeline, without any lock or event that a dead process may hold."""
    start.stop()
    for process in results._workers:
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
    results._shutdown = True
    queues = list(results._index_queues)
    if hasattr(results, "_pin_memory_thread"):
        results._pin_memory_thread_done_event.set()  # the thread checks it every 5 s
    else:
        queues.append(results._worker_result_queue)
    for queue in queues:
        queue.cancel_join_thread()
        queue.close()
