"""Writing while training goes on: when the state is copied, what becomes of what comes due meanwhile, what is told."""

from __future__ import annotations

import errno
import random
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.checkpoint.restore import find
from farandole.checkpoint.save import CheckpointSaver
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import Manifest, Patience, Produce, Store
from farandole.plan.shards import Position
from farandole.protocol.messages import Checkpointed
from tests.support.faulty_stores import faulty


class Held(Store):
    """A store whose writes wait until they are let go, and then may fail."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.go = threading.Event()
        self.failure: Exception | None = None

    def write(self, stem: str, produce: Produce, keep: int) -> None:
        assert self.go.wait(200)
        if self.failure is not None:
            raise self.failure
        super().write(stem, produce, keep)


class Trainer:
    """A worker whose state is one tensor that holds the number of the step."""

    def __init__(self, folder: Path, every: str, *, keep: int = 9) -> None:
        self.store = Held(str(folder))
        self.told: list[Checkpointed] = []
        self.heard = threading.Condition()
        self.weight = torch.zeros(1000)
        self.saver = CheckpointSaver(self.store, Every.parse(every), keep, describe=self.describe, tell=self.tell)
        self.saver.enter(0)
        self.step = 0

    def describe(self, position: Position, whole: bool) -> Manifest:
        return Manifest(
            epoch=0, offset=0, step=position.step, whole=whole, run="r", worker="w", seed=0, facts=(), time=0.0
        )

    def tell(self, message: Checkpointed) -> None:
        with self.heard:
            self.told.append(message)
            self.heard.notify_all()

    def state(self) -> dict[str, Any]:
        return {"objects": {"model": {"weight": self.weight}}, "buffers": [], "requires_grad": [], "origin": ""}

    def train(self, steps: int, *, leads: bool = True, at_once: bool = False) -> None:
        for _ in range(steps):
            self.weight.fill_(self.step)
            self.saver.step_begins(Position(step=self.step), self.state, leads=leads, at_once=at_once)
            self.weight.fill_(-1)  # the step's update
            self.step += 1
            reserving = self.saver._thread
            if reserving is not None and self.saver._writing is None:  # our steps take no time
                reserving.join()

    def until_told(self, number: int) -> list[Checkpointed]:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.told) >= number, 30), self.told
        self.saver._thread.join()  # type: ignore[union-attr]
        return self.told

    def saved(self) -> dict[int, float]:
        """What each checkpoint's file holds, by its step."""
        found: dict[int, float] = {}
        for entry in self.store.entries():
            state = find([f"{self.store.path}/{entry.stem}.pt"]).state
            (found[entry.step],) = state["objects"]["model"]["weight"].unique().tolist()
        return found


def test_the_state_is_that_of_the_steps_beginning_however_late_it_is_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "10steps")
    trainer.train(18)
    assert not trainer.told, "training did not wait"
    trainer.store.go.set()
    (told,) = trainer.until_told(1)
    assert (told.step, told.error) == (10, "")
    assert told.bytes == Path(told.path).stat().st_size
    assert trainer.saved() == {10: 10.0}


def test_what_comes_due_while_one_is_being_written_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "10steps")
    trainer.train(35)
    assert [(message.step, message.late) for message in trainer.told] == [(20, True), (30, True)]
    assert re.search(r"\bstep 10\b.*\d s\b", trainer.told[0].error)
    trainer.store.go.set()
    trainer.until_told(3)
    trainer.train(10)
    trainer.until_told(4)
    assert trainer.saved() == {10: 10.0, 40: 40.0}


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), RuntimeError("odd\nmore"), KeyError("of a client")]
)
def test_a_failure_is_told_and_the_next_one_is_tried(tmp_path: Path, failure: Exception) -> None:
    trainer = Trainer(tmp_path, "10steps")
    trainer.store.failure = failure
    trainer.store.go.set()
    trainer.train(11)
    (told,) = trainer.until_told(1)
    assert (told.step, told.path) == (10, "")
    assert told.error == str(failure).splitlines()[0]
    trainer.store.failure = None
    trainer.train(10)
    trainer.until_told(2)
    assert trainer.saved() == {20: 20.0}


def test_only_who_leads_writes_and_who_comes_to_lead_goes_on_with_the_steps(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "10steps")
    trainer.store.go.set()
    trainer.train(15, leads=False)
    trainer.train(10)
    trainer.until_told(1)
    assert trainer.saved() == {20: 20.0}, "10 was for the one before to write"


