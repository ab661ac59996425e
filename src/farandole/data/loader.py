"""`Loader` makes a worker's micro-batches, and prefetches them for a plan that may change at any step.

It uses an ordinary `torch.utils.data.DataLoader` with a sampler of our own (`workers.Prefetch`). A request is a `Key`,
which names one micro-batch. The loader process that gets the request makes the whole micro-batch (`workers.Source`),
which depends on its key alone, so any worker can make the shards of a lost worker. The same processes serve from the
first `expect` or `fetch` to `close`, through any number of plans. If one of them dies, all are replaced, and the
requests that were in flight are sent again. An exception that the dataset raises is sent back with its key and is
raised when that key is fetched. If the key is never fetched, the exception is dropped.

Processor time of a fetch of 64 samples of 784 values in one process: 43 us from a `TensorDataset` (37 of them torch's
`index_select`; torch's own DataLoader takes 250), 0.85 ms sample by sample (7 of 13 us a sample set random state).

Loader processes end with the thread that started them (`ProcessStart`): call `fetch` from a thread that outlives
training. An iterable dataset is read by one process (`stream.py`). Left out: use by several threads. `fetch` leaves the
global random state undefined: seed it before what follows.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import repeat
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from farandole.data import shared_memory, workers
from farandole.data.epochs import DatasetState, Epochs
from farandole.data.facts import subsets
from farandole.data.object_store import NOTHING, Making, Timed
from farandole.data.order import SampleOrder
from farandole.data.sampler_order import SamplerOrder
from farandole.data.stream import ENDLESS, Stream, Streamed, is_stream
from farandole.data.workers import (
    GO_ANYWHERE,
    FetchHook,
    Incomplete,
    Prefetch,
    ProcessStart,
    Slots,
    Source,
    aligned,
    hook,
)
from farandole.data.workers import Key as Key
from farandole.errors import LoaderDied, UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch
from farandole.plan.shards import Position, Window, window
from farandole.platform.bounds import real, whole

# --- options ----------------------------------------------------------------------------------------------------------
#
# The options of a loader. Each other option of torch's DataLoader is an error that says why it can't be set.
#
# No sample is left out silently: a warning states how many samples `drop_last` leaves out of each epoch.

_log = logging.getLogger(__name__)
MAX_PROCESSES = 1024  # processes of one loader
MAX_AHEAD = 1024  # micro-batches that one process prefetches
_MARKS_EVERY = 256  # samples of a stream between two marks, at least
_WORKERS = 8  # of a batch that follows the workers: so large a batch of a stream is held
MAX_TIMEOUT_S = 1e6  # poll(2) takes no more than 24 days
REFUSED = {
    "batch_size": "`batch` sets the global batch",
    "sampler": "pass the DataLoader that has it: run.loader(DataLoader(dataset, size, sampler=...), micro=...)",
    "batch_sampler": "pass the DataLoader that has it: run.loader(DataLoader(dataset, batch_sampler=...), micro=...)",
    "generator": "random state comes from the run's seed",
    "in_order": "results are matched to requests in order",
    "pin_memory_device": "pin_memory=True pins for the current accelerator",
}


def length_of(dataset: Dataset[Any]) -> int:
    """Returns the number of samples. Raises `UsageError` if samples can't be read by their index."""
    kind = type(dataset).__name__
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"{kind} can be iterated over once, and a worker that joins must read the samples from the beginning: "
            f"give a torch.utils.data.IterableDataset whose __iter__() returns a new iterator each time"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{kind} needs __getitem__(index) and __len__(), or make it a torch.utils.data.IterableDataset: any worker "
            f"must reach any sample"
        )
    try:
        length = len(cast(Sized, dataset))
    except Exception as error:
        raise UsageError(
            f"len() of {kind} fails with {type(error).__name__}: {error}; any worker must know how many samples there "
            f"are: pass a dataset, not its class, whose __len__() returns an integer"
        ) from error
    if length == 0:
        raise UsageError(f"{kind} is empty: a dataset needs at least one sample")
    return whole(f"the length of {kind}, {{}}", length, 1, why="samples")


