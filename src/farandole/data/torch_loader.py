"""What a `torch.utils.data.DataLoader` of the script says about its data, as options of our own loader.

Taken over: the dataset, the batch size, collate_fn, num_workers, drop_last, pin_memory, timeout, worker_init_fn,
prefetch_factor, multiprocessing_context, and from the sampler whether samples are shuffled and which there are. Any
other sampler, and a batch sampler, gives the order itself (`SamplerOrder`). Not taken over: the state of `generator`,
since the run's seed decides the random numbers; `persistent_workers` and `in_order`, which change no result here.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from farandole.data.loader import length_of
from farandole.data.sampler_order import SamplerOrder
from farandole.data.stream import is_stream
from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch

_OF_PROCESSES = ("timeout", "prefetch_factor", "multiprocessing_context")  # no options of a loader without processes
_PASSED_ON = ("num_workers", "drop_last", "pin_memory", "worker_init_fn", *_OF_PROCESSES)


def batch_of(
    loader: DataLoader[Any], batch: BatchPolicy | None, micro: int | None, order: SamplerOrder | None
) -> BatchPolicy:
    """Return `batch`, or without it the batch of `loader` in micro-batches of `micro` samples.

    With a batch sampler, `order`, the size is that of the largest batch in epoch 0. In a script for
    DistributedDataParallel the batch size of a DataLoader is that of one process: the global batch is the one of all
    processes that its DistributedSampler counts.

    Raises:
        UsageError: `micro` is None, the DataLoader makes no batches, or `batch` is given and a batch sampler too.
    """
    size = order.largest if order is not None and order.batches else loader.batch_size
    if batch is not None:
        if order is not None and order.batches:
            raise UsageError(
                f"run.loader(DataLoader, batch={batch!r}): its {type(loader.batch_sampler).__name__} makes the "
                f"batches; leave out `batch` and give micro={batch.micro}"
            )
        return batch
    if size is None:
        raise UsageError(
            "run.loader: this DataLoader has batch_size=None, so it makes no batches; pass the dataset instead: "
            "run.loader(dataset, batch=farandole.GlobalBatch(size, micro=...))"
        )
    if isinstance(loader.sampler, DistributedSampler):
        size *= loader.sampler.num_replicas
    if micro is None:
        raise UsageError(
            f"run.loader(DataLoader): add micro=, the number of samples of the batch of {size} that one forward pass "
            f"takes, such as micro={max(size // 8, 1)}; at most {size} / micro workers then have work in a step"
        )
    return GlobalBatch(size, micro=micro)


def options_of(loader: DataLoader[Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of `loader`, and the options of `Loader` that do the same as it does in a run with `seed`.

    Raises:
        UsageError: it can't be taken over; says what to pass instead.
    """
    dataset: Any = loader.dataset
    samples = 0 if is_stream(dataset) else length_of(dataset)
    options = {name: getattr(loader, name) for name in _PASSED_ON}
    if loader.collate_fn is not default_collate:
        options["collate_fn"] = loader.collate_fn
    if loader.batch_size is None and loader.batch_sampler is not None:
        return dataset, {**options, "order": SamplerOrder(loader.batch_sampler, samples, seed=seed, batches=True)}
    if is_stream(dataset):
        return dataset, options
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is SequentialSampler:
        return dataset, {**options, "shuffle": False}
    if kind is RandomSampler and not sampler.replacement and len(sampler) == samples:
        return dataset, {**options, "shuffle": True}
    if kind is SubsetRandomSampler:
        return Subset(dataset, [int(index) for index in sampler.indices]), {**options, "shuffle": True}
    if kind is DistributedSampler:
        return dataset, {**options, "shuffle": sampler.shuffle, "drop_last": options["drop_last"] or sampler.drop_last}
    return dataset, {**options, "order": SamplerOrder(sampler, samples, seed=seed)}


def merged(options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a DataLoader with those that the caller gives in place of them."""
    if given.get("num_workers") == 0:
        options = {name: value for name, value in options.items() if name not in _OF_PROCESSES}
    if "order" in options and "shuffle" in given:
        raise UsageError(
            f"run.loader(DataLoader, shuffle={given['shuffle']}): the order is that of the DataLoader's sampler; leave "
            f"out `shuffle`, or pass the dataset instead: run.loader(dataset, batch=..., shuffle=...)"
        )
    return {**options, **given}


def of_evaluation(dataset: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that an evaluation takes: it counts each sample once, in the dataset's order.

    Raises:
        UsageError: a sampler says which samples count, and how often.
    """
    if "order" in options:
        raise UsageError(
            f"run.evaluate(DataLoader): it has a sampler of its own, and an evaluation counts each sample of the "
            f"{type(dataset).__name__} once; pass the dataset, or a torch.utils.data.Subset of it"
        )
    return {name: value for name, value in options.items() if name not in ("shuffle", "drop_last")}
