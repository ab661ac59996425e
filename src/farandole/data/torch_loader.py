"""What a `torch.utils.data.DataLoader` of the script says about its data, as options of our own loader.

Taken over: the dataset, the batch size, collate_fn, num_workers, drop_last, pin_memory, timeout, worker_init_fn,
prefetch_factor, multiprocessing_context, and from the sampler whether samples are shuffled and which there are. Not
taken over: `generator` and the sampler's own random numbers, since the run's seed decides the order;
`persistent_workers` and `in_order`, which change no result here. A sampler that draws samples with replacement, by
weight or in an order of its own is refused, and so is a batch sampler.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from farandole.data.loader import length_of
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch

_OF_PROCESSES = ("timeout", "prefetch_factor", "multiprocessing_context")  # no options of a loader without processes
_PASSED_ON = ("num_workers", "drop_last", "pin_memory", "worker_init_fn", *_OF_PROCESSES)


def batch_of(loader: DataLoader[Any], micro: int | None) -> GlobalBatch:
    """Return the batch of `loader` in micro-batches of `micro` samples.

    In a script for DistributedDataParallel the batch size of a DataLoader is that of one process: the global batch is
    the one of all processes that its DistributedSampler counts.

    Raises:
        UsageError: `micro` is None, or the DataLoader makes no batches of one size.
    """
    size = loader.batch_size
    if size is None:
        raise UsageError(
            "run.loader: this DataLoader has batch_size=None or a batch_sampler, so its batches have no common size; "
            "pass the dataset instead: run.loader(dataset, batch=farandole.GlobalBatch(size, micro=...))"
        )
    if isinstance(loader.sampler, DistributedSampler):
        size *= loader.sampler.num_replicas
    if micro is None:
        raise UsageError(
            f"run.loader(DataLoader): add micro=, the number of samples of the batch of {size} that one forward pass "
            f"takes, such as micro={max(size // 8, 1)}; at most {size} / micro workers then have work in a step"
        )
    return GlobalBatch(size, micro=micro)


def options_of(loader: DataLoader[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of `loader`, and the options of `Loader` that do the same as it does.

    Raises:
        UsageError: it can't be taken over; says what to pass instead.
    """
    dataset: Any = loader.dataset
    length_of(dataset)
    if type(loader.batch_sampler) is not BatchSampler:
        name = type(loader.batch_sampler).__name__
        raise UsageError(
            f"run.loader: this DataLoader has a batch sampler of its own, {name}, which can't be taken over; pass the "
            f"dataset instead: run.loader(dataset, batch=farandole.GlobalBatch(size, micro=...))"
        )
    options = {name: getattr(loader, name) for name in _PASSED_ON}
    if loader.collate_fn is not default_collate:
        options["collate_fn"] = loader.collate_fn
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is SequentialSampler:
        return dataset, {**options, "shuffle": False}
    if kind is RandomSampler:
        if sampler.replacement or len(sampler) != len(dataset):
            raise _refused(sampler, "it draws samples with replacement, or another number of them than there are")
        return dataset, {**options, "shuffle": True}
    if kind is SubsetRandomSampler:
        return Subset(dataset, [int(index) for index in sampler.indices]), {**options, "shuffle": True}
    if kind is DistributedSampler:
        return dataset, {**options, "shuffle": sampler.shuffle, "drop_last": options["drop_last"] or sampler.drop_last}
    raise _refused(sampler, "the order comes from the run's seed, and each sample counts once an epoch")


def merged(options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a DataLoader with those that the caller gives in place of them."""
    if given.get("num_workers") == 0:
        options = {name: value for name, value in options.items() if name not in _OF_PROCESSES}
    return {**options, **given}


def of_evaluation(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that an evaluation takes: it counts each sample once, in the dataset's order."""
    return {name: value for name, value in options.items() if name not in ("shuffle", "drop_last")}


def _refused(sampler: Any, why: str) -> UsageError:
    return UsageError(
        f"run.loader: the {type(sampler).__name__} of this DataLoader can't be taken over: {why}; make a DataLoader "
        f"with shuffle=True, or with shuffle=False and the dataset in the order that you want"
    )
