"""A state on its way into a store: counted and hashed as it passes, so that the manifest that follows it can say what
it must be. The manifest is written last: a writer that dies before has written no checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from farandole.checkpoint.manifest import Manifest


class Sink(Protocol):
    """What a state is written into."""

    def write(self, data: Any, /) -> int: ...

    def flush(self) -> None: ...


Produce = Callable[[Sink], bytes]


class Sealing:
    """A sink that counts and hashes what passes through it on its way into another, and then seals the manifest."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.failure is not None:
            raise self.failure
        self._digest.update(data)
        try:
            self._sink.write(data)
        except OSError as error:
            self.failure = error
            raise
        size = memoryview(data).nbytes
        self.size += size
        return size

    def flush(self) -> None:
        self._sink.flush()

    def seal(self, manifest: Manifest) -> bytes:
        sealed = msgspec.structs.replace(manifest, size=self.size, sha256=self._digest.hexdigest(), time=time.time())
        return msgspec.json.format(msgspec.json.encode(sealed)) + b"\n"
