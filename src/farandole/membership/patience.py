"""How long a worker waits for a peer before it says so. Times are in seconds.

Two words, for two cases. Who has waited for ten median steps, and at least the run's stall limit, reports the peer as
stalled, and the coordinator evicts it. The other one is said in heartbeats, earlier:

Two members that wait for each other, both for too long, can't reach each other although the coordinator reaches both
(`unplanned`). Whoever waits has sent all that comes before in the exchange's phases, so of two that wait for each
other's messages at least one message is on its way; nobody's computing and no third member holds them up. But it may be
on its way for long: where a link is slow and buckets are large, both wait while data flows. A wait is for one message,
though, and a step takes at least as long as its longest one. So too long is ten times the median step, and no less than
what a worker may be silent; before the first step has ended nobody knows, and it is the stall limit.
"""

from __future__ import annotations

STEPS = 10

Waiting = tuple[int, str, float]  # in which view, for which peer, since when


def held_up_by(
    waiting: Waiting | None, step_s: float | None, *, stall_s: float, heartbeat_timeout_s: float, now: float
) -> str:
    """The peer that is waited for, if it has been for too long; "" for nobody. `step_s`: the median step's time."""
    limit = stall_s if step_s is None else max(heartbeat_timeout_s, STEPS * step_s)
    return waiting[1] if waiting is not None and now - waiting[2] > limit else ""


def stalled(waiting: Waiting, step_s: float | None, *, stall_s: float, now: float) -> bool:
    """Whether the peer that is waited for is to be reported."""
    return now - waiting[2] > max(stall_s, STEPS * (step_s or 0.0))
