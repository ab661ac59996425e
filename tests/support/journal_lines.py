"""Two events as a journal keeps them, and the books beside them, for tests to which the values do not matter."""

from __future__ import annotations

from farandole.membership.metrics import event_line
from farandole.membership.reconnection import Durable

VIEW = event_line("view", {"view": 2, "members": ["w1"], "step": 3, "cause": "why"}, 10.5)
LOST = event_line("lost", {"worker": "w2", "reason": "why"}, 11.5)
BOOKS, OTHER = Durable(wants={"": 1}, number=2), Durable(wants={"": 3}, number=4, gone=("w2",))
