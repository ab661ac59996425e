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
from farandole.data.shared_memory import refused
from farandole.errors import BadSample, FarandoleError, ShardError, UsageError
from farandole.platform import cpu
from farandole.platform.output import guard

if TYPE_CHECKING:
    from farandole.data.loader import Loader


# --- prefetch ---------------------------------------------------------------------------------------------------------
#
# Which micro-batches to request ahead of the plan: the pure half of the loader, a sampler for torch's DataLoader.
#
# The pipeline that it feeds has a fixed number of places and gives results in the order of requests. For each result
# taken out it asks for one more request. What is kept to:
#
# - **It never ends.** An iterator that ended would lose the place for good. When nothing is to be requested the
#   answer is None, and the pipeline's answer to None comes at once: the loader trades such Nones for requests when
#   there are some.
# - **Memory is bounded.** At most `limit` micro-batches are under way or waiting, and the one asked for. What a new
#   plan does not name among its first 256 is dropped, on arrival if it is under way, and so is what lies in a step
#   passed.
# - **Nothing is made twice that is still there**, and a key asked for without having been expected goes first.
#
# Left out: doing anything. No I/O, no clock, no torch.

_NEAR = 256  # keys; enough for a lost peer's whole share to come before what is already under way


class Key(NamedTuple):
    """One micro-batch: positions [start, stop) of an epoch's order, which are `shard` of `step`."""

    epoch: int
    step: int
    shard: int
    start: int
    stop: int


class Prefetch:
    """What to request next, what is under way, what waits to be fetched; an iterator over requests, None for idle."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        self._asked: Key | None = None  # to be requested before anything else
        self._near: deque[Key] = deque()  # what has been read of `_upcoming` and not requested
        self._upcoming: Iterator[Key] = iter(())
        self._wanted: dict[Key, bool] = {}  # under way -> keep on arrival?
        self._step = (-1, -1)
        self.under_way: deque[Key | None] = deque()  # in the order in which results will come
        self.waiting: dict[Key, Any] = {}

    def __iter__(self) -> Iterator[Key | None]:
        return self

    def __next__(self) -> Key | None:
        key, self._asked = self._asked, None
        if key is None and (key := self.next_expected()) is not None:
            self._near.popleft()
        if key is not None:
            self._wanted[key] = True
        self.under_way.append(key)
        return key

    def next_expected(self) -> Key | None:
        """The next key that is expected and not yet requested, if there is one and memory for it."""
        if len(self._wanted) + len(self.waiting) >= self._limit:
            return None
        while True:
            if not self._near:
                self._near.extend(islice(self._upcoming, 1))
            if not self._near:
                return None
            key = self._near[0]
            if key in self._wanted:
                self._wanted[key] = True
            elif key not in self.waiting:
                return key
            self._near.popleft()

    def replace(self, upcoming: Iterable[Key]) -> None:
        self._upcoming = iter(upcoming)
        self._near = deque(islice(self._upcoming, _NEAR))
        kept = set(self._near)
        self.waiting = {key: found for key, found in self.waiting.items() if key in kept}
        self._wanted = {key: key in kept for key in self._wanted}

    def ask(self, key: Key) -> None:
        """`key` is wanted now, and nothing of an earlier step ever again."""
        if self._step != key[:2]:
            self._step = key[:2]
            self.waiting = {other: found for other, found in self.waiting.items() if other[:2] >= self._step}
            self._wanted = {other: wanted and other[:2] >= self._step for other, wanted in self._wanted.items()}
        if key in self._wanted:
            self._wanted[key] = True
        elif key not in self.waiting:
            self._asked = key
            with contextlib.suppress(ValueError):
                self._near.remove(key)

    def begin_again(self) -> None:
        """The pipeline is a new one: what was under way in the old one and is wanted goes first, in the same order."""
        lost = [key for key in self.under_way if key is not None and self._wanted[key]]
        self._near = deque([*lost, *(key for key in self._near if key not in lost)])
        self._wanted = {}
        self.under_way.clear()

    def receive(self, key: Key | None, found: Any) -> None:
        self.under_way.popleft()
        if key is not None and self._wanted.pop(key):
            self.waiting[key] = found


# --- hooks ------------------------------------------------------------------------------------------------------------
#
# What a dataset may be told by the loader that reads it, beside what any map-style dataset has; and who may stand
# between a loader and those who ask it. All of it is optional.
#
#     expect(samples, shuffled=...)  the order comes to these next, shape (n,), int64: have them near. Does not wait
#     ahead(samples)                 these are read next, all of them: have them come at once, not one after the other
#     settle(at_most_s)              wait until what is expected is near, as far as it will be; False: it takes longer
#
# None of it changes what a sample is; that is for `set_epoch(epoch)` (`epochs.py`). torch's `Subset` is looked through,
# as often as there is one in the other.

Samples = npt.NDArray[np.int64]


def hook(dataset: Any, name: str) -> Callable[..., Any] | None:
    """The dataset's method of that name; one that takes samples takes those of the dataset that is asked."""
    if type(dataset) is Subset:
        inner = hook(dataset.dataset, name)
        if inner is None or name == "settle":
            return inner
        indices = np.asarray(dataset.indices, dtype=np.int64)

        def through(samples: Samples, **options: Any) -> Any:
            return inner(indices[samples], **options)

        return through
    found = getattr(dataset, name, None)
    return found if callable(found) else None


