"""What a loader process sends is known to be sendable before it is sent.

multiprocessing pickles in a thread of the queue's. What it can't pickle is an error on that thread's standard error and
nothing else: the result never comes, and the training process waits for it for ever. So what is not plain is pickled
here, where an error can travel with its key as any exception of the dataset's does. The receiver gets the object
itself, by whichever thread takes it out of the queue.

Plain values and arrays, in plain containers, are left to the queue: they can be sent, and to pickle them here would
copy them once more. A tensor that lies in no slot is not plain: pickling it takes a file of shared memory, which the
system may refuse. Left out: what can be pickled and then not be restored, which is an error of the receiver's.
"""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
from torch._utils import ExceptionWrapper

from farandole.data.shared import refused
from farandole.data.slots import Placed
from farandole.errors import UsageError

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, Placed))


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
    if kind in _PLAIN:
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
