"""How a worker's process has ended, by the values that a pool's word for it names."""

from __future__ import annotations

import re

from farandole.pool.base import Event, WorkerExited


def ended(event: Event) -> tuple[str, str]:
    """The worker, and "code 0" or "signal 9"."""
    assert isinstance(event, WorkerExited)
    found = re.search(r"\b(code|signal) \d+$", event.reason)
    assert found, event.reason
    return event.worker, found[0]
