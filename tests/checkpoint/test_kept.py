"""Stores that acknowledge what they did not keep: nothing is said to be saved, and nothing older is removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.checkpoint.restore import find
from farandole.checkpoint.save import CheckpointSaver
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import Manifest, NotKept, Patience, Store
from farandole.plan.shards import Position
from farandole.protocol.messages import Checkpointed
from tests.support.checkpoints import manifest, save, state, steps
from tests.support.faulty_stores import faulty

Spoil = Callable[[str, bytes], bytes | None]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + b"\xde\xad\xbe\xef" + content[middle + 4 :]


LIES: dict[str, Spoil] = {
    "the state is torn": lambda path, content: content[:-7] if path.endswith(".pt") else content,
    "the state is lost": lambda path, content: None if path.endswith(".pt") else content,
    "the state is empty": lambda path, content: b"" if path.endswith(".pt") else content,
    "a bit of the state flips": lambda path, content: flip(content) if path.endswith(".pt") else content,
    "the state is longer": lambda path, content: content + b"more" if path.endswith(".pt") else content,
    "the manifest is lost": lambda path, content: None if path.endswith(".json") else content,
    "the manifest is torn": lambda path, content: content[:-7] if path.endswith(".json") else content,
    "a bit of the manifest flips": lambda path, content: flip(content) if path.endswith(".json") else content,
}


class LyingFolder(Store):
    """A folder whose file system loses what it has synced."""

    spoil: Spoil = staticmethod(lambda _, content: content)

    def _settle(self, file: Any) -> None:
        super()._settle(file)
        path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        path.write_bytes(self.spoil(path.name, path.read_bytes()) or b"")


@pytest.mark.failure(
    "Checkpoints",
    "a store acknowledges a checkpoint, but keeps it truncated, changed or not at all",
    seen="`NO CHECKPOINT of step N: ... has not kept the data that was written`, after three attempts",
    outcome="each checkpoint is read back before older ones are removed; for the last checkpoint, exit code 1",
)
@pytest.mark.parametrize("spoil", LIES.values(), ids=LIES.keys())
def test_a_remote_store_that_lies(spoil: Spoil) -> None:
    kind = faulty(spoil=staticmethod(lambda path, content: spoil(path, content) if "-00000009-" in path else content))
    store = Store(f"{kind.protocol}://place")
    for step in (3, 6):
        save(store, step, keep=2)
    with pytest.raises(NotKept):
        save(store, 9, keep=2)
    assert steps(store) == [6, 3], "nothing older has gone, and nothing of it is left"
    assert find([store.url]).position.step == 6


FOLDER_LIES = {name: lie for name, lie in LIES.items() if "lost" not in name and "manifest" not in name}


@pytest.mark.failure("Checkpoints", "a store acknowledges a checkpoint, but keeps it truncated, changed or not at all")
@pytest.mark.parametrize("spoil", FOLDER_LIES.values(), ids=FOLDER_LIES.keys())
def test_a_folder_that_lies(spoil: Spoil, tmp_path: Path) -> None:
    store = LyingFolder(str(tmp_path / "checkpoints"))
    save(store, 3, keep=1)
    store.spoil = spoil
    with pytest.raises(NotKept):
        save(store, 6, keep=1)
    assert [path.suffix for path in sorted(Path(store.path).iterdir())] == [".json", ".pt"]
    assert find([store.url]).position.step == 3


@pytest.mark.failure("Checkpoints", "a store acknowledges a checkpoint, but keeps it truncated, changed or not at all")
def test_it_is_told_and_the_last_checkpoint_is_no_good_end(tmp_path: Path) -> None:
    told: list[Checkpointed] = []
    store = LyingFolder(str(tmp_path / "checkpoints"))

    def describe(position: Position, whole: bool) -> Manifest:
        return manifest(position.step, whole=whole)

    patience = Patience(attempts=2, first_pause_s=0.001)
    saver = CheckpointSaver(store, Every(steps=1), 1, describe=describe, tell=told.append, patience=patience)
    saver.step_begins(Position(step=1), lambda: state(1.0), leads=True)
    assert saver._thread is not None
    saver._thread.join()
    store.spoil = LIES["the state is torn"]
    saver.step_begins(Position(step=2), lambda: state(2.0), leads=True)
    saver._thread.join()
    with pytest.raises(NotKept):
        saver.save(Position(step=3), state(3.0), whole=True)
    assert [(message.step, bool(message.path), bool(message.error)) for message in told] == [
        (1, True, False), (2, False, True),
    ]  # fmt: skip
    assert steps(store) == [1]
    store.spoil = LyingFolder.spoil
    assert saver.save(Position(step=3), state(3.0), whole=True)[1]
    assert steps(store) == [3]


def test_a_lie_that_does_not_last_is_mended(tmp_path: Path) -> None:
    """The state is written again, as a whole."""
    store = LyingFolder(str(tmp_path / "checkpoints"))
    lies = iter([True])
    store.spoil = lambda path, content: content[:-1] if path.endswith(".pt") and next(lies, False) else content
    saver = CheckpointSaver(
        store, Every(steps=1), 1, describe=lambda position, whole: manifest(position.step, whole=whole),
        tell=lambda _: None, patience=Patience(attempts=2, first_pause_s=0.001),
    )  # fmt: skip
    saver.save(Position(step=3), state(3.0), whole=True)
    assert find([store.url]).position.step == 3


def test_what_was_written_is_not_removed_for_newer_ones_that_are_damaged(tmp_path: Path) -> None:
    """A run that passes over a damaged checkpoint goes on from an earlier step, and writes one of a lower number."""
    store = Store(str(tmp_path / "checkpoints"))
    save(store, 3)
    damaged = save(store, 9)
    os.truncate(f"{store.path}/{damaged}.pt", 10)
    save(store, 6, keep=1)
    assert find([store.url]).position.step == 6
    save(store, 12, keep=1)
    assert steps(store) == [12]