class FetchHook(Protocol):
    """What stands between loaders and those who ask them, where something does: `farandole probe`."""

    def fetch(self, loader: Loader, key: Key, direct: Callable[[Key], Any]) -> Any: ...


# --- slots ------------------------------------------------------------------------------------------------------------
#
# How a loader process hands tensors over: through memory that both sides have mapped.
#
# torch sends a shared-memory file for each tensor, by a connection of its own, and a page fault each 4 KiB; the
# training step waits for that. Here a tensor is copied into the request's slot and out of it again: what arrives is the
# receiver's own, 64-byte aligned, with the same values and strides. `farandole probe examples/cifar10.py` showed 1.9 ms
# of waiting for each micro-batch of 32 images, and shows 0.6.
#
# A slot is free again when its result was received. At most `places` requests are on their way, and the pipeline asks
# for one more before it hands over what it received: `places + 1` slots in turn are enough.
#
# A slot is a file without a name: it goes with the last process. It is as long as the largest micro-batch that it ever
# held, and its pages are taken only where they were written. Who puts something there is the only one who uses the slot
# then, so it makes the file longer without asking; each side maps it anew where its own map has become too short. What
# was taken out of the shorter map is the taker's own by then. A forked process has the files already; to one that is
# started anew they go as open files, which needs Linux (memfd_create(2)). Elsewhere slots are anonymous memory, 16 MiB.
#
# Left out, and sent torch's way: tensors that are not plain CPU memory or lie in other containers than dict, list and
# tuple, what finds no room (in anonymous memory; where addresses are rationed, `ulimit -v`), processes that are not
# forked elsewhere than on Linux, and pinning (torch's thread receives ahead).

ALIGNMENT = 64  # bytes
GO_ANYWHERE = sys.platform == "linux"  # elsewhere to forked processes only
_SIZE = 16 << 20  # bytes of a slot at first


