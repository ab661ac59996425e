"""Two events as a journal keeps them, and the state beside them, for tests to which the values do not matter."""

from __future__ import annotations

from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.events import LostEvent, ViewEvent

VIEW = ViewEvent(view=2, members=("w1",), round=4, step=3, cause="why", time=10.5)
LOST = LostEvent(worker="w2", host="h", reason="why", time=11.5)
BOOKS, OTHER = Durable(fixed_targets={"": 1}, number=2), Durable(fixed_targets={"": 3}, number=4, dead=("w2",))