def refuse_several(call: str, thing: Any) -> None:
    """Raises `UsageError` if `thing` is a tuple or list of datasets or loaders; a list of samples is a dataset."""
    items = cast("list[Any]", list(thing)) if isinstance(thing, tuple | list) else []
    if items and all(isinstance(each, Dataset | DataLoader | Loader) for each in items):
        raise UsageError(
            f"{call}({', '.join(type(each).__name__ for each in items)}): a run has one loader; combine the datasets: "
            f"run.loader(torch.utils.data.StackDataset(a, b), ...) for a sample of each, or ConcatDataset([a, b]) for "
            f"all samples of both; streams by an IterableDataset that zips them, or ChainDataset([a, b])"
        )


def check_length(dataset: Dataset[Any], length: int) -> None:
    """Raises `UsageError` if the dataset's length has changed since its loader was made."""
    current = len(cast(Sized, dataset))
    if current != length:
        raise UsageError(
            f"{type(dataset).__name__} had {length} samples when its loader was made and has {current} now: the loader "
            f"would skip samples, or request samples that do not exist; keep its length the same in all epochs of a run"
        )


def check_subsets(dataset: Dataset[Any]) -> None:
    """Checks that the indices of each `Subset` exist in its dataset; reads the first index that looks out of range.

    Raises:
        UsageError: an index does not exist; names it.
    """
    for subset in subsets(dataset):
        indices, length = np.asarray(subset.indices), len(cast(Sized, subset.dataset))
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            continue
        for at in np.flatnonzero((indices < -length) | (indices >= length))[:1]:
            try:
                subset.dataset[subset.indices[at]]  # its dataset may number its samples in another way
            except LookupError as error:
                kind = type(subset.dataset).__name__
                raise UsageError(
                    f"Subset.indices[{at}] is {indices[at]}, and the {kind} that it picks from has {length} samples, "
                    f"0 to {length - 1} ({type(error).__name__}: {error}); correct the indices"
                ) from error


def left_out(length: int, batch: BatchPolicy) -> int:
    """Returns how many samples `drop_last` leaves out of each epoch.

    Raises:
        UsageError: it would leave out all samples, or the batch policy is not `GlobalBatch`.
    """
    if length == ENDLESS:
        raise UsageError("drop_last=True: the stream has no len(); give run.loader(..., samples=N), or leave it out")
    if not isinstance(batch, GlobalBatch):
        raise UsageError(
            "drop_last=True needs a batch of constant size, farandole.GlobalBatch: with another policy, the size of "
            "an epoch's last batch depends on the workers at that time"
        )
    if length < batch.size:
        raise UsageError(f"drop_last=True would leave out all {length} samples: fewer than a batch of {batch.size}")
    remainder = length % batch.size
    _log.warning("drop_last leaves out %d of %d samples in each epoch, different ones each time", remainder, length)
    return remainder


def processes_of(
    num_workers: Any, prefetch_factor: Any, timeout: Any, multiprocessing_context: Any
) -> tuple[int, int | None, float]:
    """Returns the number of loader processes, the micro-batches that each prefetches (None: torch's default), and the
    timeout for a result in seconds (0: no limit).

    Raises:
        UsageError: a value is invalid, or needs loader processes and there are none.
    """
    processes = whole("num_workers={}", num_workers, 0, MAX_PROCESSES, why="processes of the loader, 0: none")
    ahead = None
    if prefetch_factor is not None:
        why = "micro-batches that each process prefetches; default: 2"
        ahead = whole("prefetch_factor={}", prefetch_factor, 1, MAX_AHEAD, why=why)
    seconds = real("timeout={}", timeout, 0, MAX_TIMEOUT_S, why="seconds, 0: without limit")
    options = {"prefetch_factor": ahead, "timeout": seconds, "multiprocessing_context": multiprocessing_context}
    for name, value in options.items():
        if value and not processes:
            raise UsageError(f"{name}={value!r} configures loader processes: set num_workers > 0, or leave it out")
    return processes, ahead, seconds


def check_stream_options(dataset: Any, *, num_workers: int, shuffle: bool | None, on_bad_sample: str) -> None:
    """Raises `UsageError` for each option that a loader of an iterable dataset does not take."""
    kind = type(dataset).__name__
    if num_workers > 1:
        raise UsageError(
            f"run.loader({kind}, num_workers={num_workers}): each process would read the whole stream; give "
            f"num_workers=1, or 0, also beside a DataLoader: run.loader(dataloader, num_workers=1, micro=...)"
        )
    if shuffle:
        raise UsageError(
            f"run.loader({kind}, shuffle=True): a stream keeps its order; shuffle where it is read, as "
            f"datasets.IterableDataset.shuffle(buffer_size=...) does, or give a map-style dataset"
        )
    if on_bad_sample == "skip":
        raise UsageError(
            f'run.loader({kind}, on_bad_sample="skip"): an iterator has ended when it raises; leave bad samples out '
            f"where the stream is read"
        )


