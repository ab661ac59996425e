"""What a loader can be asked for: each other option of torch's DataLoader is an error that says why it can't be set.

Nothing is left out in silence: how many samples `drop_last` leaves out of each epoch is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from farandole.data.facts import subsets
from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch
from farandole.platform.bounds import real, whole

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
