"""Who goes first at the process that reads the store: samples that somebody waits for, and then copies of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from farandole.data import fetcher
from farandole.data.cache_folder import Copy, RemoteFile
from farandole.data.fetcher import BESIDE, WHOLE, Fetcher, FileOf, Range

FILES = tuple(FileOf(f"far://data/shard-{number}.tar", 100, "") for number in range(WHOLE))
SAMPLE = Range(1, "far://data/shard-0.tar", 0, 10)


class Disk:
    """A cache whose copies are begun, and finished once they may be."""

    limit_bytes = 1 << 30

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: list[Copy] = []
        self._coming = self._most = 0
        self._may = False

    def copies(self) -> list[Copy]:
        return list(self._here)

    def use(self, file: RemoteFile) -> None: ...

    def fetch(self, file: RemoteFile, *_: object, **__: object) -> bool:
        with self._changed:
            self._coming += 1
            self._most = max(self._most, self._coming)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may)
            self._coming -= 1
            self._here.append(Copy(file.name, file.size, 0.0))
            self._changed.notify_all()
        return True

    def until(self, coming: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._coming >= coming, 60)

    def finish(self) -> int:
        """All of them; how many were copied at once."""
        with self._changed:
            self._may = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._here) == len(FILES), 60)
            return self._most


class Far:
    """A store that answers when it may."""

    ignores_ranges: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.may = threading.Event()

    def read(self, _: str, start: int, stop: int, __: object) -> bytes:
        assert self.may.wait(200)
        return bytes(stop - start)


def asked(reading: Fetcher) -> Callable[[], None]:
    """For a sample; what waits for the answer."""
    answered = threading.Event()
    reading.range(SAMPLE, lambda _: None, lambda _: answered.set(), lambda _: None)

    def wait() -> None:
        assert answered.wait(200)

    return wait


@pytest.mark.parametrize(("after_s", "most"), [(3600.0, BESIDE), (0.0, WHOLE)])
def test_samples_go_before_copies_also_for_a_while_after_an_answer(
    after_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "AFTER_S", after_s)
    disk: Any = Disk()
    far: Any = Far()
    reading = Fetcher(disk, far)
    wait = asked(reading)
    reading.expect(FILES)
    disk.until(BESIDE)
    far.may.set()
    wait()
    for _ in range(3):  # as a loader that goes on
        asked(reading)()
    if most == WHOLE:
        disk.until(WHOLE)
    assert disk.finish() == most
