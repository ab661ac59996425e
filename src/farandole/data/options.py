"""What a loader can be asked for: each other option of torch's DataLoader is an error that says why it can't be set.

Nothing is left out in silence: how many samples `drop_last` leaves out of each epoch is said.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset

from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch
from farandole.platform.bounds import whole

_log = logging.getLogger(__name__)

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
    length = len(cast(Sized, dataset))
    if length == 0:
        raise UsageError(f"{kind} is empty: a dataset needs at least one sample")
    return whole(f"the length of {kind}, {{}}", length, 1, why="samples")


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
