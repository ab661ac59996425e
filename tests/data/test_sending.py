"""What a loader process can't send is an error at once, that names it."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from farandole.data.loader import Key, Loader
from farandole.data.workers import Pickled, Slots, sendable
from farandole.errors import UsageError
from tests.support.drawing import Drawing, keys

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Pair(NamedTuple):
    x: Any
    y: Any


class Closed:
    def __reduce__(self) -> Any:
        raise RuntimeError("this object does not travel")


def local() -> Any:
    class Local:
        pass

    return Local()


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a generator": (lambda: (n for n in range(3)), r"batch\b.*\bgenerator\b"),
    "one in a dict": (lambda: {"x": torch.ones(2), "y": (n for n in [1])}, r"batch\['y'\].*\bgenerator\b"),
    "a lambda": (lambda: [torch.ones(2), lambda: 1], r"batch\[1\].*\bfunction\b"),
    "an open file": (lambda: sys.stderr, r"batch\b.*(IO|File)"),
    "a lock": (lambda: Pair(1, [threading.Lock()]), r"batch\[1\]\[0\].*\block\b"),
    "of a local class": (local, r"batch\b.*\bLocal\b"),
    "a class that refuses": (lambda: (1, Closed()), r"batch\[1\].*\bClosed\b.*this object does not travel"),
    "a tensor in a graph": (lambda: {"x": torch.ones(2, requires_grad=True) * 2}, r"batch\['x'\].*\bTensor\b"),
    "an array of objects": (lambda: np.array([lambda: 1], dtype=object), r"batch\b.*\bndarray\b"),
}


@pytest.mark.failure(
    "Data and loader processes",
    "a loader process can't send a batch (a generator, a lambda, an open file, a lock, a tensor of a graph)",
    seen="an error at once names the part of the batch and its type",
    outcome="the run ends as after an error of the script",
)
@pytest.mark.parametrize("what", UNSENDABLE)
def test_what_can_not_be_sent_is_named(what: str) -> None:
    make, named = UNSENDABLE[what]
    with pytest.raises(UsageError, match=rf"{named}.*num_workers=0"):
        sendable(make())


def test_what_is_plain_is_left_to_the_queue_and_the_rest_arrives_as_it_was() -> None:
    plain = {"x": [np.ones(3), ("a", None, 1, 2.0)], 3: b"b", "in a slot": Slots(1).put(0, [torch.ones(2)])}
    assert sendable(plain) is plain
    other = Pair(1, {2, 3})
    sent = sendable(other)
    assert isinstance(sent, Pickled)
    assert pickle.loads(pickle.dumps(sent)) == other


def test_a_tensor_in_no_slot_is_pickled_here_where_an_error_can_travel() -> None:
    assert isinstance(sendable({"x": torch.ones(2)}), Pickled)


# --- through processes -----------------------------------------------------------------------------------------------


class Picky(Exception):
    """Its constructor takes other arguments than an exception's."""

    def __init__(self, code: int, lock: Any) -> None:
        super().__init__(f"code {code}")
        self.lock = lock


def raises(error: BaseException) -> Callable[[list[Any]], Any]:
    def collate(_: list[Any]) -> Any:
        raise error

    return collate


def local_error() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("of a class that only its function knows")


RAISED: dict[str, tuple[Callable[[], BaseException], type[Exception], str]] = {
    "other arguments": (lambda: Picky(7, threading.Lock()), Exception, "code 7"),
    "a local class": (local_error, UsageError, r"\bLocalError\b.*only its function knows"),
    "an exit": (lambda: SystemExit(0), UsageError, "SystemExit"),
    "an interrupt": (KeyboardInterrupt, UsageError, "KeyboardInterrupt"),
    "the end of an iterator": (StopIteration, UsageError, "StopIteration"),
}


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the dataset, `collate_fn` or `worker_init_fn` raises an exception that can't be pickled, or `sys.exit`, in a "
        "loader process"
    ),
    seen="an error at once, with its name, message and traceback",
    outcome="the run ends as after an error of the script",
)
@pytest.mark.processes
@pytest.mark.parametrize("what", RAISED)
def test_whatever_collate_raises_comes_out(make: Callable[..., Loader], what: str) -> None:
    error, kind, said = RAISED[what]
    loader = make(Drawing(), collate_fn=raises(error()))
    with pytest.raises(kind, match=said):
        loader.fetch(keys(loader)[0])


@pytest.mark.failure(
    "Data and loader processes",
    "a loader process can't send a batch (a generator, a lambda, an open file, a lock, a tensor of a graph)",
)
@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 4}, {"multiprocessing_context": "fork"}])
def test_a_generator_is_an_error_and_the_loader_goes_on(make: Callable[..., Loader], options: dict[str, Any]) -> None:
    def collate(samples: list[Any]) -> Any:
        return (each for each in samples) if samples[0][0] == 0 else len(samples)

    loader = make(Drawing(), collate_fn=collate, shuffle=False, **options)
    loader.expect(iter(keys(loader)))
    with pytest.raises(UsageError, match=r"\bgenerator\b"):
        loader.fetch(keys(loader)[0])
    assert loader.fetch(keys(loader)[1]) == 8


@pytest.mark.processes
def test_sets_and_named_tuples_arrive(make: Callable[..., Loader]) -> None:
    loader = make(Drawing(), collate_fn=lambda samples: Pair({len(samples)}, samples[0][3]))
    alone = make(Drawing(), collate_fn=lambda samples: Pair({len(samples)}, samples[0][3]), num_workers=0)
    key = Key(0, 0, 0, 0, 8)
    found, expected = loader.fetch(key), alone.fetch(key)
    assert type(found) is Pair
    assert found.x == expected.x
    assert torch.equal(found.y, expected.y)


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the dataset, `collate_fn` or `worker_init_fn` raises an exception that can't be pickled, or `sys.exit`, in a "
        "loader process"
    ),
)
@pytest.mark.processes
@pytest.mark.parametrize("error", [local_error, lambda: SystemExit(1)])
def test_a_worker_init_fn_that_fails_is_an_error(
    make: Callable[..., Loader], error: Callable[[], BaseException]
) -> None:
    def init(_: int) -> None:
        raise error()

    loader = make(Drawing(), worker_init_fn=init)
    with pytest.raises(UsageError, match=r"\bcollate_fn\b.*\bworker_init_fn\b"):
        loader.fetch(keys(loader)[0])
