"""A worker's micro-batches, fetched ahead of a plan that may change at any step.

It is an ordinary `torch.utils.data.DataLoader` whose sampler is ours (`workers.py`): a request is a `Key`, one
micro-batch, and the loader process that gets it makes the whole micro-batch (`workers.py`), which depends on its key
alone: a lost worker's shards can be made by anyone. The same processes serve from the first `expect` or `fetch` to
`close`, through any number of plans. If one of them dies, all are replaced (`workers.py`), and what was under way is
requested again. An exception of the dataset's travels with its key and is raised when that key is asked for; if nobody
asks, it is nobody's.

Processor time of a fetch of 64 samples of 784 values in one process: 43 us from a `TensorDataset` (37 of them torch's
`index_select`; torch's own DataLoader takes 250), 0.85 ms sample by sample (7 of 13 us a sample set random state).

Loader processes end with the thread that started them (`ProcessStart`): fetch from one that outlives training.
Left out: iterable datasets (no random access), use by several threads. `fetch` leaves the global random state
anywhere: seed it before what follows.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sized
from functools import partial
from itertools import repeat
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset

from farandole.data import shared_memory, workers
from farandole.data.epochs import DatasetState
from farandole.data.facts import subsets
from farandole.data.object_store import NOTHING, Making, Timed
from farandole.data.order import SampleOrder
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
from farandole.platform.bounds import real, whole

# --- options ----------------------------------------------------------------------------------------------------------
#
# What a loader can be asked for: each other option of torch's DataLoader is an error that says why it can't be set.
#
# Nothing is left out in silence: how many samples `drop_last` leaves out of each epoch is said.

_log = logging.getLogger(__name__)
MAX_PROCESSES = 1024  # of a loader
MAX_AHEAD = 1024  # micro-batches of a process
MAX_TIMEOUT_S = 1e6  # poll(2) takes no more than 24 days
REFUSED = {
    "batch_size": "the global batch is what `batch` says",
    "sampler": "the order comes from the run's seed; shuffle=False keeps the dataset's, a Subset leaves samples out",
    "batch_sampler": "the order comes from the run's seed; `batch` says how it is cut",
    "generator": "random state comes from the run's seed",
    "in_order": "results are matched to requests in order",
    "pin_memory_device": "pin_memory=True pins for the current accelerator",
}


def length_of(dataset: Dataset[Any]) -> int:
    """How many samples it has. Raises `UsageError` where they can't be reached by their numbers."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UsageError(f"{kind} is an IterableDataset: any worker must reach any sample, so give a map-style dataset")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(f"{kind} needs __getitem__(index) and __len__(): any worker must reach any sample")
    try:
        length = len(cast(Sized, dataset))
    except Exception as error:
        raise UsageError(
            f"len() of {kind} fails with {type(error).__name__}: {error}; any worker must know how many samples there "
            f"are: hand in a data set, not its class, whose __len__() gives a whole number"
        ) from error
    if length == 0:
        raise UsageError(f"{kind} is empty: a dataset needs at least one sample")
    return whole(f"the length of {kind}, {{}}", length, 1, why="samples")


def check_length(dataset: Dataset[Any], length: int) -> None:
    """Raises `UsageError` where a data set has another length than when its loader was made."""
    now = len(cast(Sized, dataset))
    if now != length:
        raise UsageError(
            f"{type(dataset).__name__} had {length} samples when its loader was made and has {now} now: some would "
            f"be left out, or asked for that are not there; keep its length the same in all epochs of a run"
        )


def check_subsets(dataset: Dataset[Any]) -> None:
    """What a `Subset` picks is in its data set: a number that looks as if it is not is tried.

    Raises:
        UsageError: one is not; names it.
    """
    for subset in subsets(dataset):
        indices, length = np.asarray(subset.indices), len(cast(Sized, subset.dataset))
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            continue
        for at in np.flatnonzero((indices < -length) | (indices >= length))[:1]:
            try:
                subset.dataset[subset.indices[at]]  # its data set may number its samples in another way
            except LookupError as error:
                kind = type(subset.dataset).__name__
                raise UsageError(
                    f"Subset.indices[{at}] is {indices[at]}, and the {kind} that it picks from has {length} samples, "
                    f"0 to {length - 1} ({type(error).__name__}: {error}); mend the indices"
                ) from error