class Placed(NamedTuple):
    """Stands for a tensor that lies in a slot."""

    slot: int
    offset: int  # bytes, from the beginning of the slot
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Slots:
    """Memory for the results that are on their way; made before the loader processes are."""

    def __init__(self, places: int, files: Sequence[int] = ()) -> None:
        """`files` are open and theirs: given where another process has made them."""
        self._files = list(files)
        if GO_ANYWHERE and not files:
            try:
                for _ in range(places + 1):
                    self._files.append(os.memfd_create("farandole-slots"))
                    os.truncate(self._files[-1], _SIZE)
            except OSError:
                self.__del__()  # now: what tells of the error needs files as well
                raise
        self._maps = [_map(file) for file in self._files or [-1] * (places + 1)]

    def __reduce__(self) -> Any:
        return _opened, (len(self._maps) - 1, [DupFd(file) for file in self._files])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end `os` is gone
        while self._files:
            close(self._files.pop())

    def numbers(self) -> Iterator[int]:
        """The slot of each request in turn."""
        return cycle(range(len(self._maps)))

    def put(self, slot: int, batch: Any) -> Any:
        """In the loader process: `batch` with its tensors in `slot`, as far as there is room."""
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
        """In the training process: `batch` with what lies in its slot copied out."""
        return _each(batch, Placed, self._copy)

    def _has_room(self, slot: int, size: int) -> bool:
        """Whether `slot` has `size` bytes, if need be from now on: then half as much again, for the next one."""
        if size <= len(self._maps[slot]):
            return True
        if not self._files:
            return False
        file = self._files[slot]
        try:
            if os.fstat(file).st_size < size:
                os.truncate(file, -(-(size + size // 2) // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._maps[slot] = _map(file)
        except (OSError, ValueError):  # as mmap says it, of addresses or of a file's length
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
    """All of the file; -1: of memory that forked processes share."""
    return mmap.mmap(file, _SIZE if file == -1 else os.fstat(file).st_size)


def _opened(places: int, files: list[Any]) -> Slots:
    return Slots(places, [file.detach() for file in files])


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but values in CPU memory."""
    ordinary = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout == torch.strided
    return ordinary and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill as much memory as there are elements, in whichever order of dimensions."""
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
# What a loader process sends is known to be sendable before it is sent.
#
# multiprocessing pickles in a thread of the queue's. What it can't pickle is an error on that thread's standard error
# and nothing else: the result never comes, and the training process waits for it for ever. So what is not plain is
# pickled here, where an error can travel with its key as any exception of the dataset's does. The receiver gets the
# object itself, by whichever thread takes it out of the queue.
#
# Plain values and arrays, in plain containers, are left to the queue: they can be sent, and to pickle them here would
# copy them once more. A tensor that lies in no slot is not plain: pickling it takes a file of shared memory, which the
# system may refuse. Left out: what can be pickled and then not be restored, which is an error of the receiver's.

_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, Placed))


class Pickled:
    """Becomes `value` where it is unpickled.

    Raises:
        Exception: whatever pickling `value` raises.
    """

    def __init__(self, value: Any) -> None:
        self._bytes = bytes(ForkingPickler.dumps(value))

    def __reduce__(self) -> Any:
        return ForkingPickler.loads, (self._bytes,)  # pyright: ignore[reportAttributeAccessIssue]  built in, binds nothing


def sendable(batch: Any) -> Any:
    """`batch`, or what becomes of it at the receiver's.

    Raises:
        UsageError: it can't be sent; names what in it.
        RuntimeError: torch's, where the system refuses shared memory.
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
            f"{path} is a {type(value).__name__}, which a loader process can't send: {error}; have collate_fn, or the "
            f"data set, give what can be pickled, or load with num_workers=0"
        ) from error


def wrapped(where: str) -> ExceptionWrapper:
    """The exception in hand, so that it can be sent: if it can't, an error in its words."""
    found, error = ExceptionWrapper(where=where), sys.exc_info()[1]
    if isinstance(error, Exception) and not isinstance(error, StopIteration) and _can_be_sent(found):
        return found
    name = type(error).__name__
    try:
        raise UsageError(f"{name} came out of the data set, collate_fn or worker_init_fn: {error}")
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
    """The innermost part that can't be sent."""
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
    except Exception:  # noqa: BLE001  why not is told by who asked
        return False
    return True


# --- source -----------------------------------------------------------------------------------------------------------

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
        self,
        dataset: Dataset[Any],
        order: SampleOrder,
        collate: Callable[[list[Any]], Any] | None,
        *,
        skips: bool = False,
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

    def timed_batch(self, key: Key, slot: int | None = None) -> object_store.Timed:
        """`micro_batch`, in its slot if it has one, and what that took."""
        with object_store.making():
            batch = self.micro_batch(key)
            if slot is not None:
                with object_store.handing_over():
                    batch = sendable(batch if self.slots is None else self.slots.put(slot, batch))
        return object_store.Timed(batch, object_store.take(key.stop - key.start))

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


# --- deaths -----------------------------------------------------------------------------------------------------------
#
# Loader processes that die under way: noticed, named, cleared away, so that the loader can start others.
#
# torch has the training process raise on the death of one of its loader processes, by a handler of SIGCHLD: anywhere
# in the script, and then the script has failed. Ours are taken off the handler's list (`adopt`). The user's own
# DataLoaders stay on it, and a handler of the user's own stays where it is. The loader looks itself, before each
# result that it takes (`dead`), and while it waits torch looks every 5 s.
#
# What the dead leave behind can't be used: a queue's lock may be theirs for ever. So the others have to go too, and
# nothing of the pipeline is asked to help (`clear_away`). A process that dies within a write of more than 16 KiB can
# leave half a message, which is waited for as for any other standstill of a worker; results in slots are never that
# long.

_torch: Any = _utils  # torch's annotations leave out what is private
LIMIT = 3  # in a row, without a sample delivered in between
_END_S = 2.0  # after which a process is killed
_CAUSES = {
    signal.SIGKILL: "as the kernel does where memory runs out, on the machine or in the container",
    signal.SIGBUS: "as happens where /dev/shm is full; containers get 64 MB of it unless told otherwise (--shm-size)",
    signal.SIGSEGV: "a crash in the dataset's code, or in a library that it uses",
}


def adopt(results: Any) -> None:
    """`results`, torch's iterator, has just started its processes: torch's handler is not to raise for them."""
    if results._worker_pids_set:
        _torch.signal_handling._remove_worker_pids(id(results))
        results._worker_pids_set = False


def dead(results: Any) -> list[BaseProcess]:
    """Those of the processes that have ended; 1 us each."""
    return [process for process in results._workers if process.exitcode is not None]


def said(died: Sequence[BaseProcess]) -> str:
    """Of what they have died, in words."""
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
    """End all processes, and let go of the pipeline, without a lock or an event that the dead may hold."""
    start.stop()
    for process in results._workers:
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
    results._shutdown = True
    queues = list(results._index_queues)
    if hasattr(results, "_pin_memory_thread"):
        results._pin_memory_thread_done_event.set()  # it looks every 5 s
    else:
        queues.append(results._worker_result_queue)
    for queue in queues:
        queue.cancel_join_thread()
        queue.close()