def test_who_writes_in_place_of_one_that_could_not_does_so_at_once_and_then_when_it_is_due(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "10steps")
    trainer.store.go.set()
    trainer.train(12, leads=False)
    trainer.train(1, at_once=True)
    trainer.until_told(1)
    trainer.train(12)
    trainer.until_told(2)
    assert trainer.saved() == {12: 12.0, 20: 20.0}


def test_never_is_never_but_for_the_last(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "never")
    trainer.train(500)
    trainer.store.go.set()
    trainer.weight.fill_(3)
    trainer.saver.save(Position(step=500), trainer.state(), whole=True)
    assert trainer.saved() == {500: 3.0}
    assert trainer.told == [], "who asked for it is answered otherwise"


def test_the_last_one_waits_for_the_one_before(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "10steps", keep=1)
    trainer.train(11)
    last = threading.Thread(
        target=lambda: trainer.saver.save(Position(step=11), trainer.state(), whole=True), name="last"
    )
    last.start()
    trainer.store.go.set()
    last.join(30)
    assert not last.is_alive()
    assert [message.step for message in trainer.told] == [10]
    assert [entry.step for entry in trainer.store.entries()] == [11], "one is kept"


def test_a_period_of_time(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "0.05s")
    trainer.store.go.set()
    deadline = time.monotonic() + 30
    while all(message.error for message in trainer.told):  # that one is still being written, on a slow machine
        trainer.train(1)
        assert time.monotonic() < deadline
    first = next(message for message in trainer.until_told(1) if not message.error)
    assert trainer.saved()[first.step] == first.step > 0


def test_nothing_that_training_draws_is_drawn(tmp_path: Path) -> None:
    """Copying and writing leave Python's and torch's generators alone, whatever thread looks at them."""
    trainer = Trainer(tmp_path, "2steps")
    trainer.store.go.set()
    random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), torch.get_rng_state())
    trainer.train(5)
    trainer.until_told(1)
    trainer.saver.save(Position(step=5), trainer.state(), whole=True)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.failure(
    "Checkpoints",
    "no thread or process can be started when a checkpoint is due (a limit of processes)",
    seen="`NO CHECKPOINT of step N: no thread could be started to write it`",
    outcome="another worker tries at once; training continues; the last checkpoint is written without a thread",
)
def test_without_a_thread_it_is_told_training_goes_on_and_the_last_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on processes is reached, here and where a process would deliver to a remote store."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def refuse_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    trainer = Trainer(tmp_path, "10steps")
    trainer.store.go.set()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        limited.setattr(subprocess, "Popen", refuse_process)
        trainer.train(25)
        assert [(message.step, message.path, message.late) for message in trainer.told] == [
            (10, "", False), (20, "", False),
        ]  # fmt: skip
        assert all("can't start new thread" in message.error for message in trainer.told)
        trainer.weight.fill_(25)
        trainer.saver.save(Position(step=25), trainer.state(), whole=True)
        assert trainer.saved() == {25: 25.0}
        kind = faulty()
        remote = Store(f"{kind.protocol}://place")
        saver = CheckpointSaver(remote, Every.parse("never"), 1, describe=trainer.describe, tell=trainer.tell)
        saver.save(Position(step=25), trainer.state(), whole=True)
        assert [entry.step for entry in remote.entries()] == [25]
    trainer.train(10)
    trainer.until_told(3)
    assert set(trainer.saved()) == {25, 30}


@pytest.mark.failure(
    "Checkpoints", "no thread or process can be started when a checkpoint is due (a limit of processes)"
)
def test_a_process_that_can_not_be_started_for_a_remote_store_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    trainer = Trainer(tmp_path, "10steps")
    patience = Patience(attempts=2, first_pause_s=0.001)
    trainer.saver = CheckpointSaver(
        Store(f"{faulty().protocol}://place"), Every(steps=10), 1, describe=trainer.describe, tell=trainer.tell,
        patience=patience,
    )  # fmt: skip
    monkeypatch.setattr(subprocess, "Popen", refuse_process)
    trainer.train(12)
    (told,) = trainer.until_told(1)
    assert (told.step, told.path) == (10, "")
    assert told.error