def left_out(length: int, batch: BatchPolicy) -> int:
    """How many samples `drop_last` leaves out of each epoch. Raises `UsageError` where it would leave out all."""
    if not isinstance(batch, GlobalBatch):
        raise UsageError(
            "drop_last=True needs a batch that stays the same, farandole.GlobalBatch: whether another is an epoch's "
            "last, and short, is known only when its workers are"
        )
    if length < batch.size:
        raise UsageError(f"drop_last=True would leave out all {length} samples: fewer than a batch of {batch.size}")
    rest = length % batch.size
    _log.warning("drop_last leaves %d of %d samples out of each epoch, others each time", rest, length)
    return rest


def processes_of(
    num_workers: Any, prefetch_factor: Any, timeout: Any, multiprocessing_context: Any
) -> tuple[int, int | None, float]:
    """How many processes a loader has, how many micro-batches each makes ahead (None: torch's default), and for how
    many seconds a result is waited for (0: without limit).

    Raises:
        UsageError: a value means nothing, or means nothing without processes.
    """
    processes = whole("num_workers={}", num_workers, 0, MAX_PROCESSES, why="processes of the loader, 0: none")
    ahead = None
    if prefetch_factor is not None:
        why = "micro-batches that each process makes ahead; left out: 2"
        ahead = whole("prefetch_factor={}", prefetch_factor, 1, MAX_AHEAD, why=why)
    seconds = real("timeout={}", timeout, 0, MAX_TIMEOUT_S, why="seconds, 0: without limit")
    meant = {"prefetch_factor": ahead, "timeout": seconds, "multiprocessing_context": multiprocessing_context}
    for name, value in meant.items():
        if value and not processes:
            raise UsageError(f"{name}={value!r} is of loader processes: it needs num_workers > 0; else leave it out")
    return processes, ahead, seconds