def callable_or_none(name: str, value: Any) -> Callable[..., Any] | None:
    """Returns `value` of the option `name`. Raises `UsageError` if it is not callable."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r:.100} is not callable: give a function, or leave it out")
    return value


def check_options(options: dict[str, Any]) -> None:
    """Raises `UsageError` for each option that this loader does not take; states why."""
    for name, value in options.items():
        if name == "persistent_workers":
            if not value:
                raise UsageError(
                    f"persistent_workers={value}: loader processes live as long as the loader; leave it out"
                )
        elif name in REFUSED:
            raise UsageError(f"{name}={value!r} can't be set here: {REFUSED[name]}")
        else:
            raise UsageError(
                f"{name}={value!r} is not an option of the loader; it takes num_workers, collate_fn, pin_memory, "
                "worker_init_fn, prefetch_factor, timeout, multiprocessing_context and shuffle, as DataLoader does, "
                "drop_last and on_bad_sample"
            )


# --- announced --------------------------------------------------------------------------------------------------------
#
# The samples that the loader has announced to its dataset: those that come next in the order.
#
# It announces the next samples of all workers from a position on, not only this worker's, because a view change may
# reassign them, and because workers of one host use one another's copies. It announces again when half of the announced
# range is behind the current position.

HORIZON = 16_384  # samples
NOWHERE = (-1, 0)


class Announced:
    """Announces the next samples of one loader to its dataset, if the dataset has the hooks (`workers.hook`)."""

    def __init__(self, dataset: Any, order: SampleOrder | SamplerOrder) -> None:
        self._order = order
        self._expect, self._settle = hook(dataset, "expect"), hook(dataset, "settle")
        self._at = NOWHERE  # epoch and position where the last announcement begins

    def begin(self) -> None:
        """Announces the beginning of epoch 0 if nothing was announced yet: the position is not known yet."""
        if self._at == NOWHERE:
            self.reach(0, 0)

    def reach(self, epoch: int, start: int) -> None:
        """Announces the samples from position `start` of `epoch` on, unless an announcement covers them already."""
        if self._expect is None:
            return
        announced_epoch, first = self._at
        if epoch == announced_epoch and first <= start < first + HORIZON // 2:
            return
        self._at = epoch, start
        samples = self._order.samples(epoch, start, min(start + HORIZON, self._order.length_in(epoch)))
        self._expect(samples, shuffled=self._order.shuffle)

    def settle(self, at_most_s: float) -> None:
        """Waits at most `at_most_s` seconds until the announced samples are near."""
        if self._settle is not None and at_most_s:
            self._settle(at_most_s)


# --- loader -----------------------------------------------------------------------------------------------------------

NOT_PICKLED = {"PicklingError", "AttributeError", "TypeError"}  # names of the exceptions that pickling raises


class Loader:
    """Makes micro-batches of `dataset` on request, and prefetches them; options have torch's names and meaning."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch: BatchPolicy,
        *,
        seed: int,
        shuffle: bool | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        on_bad_sample: str = "raise",
        drop_last: bool = False,
        samples: int | None = None,
        order: SamplerOrder | None = None,
        on_deaths: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Checks all arguments; starts no process. Calls `on_deaths` with the reason when loader processes have died.

        `shuffle`: True by default; a stream (`torch.utils.data.IterableDataset`) keeps its order. `samples`: the length
        of a stream that has no `len()`. `order`: that of a sampler, in place of `shuffle` and the run's seed.

        Raises:
            UsageError: the dataset can't be loaded, or an option is invalid here.
        """
        check_options(options)
        if on_bad_sample not in ("raise", "skip"):
            raise UsageError(f'on_bad_sample={on_bad_sample!r}: "raise", or "skip" to leave out and count such samples')
        num_workers, prefetch_factor, timeout = processes_of(
            num_workers, prefetch_factor, timeout, multiprocessing_context
        )
        callable_or_none("collate_fn", collate_fn)
        callable_or_none("worker_init_fn", worker_init_fn)
        self.dataset = dataset
        self.batch = batch
        self._places = num_workers * (prefetch_factor or 2)
        self._ahead = Prefetch(limit=2 * self._places)
        self.stream: Stream | None = None
        if is_stream(dataset):
            check_stream_options(dataset, num_workers=num_workers, shuffle=shuffle, on_bad_sample=on_bad_sample)
            batch_size = batch.samples(_WORKERS)
            keep = batch_size * (1 + 2 * self._places)  # prefetched micro-batches may be of as many steps
            self.stream = Stream(dataset, seed, samples=samples, keep=keep, every=max(batch_size, _MARKS_EVERY))
        elif samples is not None:
            raise UsageError(f"run.loader(samples={samples!r}): {type(dataset).__name__} has a length of its own")
        self.length = length_of(dataset) if self.stream is None else self.stream.length
        if on_bad_sample == "raise":
            check_subsets(dataset)
        shuffled = self.stream is None if shuffle is None else shuffle
        self.order = SampleOrder(self.length, seed, shuffled) if order is None else order
        self.batches = 0 if order is None else order.batches  # of a batch sampler in epoch 0; 0: `batch` makes them
        if self.batches and drop_last:
            raise UsageError("drop_last=True: the batch sampler decides which samples an epoch has; leave it out")
        self.left_out = left_out(self.order.length, batch) if drop_last else 0  # at the end of each epoch's order
        self.epoch_samples = self.order.length - self.left_out  # in epoch 0; only a batch sampler has other numbers
        self.device: torch.device | None = None  # the place of the micro-batches in the loop, None to leave them
        self.skips = on_bad_sample == "skip"
        self.skipped: tuple[int, ...] = ()  # bad samples that the micro-batch fetched last lacks
        self._announced = Announced(self.stream or dataset, self.order)
        self._source = Source(self.stream or dataset, self.order, collate_fn, skips=self.skips)
        epochs = self._source.epochs
        if self.stream is not None:  # with a process, that one alone calls its `set_epoch`
            epochs = Epochs(collate_fn) if num_workers else Epochs(dataset, collate_fn)
        self._state = DatasetState(epochs, dataset, collate_fn)
        self.making = NOTHING  # the cost of making all micro-batches received so far
        self.processes = num_workers
        self._direct = num_workers == 0 and not pin_memory
        self._pins = pin_memory
        self._results: Any = None  # torch's iterator, once processes run
        self._new_start = partial(ProcessStart, worker_init_fn, multiprocessing_context)
        self._start: ProcessStart | None = None
        self._deaths = 0  # in a row
        self._on_deaths = on_deaths
        self._hook: FetchHook | None = None
        self._epoch = -1  # epoch of the micro-batch fetched last
        self._pid = os.getpid()
        try:
            self._new_loader = partial(
                DataLoader[Any],
                self._source,
                batch_size=None,
                num_workers=num_workers,
                collate_fn=_unchanged,  # torch's default would turn the user's NumPy arrays into tensors
                pin_memory=pin_memory,
                timeout=timeout,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=num_workers > 0,
                generator=torch.Generator(),  # starting processes must not draw from the global one
            )
            self._new_loader(sampler=())
        except (ValueError, TypeError) as error:
            raise UsageError(f"torch's DataLoader refuses these options: {error}") from error
        if num_workers:
            shared_memory.check()

    def measure(self, hook: FetchHook, *, making: bool = False) -> None:
        """Fetch all micro-batches through `hook` from now on. `making`: sum the cost of making them in `self.making`.

        Call it before the first micro-batch: processes that run already do not measure.
        """
        self._hook, self._source.timed = hook, making

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "a loader of farandole is iterated over by run.steps: for step in run.steps(loader, epochs=...): "
            "for batch in step: ..."
        )

    def __len__(self) -> int:
        """Returns the number of steps of the base batch in an epoch; the last may be shorter.

        With a batch sampler: its number of batches in epoch 0. Raises UsageError for a stream of unknown length.
        """
        if self.endless:
            raise UsageError(
                f"{type(self.dataset).__name__} has no len(), so an epoch has no end: give the number of its samples, "
                f"run.loader(..., samples=N), or the length of the run in steps: run.steps(loader, base_steps=N)"
            )
        return self.batches or -(-self.epoch_samples // self.batch.base)

    @property
    def endless(self) -> bool:
        """True for a stream of unknown length, which has one epoch."""
        return self.length == ENDLESS

    def samples_in(self, epoch: int) -> int:
        """Returns the number of samples that `epoch` takes."""
        return self.order.length_in(epoch) - self.left_out

    def window(self, position: Position, workers: int) -> Window:
        """Returns the window of the step at `position`, which `workers` workers begin."""
        if self.batches:
            assert isinstance(self.order, SamplerOrder)
            _, stop = self.order.batch(position.epoch, position.offset)
            return Window(start=position.offset, stop=stop, micro=self.batch.micro)
        return window(position, self.samples_in(position.epoch), self.batch.samples(workers), self.batch.micro)

    def steps_left(self, position: Position) -> int:
        """Returns the number of a batch sampler's batches from `position` on to its epoch's end."""
        assert isinstance(self.order, SamplerOrder)
        return self.order.batches_in(position.epoch) - self.order.batch(position.epoch, position.offset)[0]

    def expect(self, upcoming: Iterable[Key]) -> None:
        """Replaces the prefetch list by `upcoming`: the keys in the order in which they will be fetched.

        `upcoming` may be endless. 256 keys are read at once, more when they are due. Micro-batches in flight or waiting
        that are among those 256 are kept, the rest are dropped. Without loader processes nothing is prefetched.
        """
        if not self._direct:
            self._ahead.replace(upcoming)
            self._started()
            self._trade_idle()

    def enter(self, epoch: int) -> None:
        """Begins a step of `epoch`: calls the dataset's `set_epoch` before the script's loop body runs.

        Raises:
            UsageError: the script has changed the dataset.
        """
        self._state.enter(epoch)

    def warm(self, at_most_s: float) -> None:
        """Starts the processes before the first fetch, and waits at most `at_most_s` seconds until the data is near."""
        self._announced.begin()
        if not self._direct:
            self._started()
        self._announced.settle(at_most_s)

    def fetch(self, key: Key) -> Any:
        """Returns the collated micro-batch of `key`, with every CPU tensor in 64-byte aligned memory.

        A key that is not expected goes to the front of the requests. With `on_bad_sample="skip"` a sample whose
        reading raises is left out and named in `skipped`; the batch is None if all samples are left out.

        Raises:
            BadSample: the dataset raised an exception, whose traceback it has.
            LoaderDied: loader processes keep dying. The next call starts new ones.
            RuntimeError: a loader process timed out. The next call starts new ones.
        """
        self._state.enter(key.epoch)
        if key.epoch != self._epoch:
            if self.stream is None:
                check_length(self.dataset, self.length)
            self._epoch = key.epoch
        try:
            return self._fetch(key) if self._hook is None else self._hook.fetch(key, self._fetch)
        finally:
            self._source.epochs.enter(key.epoch)  # prefetching in this process may have entered the next epoch
            self._state.settle()

    def _fetch(self, key: Key) -> Any:
        self._announced.reach(key.epoch, key.start)
        batch = self._fetched(key)
        self.skipped = ()
        if isinstance(batch, Incomplete):
            for _, reason in batch.bad:
                _log.warning("BAD SAMPLE LEFT OUT of epoch %d: %s", key.epoch, reason)
            self.skipped, batch = tuple(sample for sample, _ in batch.bad), batch.batch
        return aligned(batch)

    def _fetched(self, key: Key) -> Any:
        if self._direct:
            return (
                self._received(self._source.timed_batch(key)) if self._source.timed else self._source.micro_batch(key)
            )
        ahead = self._ahead
        ahead.ask(key)
        while key not in ahead.waiting:
            self._pull()
        result = ahead.waiting.pop(key)
        self._trade_idle()
        if isinstance(result, ExceptionWrapper):
            try:
                result.reraise()
            except RuntimeError as error:
                raise shared_memory.explained(error)  # noqa: B904  mostly the same one
        return result

    def close(self) -> None:
        """Ends the loader processes and drops their results; `expect` or `fetch` would start new ones.

        A micro-batch that is being made is abandoned after a grace period of 1 s.
        """
        results, start = self._detach()
        self._ahead.clear()
        if results is None or start is None or os.getpid() != self._pid:
            return
        start.stop()
        if self.processes:
            results._shutdown_workers()  # dropping `results` would do, but only once no traceback refers to it
            for process in results._workers:
                if process.is_alive():  # stuck where even its own threads don't run; it ignores DataLoader's SIGTERM
                    process.kill()
                    process.join()

    def _detach(self) -> tuple[Any, ProcessStart | None]:
        results, self._results = self._results, None
        start, self._start = self._start, None
        self._source.slots = None
        return results, start

    def __del__(self) -> None:
        if getattr(self, "_results", None) is not None:
            self.close()

    def _started(self) -> Any:
        if self._results is None:
            self._announced.begin()  # so that all its processes share one fetcher
            try:
                self._start = self._new_start()
                slots = Slots(self._places) if (GO_ANYWHERE or self._start.forks) and not self._pins else None
                self._source.slots = slots
                numbers = slots.numbers() if slots else repeat(0)
                # DataLoader takes as many requests from the sampler as there are places
                requests = cast("Any", zip(numbers, self._ahead, self._marks_for_process(), strict=False))
                self._results = iter(self._new_loader(sampler=requests, worker_init_fn=self._start))
                if self.processes:
                    workers.adopt(self._results)
            except BaseException as error:
                _, start = self._detach()
                if start is not None:
                    start.stop()  # some processes may run
                self._ahead.clear()
                if start is not None and not start.forks and type(error).__name__ in NOT_PICKLED:
                    raise UsageError(
                        f"the dataset, collate_fn or worker_init_fn can't be sent to loader processes that are not "
                        f"forked: {error}; define its functions and classes at the top of a module, or give "
                        f'multiprocessing_context="fork"'
                    ) from error
                raise shared_memory.explained(error)  # noqa: B904  mostly the same one
            _open_loaders.add(self)
            # Our exit handler must run first. The one of multiprocessing would wait for ever for processes that ignore
            # SIGTERM. The one of torch, registered when it pins, would wait 10 s for each busy process.
            atexit.unregister(_close_open_loaders)
            atexit.register(_close_open_loaders)
        return self._results

    def _marks_for_process(self) -> Iterator[list[bytes]]:
        """Yields for each request the marks that this worker was given since the last one."""
        while True:
            yield [] if self.stream is None else self.stream.given_marks()

    def _pull(self) -> None:
        """Takes one result; if a process has died, replaces all processes instead."""
        try:
            results = self._started()
            if self._died():
                self._replace_processes(None)
                return
            key, result = next(results)
        except BaseException as error:  # a process died, or we are interrupted: the pipeline's state is unknown
            process_died = isinstance(error, OSError | EOFError) or bool(self._died())
            # the dataset's own exceptions come as results
            if self.processes and isinstance(error, Exception) and process_died:
                self._replace_processes(error)
                return
            self.close()
            raise
        result = self._received(result)
        self._deaths = 0 if key is not None else self._deaths
        self._ahead.receive(key, result)

    def _received(self, batch: Any) -> Any:
        """Copies the batch out of its slot, and adds the cost of making it to `making`."""
        if isinstance(batch, Streamed):
            assert self.stream is not None
            self.stream.learn(batch.marks, given=False)
            batch = batch.batch
        making, batch = (batch.making, batch.batch) if isinstance(batch, Timed) else (None, batch)
        slots, began = self._source.slots, time.perf_counter()
        if slots is not None:
            batch = slots.take(batch)
        if making is not None:
            handing_over = Making(handing_over=time.perf_counter() - began)
            self.making = self.making.plus(making.plus(handing_over))
        return batch

    def _died(self) -> list[BaseProcess]:
        return workers.dead(self._results) if self.processes and self._results is not None else []

    def _replace_processes(self, error: Exception | None) -> None:
        """Starts new processes and sends them the same requests in the same order, so results have the same bits."""
        reason = workers.cause_of_death(self._died())
        results, start = self._detach()
        if results is not None and start is not None:
            workers.clear_away(results, start)
        self._deaths += 1
        if self._deaths >= workers.LIMIT:
            self._deaths = 0
            self._ahead.clear()
            raise LoaderDied(
                f"{reason}, the {workers.LIMIT}rd time in a row without a sample in between; where memory is short, "
                "fewer processes (num_workers) and a smaller prefetch_factor take less of it"
            ) from error
        _log.warning("%s; %d new ones are started", reason, self.processes)
        if self._on_deaths is not None:
            self._on_deaths(reason)
        self._ahead.begin_again()
        self._started()

    def _trade_idle(self) -> None:
        while self._ahead.under_way and self._ahead.under_way[0] is None and self._ahead.next_expected() is not None:
            self._pull()


def _unchanged(result: Any) -> Any:
    return result


_open_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


def _close_open_loaders() -> None:
    for loader in list(_open_loaders):
        loader.close()
