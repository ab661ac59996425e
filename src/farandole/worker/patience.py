"""Whether a wait for a peer is longer than a wait should be.

Two members that wait for each other, both for too long, can't reach each other although the coordinator reaches both
(`membership/unplanned.py`). Whoever waits has sent all that comes before in the exchange's phases, so of two that wait
for each other's messages at least one message is on its way; nobody's computing and no third member holds them up. But
it may be on its way for long: where a link is slow and buckets are large, both wait while data flows. A wait is for one
message, though, and a step takes at least as long as its longest one. So too long is ten times the median step, and no
less than what a worker may be silent; before the first step has ended nobody knows, and it is the stall limit.
"""

from __future__ import annotations

from farandole.membership.messages import Welcome

STEPS = 10


def held_up_by(waiting: tuple[int, str, float] | None, step_s: float | None, terms: Welcome, now: float) -> str:
    """The peer that is waited for, in (view, peer, since when), if it has been for too long; "" for nobody."""
    limit = terms.stall_s if step_s is None else max(terms.heartbeat_timeout_s, STEPS * step_s)
    return waiting[1] if waiting is not None and now - waiting[2] > limit else ""