def callable_or_none(name: str, value: Any) -> Callable[..., Any] | None:
    """`value` of the option `name`. Raises `UsageError` where it can't be called."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r:.100} can't be called: give a function, or leave it out")
    return value


def check_options(options: dict[str, Any]) -> None:
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
                f"{name}={value!r} is no option of the loader; it takes num_workers, collate_fn, pin_memory, "
                "worker_init_fn, prefetch_factor, timeout, multiprocessing_context and shuffle, as DataLoader does, "
                "drop_last and on_bad_sample"
            )


# --- announced --------------------------------------------------------------------------------------------------------
#
# What the loader has told its dataset of the order: which samples come next, wherever the loader is.
#
# Told are the samples that all workers will take from a position on, not this one's alone: whatever a view changes,
# what is near is what is wanted; and workers of one host want one another's. Told again when a good part of it is
# behind.

HORIZON = 16_384  # samples
NOWHERE = (-1, 0)


class Announced:
    """Of one loader."""

    def __init__(self, dataset: Any, order: SampleOrder) -> None:
        self._order = order
        self._expect, self._settle = hook(dataset, "expect"), hook(dataset, "settle")
        self._at = NOWHERE  # epoch and position from which it was told

    def begin(self) -> None:
        """Somebody will read, nobody knows yet where."""
        if self._at == NOWHERE:
            self.reach(0, 0)

    def reach(self, epoch: int, start: int) -> None:
        """The loader is there, or will be soon."""
        if self._expect is None:
            return
        told, first = self._at
        if epoch == told and first <= start < first + HORIZON // 2:
            return
        self._at = epoch, start
        samples = self._order.samples(epoch, start, min(start + HORIZON, self._order.length))
        self._expect(samples, shuffled=self._order.shuffle)

    def settle(self, at_most_s: float) -> None:
        """Wait until what was told is near."""
        if self._settle is not None and at_most_s:
            self._settle(at_most_s)


# --- loader -----------------------------------------------------------------------------------------------------------

NOT_PICKLED = {"PicklingError", "AttributeError", "TypeError"}  # names of what pickling raises


class Loader:
    """Makes micro-batches of `dataset` on request, and ahead of it; options have torch's names and meaning."""

    watch: ClassVar[FetchHook | None] = None
    timed: ClassVar[bool] = False  # whether loaders that are made from now on count what making takes, in `making`

    def __init__(
        self,
        dataset: Dataset[Any],
        batch: BatchPolicy,
        *,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        on_bad_sample: str = "raise",
        drop_last: bool = False,
        on_deaths: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Check everything, start nothing. `on_deaths` is called with the reason when loader processes have died.

        Raises:
            UsageError: a dataset that can't be loaded, or an option that makes no sense here.
        """
        check_options(options)
        if on_bad_sample not in ("raise", "skip"):
            raise UsageError(f'on_bad_sample={on_bad_sample!r}: "raise", or "skip" to leave such samples out, counted')
        num_workers, prefetch_factor, timeout = processes_of(
            num_workers, prefetch_factor, timeout, multiprocessing_context
        )
        callable_or_none("collate_fn", collate_fn)
        callable_or_none("worker_init_fn", worker_init_fn)
        self.dataset = dataset
        self.batch = batch
        self.length = length_of(dataset)
        if on_bad_sample == "raise":
            check_subsets(dataset)
        self.left_out = left_out(self.length, batch) if drop_last else 0  # samples, of each epoch's order the last
        self.epoch_samples = self.length - self.left_out
        self.skipped: tuple[int, ...] = ()  # samples that the micro-batch fetched last had to leave out
        self.order = SampleOrder(self.length, seed, shuffle)
        self._announced = Announced(dataset, self.order)
        self._source = Source(dataset, self.order, collate_fn, skips=on_bad_sample == "skip")
        self._source.timed = self.timed
        self._state = DatasetState(self._source.epochs, dataset, collate_fn)
        self.making = NOTHING  # what the making of all that came has taken
        self._places = num_workers * (prefetch_factor or 2)
        self._ahead = Prefetch(limit=2 * self._places)
        self.processes = num_workers
        self._direct = num_workers == 0 and not pin_memory
        self._pins = pin_memory
        self._results: Any = None  # torch's iterator, once processes run
        self._new_start = partial(ProcessStart, worker_init_fn, multiprocessing_context)
        self._start: ProcessStart | None = None
        self._deaths = 0  # in a row
        self._on_deaths = on_deaths
        self._epoch = -1  # of the micro-batch fetched last
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

    def __len__(self) -> int:
        """Steps of the base batch an epoch; the last may be shorter."""
        return -(-self.epoch_samples // self.batch.base)

    def expect(self, upcoming: Iterable[Key]) -> None:
        """Replace what is fetched ahead by `upcoming`: the keys in the order in which they will be asked for.

        It may be endless or end; 256 keys are read at once, more when they are due. What is under way or waiting and
        is among those is kept, the rest dropped. Without loader processes nothing is fetched ahead.
        """
        if not self._direct:
            self._ahead.replace(upcoming)
            self._started()
            self._trade_idle()

    def enter(self, epoch: int) -> None:
        """A step of `epoch` begins: the data set is told of it before the script's loop body comes.

        Raises:
            UsageError: the script has changed the data set.
        """
        self._state.enter(epoch)

    def warm(self, at_most_s: float) -> None:
        """Before anybody waits for it: its processes run, and what they will read is near, if that takes no longer."""
        self._announced.begin()
        if not self._direct:
            self._started()
        self._announced.settle(at_most_s)

    def fetch(self, key: Key) -> Any:
        """The collated micro-batch of `key`, every CPU tensor in 64-byte aligned memory.

        A key that is not expected goes to the front of the requests. An exception of the dataset's comes out as
        `BadSample`, with its traceback, or its sample is left out and named in `skipped`, as `on_bad_sample` says: the
        batch is None if all are. `LoaderDied` if loader processes die again and again, `RuntimeError` if one timed
        out; after either the next call starts new ones.
        """
        self._state.enter(key.epoch)
        if key.epoch != self._epoch:
            check_length(self.dataset, self.length)
            self._epoch = key.epoch
        try:
            return self._fetch(key) if self.watch is None else self.watch.fetch(self, key, self._fetch)
        finally:
            self._source.epochs.enter(key.epoch)  # what is read ahead in this process may be of the next one
            self._state.settle()

    def _fetch(self, key: Key) -> Any:
        self._announced.reach(key.epoch, key.start)
        found = self._fetched(key)
        self.skipped = ()
        if isinstance(found, Incomplete):
            for said in found.bad.values():
                _log.warning("BAD SAMPLE LEFT OUT of epoch %d: %s", key.epoch, said)
            self.skipped, found = tuple(found.bad), found.batch
        return aligned(found)

    def _fetched(self, key: Key) -> Any:
        if self._direct:
            return (
                self._received(self._source.timed_batch(key)) if self._source.timed else self._source.micro_batch(key)
            )
        ahead = self._ahead
        ahead.ask(key)
        while key not in ahead.waiting:
            self._pull()
        found = ahead.waiting.pop(key)
        self._trade_idle()
        if isinstance(found, ExceptionWrapper):
            try:
                found.reraise()
            except RuntimeError as error:
                raise shared_memory.explained(error)  # noqa: B904  mostly the same one
        return found

    def close(self) -> None:
        """End the loader processes and drop what they made; `expect` or `fetch` would start new ones.

        What is being made is abandoned after a second of grace.
        """
        results, start = self._let_go()
        self._ahead.clear()
        if results is None or start is None or os.getpid() != self._pid:
            return
        start.stop()
        if self.processes:
            results._shutdown_workers()  # dropping `results` would do, but only once no traceback refers to it
            for process in results._workers:
                if process.is_alive():  # stuck where not even its own threads run; it ignores DataLoader's SIGTERM
                    process.kill()
                    process.join()

    def _let_go(self) -> tuple[Any, ProcessStart | None]:
        results, self._results = self._results, None
        start, self._start = self._start, None
        self._source.slots = None
        return results, start

    def __del__(self) -> None:
        if getattr(self, "_results", None) is not None:
            self.close()

    def _started(self) -> Any:
        if self._results is None:
            self._announced.begin()  # so that all its processes have one fetcher
            try:
                self._start = self._new_start()
                slots = Slots(self._places) if (GO_ANYWHERE or self._start.forks) and not self._pins else None
                self._source.slots = slots
                numbers = slots.numbers() if slots else repeat(0)
                # asks the sampler for as many requests as there are places
                requests = cast("Any", zip(numbers, self._ahead, strict=False))
                self._results = iter(self._new_loader(sampler=requests, worker_init_fn=self._start))
                if self.processes:
                    workers.adopt(self._results)
            except BaseException as error:
                _, start = self._let_go()
                if start is not None:
                    start.stop()  # some may run
                self._ahead.clear()
                if start is not None and not start.forks and type(error).__name__ in NOT_PICKLED:
                    raise UsageError(
                        f"the data set, collate_fn or worker_init_fn can't be sent to loader processes that are not "
                        f"forked: {error}; define its functions and classes at the top of a module, or give "
                        f'multiprocessing_context="fork"'
                    ) from error
                raise shared_memory.explained(error)  # noqa: B904  mostly the same one
            _open_loaders.add(self)
            # Ours must run first at exit. multiprocessing's would wait for ever for processes that ignore SIGTERM,
            # torch's, registered when it pins, 10 seconds for each that is busy.
            atexit.unregister(_close_open_loaders)
            atexit.register(_close_open_loaders)
        return self._results

    def _pull(self) -> None:
        """Take a result; where a process has died, start others instead."""
        try:
            results = self._started()
            if self._died():
                self._replace_processes(None)
                return
            key, found = next(results)
        except BaseException as error:  # a process died, or we are interrupted: the pipeline's state is unknown
            gone = isinstance(error, OSError | EOFError) or bool(self._died())
            if self.processes and isinstance(error, Exception) and gone:  # the dataset's own come as results
                self._replace_processes(error)
                return
            self.close()
            raise
        found = self._received(found)
        self._deaths = 0 if key is not None else self._deaths
        self._ahead.receive(key, found)

    def _received(self, found: Any) -> Any:
        """What lay in its slot is out of it, and what the making took is counted."""
        making, found = (found.making, found.batch) if isinstance(found, Timed) else (None, found)
        slots, began = self._source.slots, time.perf_counter()
        if slots is not None:
            found = slots.take(found)
        if making is not None:
            took = Making(handing_over=time.perf_counter() - began)
            self.making = self.making.plus(making.plus(took))
        return found

    def _died(self) -> list[BaseProcess]:
        return workers.dead(self._results) if self.processes and self._results is not None else []

    def _replace_processes(self, error: Exception | None) -> None:
        """Of new ones the same is requested in the same order, so what comes out has the same bits."""
        said = workers.said(self._died())
        results, start = self._let_go()
        if results is not None and start is not None:
            workers.clear_away(results, start)
        self._deaths += 1
        if self._deaths >= workers.LIMIT:
            self._deaths = 0
            self._ahead.clear()
            raise LoaderDied(
                f"{said}, the {workers.LIMIT}rd time in a row without a sample in between; where memory is short, "
                "fewer processes (num_workers) and a smaller prefetch_factor take less of it"
            ) from error
        _log.warning("%s; %d new ones are started", said, self.processes)
        if self._on_deaths is not None:
            self._on_deaths(said)
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
