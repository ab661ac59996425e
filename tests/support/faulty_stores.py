"""Stores that fail, hang, or lie: fsspec file systems of this process, each in memory, with faults to be planted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_numbers = itertools.count()


class FaultyFiles(MemoryFileSystem):
    """Attributes:
    failing: operations ("ls", "cat_file", "pipe_file", "open", "rm_file", "size") that fail so many times.
    hanging: operations that wait until `released`.
    spoil: what becomes of each file that is written: None, it is lost.
    conditional: whether `mode="create"` is known.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  fsspec's own are of the class
    failing: dict[str, int] = {}  # noqa: RUF012
    hanging: set[str] = set()  # noqa: RUF012
    released = threading.Event()
    spoil: Callable[[str, bytes], bytes | None] = staticmethod(lambda _, content: content)
    conditional = True
    error: type[Exception] = OSError

    def _strike(self, operation: str) -> None:
        self._spoil()
        if operation in self.hanging:
            self.released.wait(30)
        if self.failing.get(operation, 0):
            type(self).failing[operation] -= 1
            raise self.error("503 Slow Down")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._strike("ls")
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self._strike("cat_file")
        return super().cat_file(path, start=start, end=end, **kwargs)

    def rm_file(self, path: str) -> None:
        self._strike("rm_file")
        super().rm_file(path)

    def size(self, path: str) -> Any:
        self._strike("size")
        return super().size(path)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:  # type: ignore[override]
        if mode == "wb":
            self._strike("open")
        return super().open(path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        self._strike("pipe_file")
        super().pipe_file(path, value, mode=mode if self.conditional else "overwrite", **kwargs)

    def _spoil(self) -> None:
        for path, file in list(self.store.items()):
            kept = self.spoil(path, file.getvalue())
            if kept is None:
                del self.store[path]
            elif kept != file.getvalue():
                file.seek(0)
                file.truncate()
                file.write(kept)


def faulty(**faults: Any) -> type[FaultyFiles]:
    """A kind of store of its own, under the protocol `.protocol`."""
    protocol = f"faulty{next(_numbers)}"
    members = {"protocol": protocol, "store": {}, "pseudo_dirs": [""], "failing": {}, "hanging": set(),
               "released": threading.Event()} | faults  # fmt: skip
    kind = type("FaultyFiles", (FaultyFiles,), members)
    fsspec.register_implementation(protocol, kind)
    return kind
