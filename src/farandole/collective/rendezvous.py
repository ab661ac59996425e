"""How the members of a view's group find each other: keys and values, pushed over the control connection.

It is the store that Gloo asks for, and a mailbox for what Gloo knows nothing of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CONNECT_TIMEOUT = timedelta(seconds=60)

_Store: Any = getattr(dist, "Store")  # noqa: B009  torch's annotations leave it out


class Rendezvous(_Store):
    """A store whose keys are pushed to the group's other members over the control connection.

    `publish` takes key, value, and the one member that it is for, "" for all.
    """

    def __init__(self, publish: Callable[[str, bytes, str], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._arrived = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """A key from another member."""
        with self._arrived:
            self._values[key] = value
            self._arrived.notify_all()

    def close(self) -> None:
        """The view is no more: whoever waits for a key gets an error."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._publish(key, data, "")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        with self._arrived:
            there = self._arrived.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), timeout.total_seconds()
            )
        if self._closed or not there:
            raise RuntimeError(f"rendezvous keys {keys} did not arrive")

    # --- what Gloo knows nothing of: see `listener` ------------------------------------------------------------

    def tell(self, key: str, value: bytes, to: str = "") -> None:
        """A key for the others, or for one of them."""
        self._publish(key, value, to)

    def said(self, prefix: str) -> dict[str, bytes]:
        """The keys of others that begin so, without the prefix, and their values."""
        with self._arrived:
            return {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}

    def wait_for_news(self, seconds: float) -> None:
        """Until a key comes, or so long."""
        with self._arrived:
            self._arrived.wait(seconds)
