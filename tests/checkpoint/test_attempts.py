"""Calls to a store: what is tried again, what is not, what is told of one that hangs, and what is given up."""

from __future__ import annotations

import errno
import logging
import random
import re
import threading

import pytest

from farandole.checkpoint.restore import find
from farandole.checkpoint.store import DamagedError, NotDelivered, NotKept, Patience, Store, insist, newest, passing
from farandole.errors import UsageError
from tests.support.checkpoints import save, steps
from tests.support.faulty_stores import faulty

QUICK = Patience(attempts=4, limit_s=30.0, first_pause_s=0.001, longest_pause_s=0.002)
OPERATIONS = ["ls", "cat_file", "pipe_file", "open", "rm_file", "size"]


@pytest.mark.failure(
    "Checkpoints",
    "a store returns an error (503) once, or for some seconds",
    seen="nothing",
    outcome="each call is tried up to six times within a minute; a state is written up to three times",
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_refusal_of_each_kind_is_not_seen(operation: str) -> None:
    """Of a store that answers 503 once: it can be written, saved to, pruned, listed and gone on from."""
    kind = faulty()
    store = Store(f"{kind.protocol}://place", patience=QUICK)
    for step in (3, 6, 9):
        kind.failing[operation] = 1
        store.check()
        kind.failing[operation] = 1
        save(store, step, keep=2)
    kind.failing[operation] = 1
    assert steps(store) == [9, 6]
    kind.failing[operation] = 1
    with store.open_verified(store.entries()[0].stem, store.manifest(store.entries()[0].stem)) as file:
        assert file.read(2) == b"PK"


def test_a_place_that_fails_once_can_be_looked_at() -> None:
    kind = faulty()
    save(Store(f"{kind.protocol}://place"), 3)
    kind.failing |= {"ls": 1, "cat_file": 1}
    found = newest(f"{kind.protocol}://place")
    assert found is not None
    kind.failing |= {"ls": 1, "cat_file": 1, "size": 1}
    assert find([f"{kind.protocol}://place"]).manifest == found


def test_a_store_that_always_fails_is_given_up_and_said_how_often_it_was_asked() -> None:
    kind = faulty(failing={"open": 1000})
    store = Store(f"{kind.protocol}://place", patience=QUICK)
    with pytest.raises(OSError, match="503") as raised:
        save(store, 3)
    assert kind.failing["open"] == 1000 - QUICK.attempts
    assert len(raised.value.__notes__) == 1  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=rf"{re.escape(store.url)}\b.*503.*\b{QUICK.attempts}\b"):
        store.check()


@pytest.mark.failure(
    "Checkpoints",
    "an outdated checkpoint can't be removed from the store",
    seen="a warning in the log of the worker that writes",
    outcome="the new checkpoint counts as saved; the next one removes what is left",
)
def test_what_can_not_be_removed_is_no_failure_of_what_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    kind = faulty()
    store = Store(f"{kind.protocol}://place", patience=QUICK)
    save(store, 3)
    kind.failing["rm_file"] = 1000
    with caplog.at_level(logging.WARNING):
        save(store, 6, keep=1)
    assert steps(store) == [6, 3]
    assert len(caplog.records) == 1
    kind.failing.clear()
    save(store, 9, keep=1)
    assert steps(store) == [9], "the next one removes what was left"


@pytest.mark.failure(
    "Checkpoints",
    "a store, or a folder on a mount that does not answer, hangs at the start",
    seen="after 5 s a line with the place and the request",
    outcome="an error after 60 s; exit code 2; nothing is started",
)
@pytest.mark.parametrize("operation", ["ls", "open", "cat_file"])
def test_a_store_that_hangs_is_told_of_and_given_up(operation: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = faulty()
    patience = Patience(attempts=3, limit_s=0.2, log_after_s=0.05)
    store = Store(f"{kind.protocol}://place", patience=patience)
    stem = save(store, 3)
    kind.hanging.add(operation)
    with caplog.at_level(logging.WARNING), pytest.raises((TimeoutError, UsageError), match=r"\b0 s\b"):
        {"ls": store.entries, "open": store.check, "cat_file": lambda: store.manifest(stem)}[operation]()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert store.url in caplog.records[0].getMessage()
    kind.released.set()


def test_without_a_thread_it_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kind = faulty()
    store = Store(f"{kind.protocol}://place", patience=QUICK)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    kind.failing |= {"ls": 1, "open": 1}
    save(store, 3)
    assert steps(store) == [3]


def test_the_pauses_are_not_drawn_from_the_scripts_generator() -> None:
    random.seed(1)
    before = random.getstate()
    assert len({QUICK.pause(1) for _ in range(20)}) > 1
    kind = faulty(failing={"ls": 3})
    Store(f"{kind.protocol}://place", patience=QUICK).entries()
    assert random.getstate() == before


@pytest.mark.failure("Checkpoints", "a store returns an error (503) once, or for some seconds")
@pytest.mark.parametrize(
    ("error", "of_a_folder", "elsewhere"),
    [
        (OSError(errno.EIO, "an error of the disk"), True, True),
        (OSError(errno.ESTALE, "a file handle of before"), True, True),
        (OSError(errno.ENOSPC, "no space"), False, True),
        (OSError(errno.EROFS, "read only"), False, True),
        (TimeoutError("no answer"), True, True),
        (RuntimeError("of a client"), False, True),
        (NotKept("lies"), True, True),
        (NotDelivered("no such bucket"), False, False),
        (FileNotFoundError("no such bucket"), False, False),
        (PermissionError("403"), False, False),
        (DamagedError("torn"), False, False),
        (UsageError("no such place"), False, False),
        (MemoryError(), False, False),
    ],
    ids=repr,
)
def test_what_is_tried_again(error: Exception, of_a_folder: bool, elsewhere: bool) -> None:
    assert (passing(error, local=True), passing(error, local=False)) == (of_a_folder, elsewhere)
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        insist(call, "it", QUICK, local=True)
    assert len(calls) == (QUICK.attempts if of_a_folder else 1)
