"""Scaling: what users and notices ask of a run. More workers, fewer, or without certain workers.

`targets` is how many workers the run wants of each pool: `scale` and `release` change it, a crash does not. Where a run
has several pools, capacity that returns in one makes workers of the next ones leave (`shrink`).
See docs/protocol.md, Pools.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from farandole.errors import UsageError
from farandole.protocol import events, settings
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import (
    EXIT_BANNED,
    EXIT_DATA_UNAVAILABLE,
    EXIT_EVICTED,
    CoordinatorState,
    Worker,
)
from farandole.protocol.messages import Hello, Roster

T = TypeVar("T")

# --- names ------------------------------------------------------------------------------------------------------------
#
# Which pool a worker belongs to. Invariant: a worker's id begins with its pool's mark, so an id shows its pool in
# messages, logs and commands. The run's own pool has the empty mark, any other one NAME-.
# A pool learns its mark from the roster before it starts a worker, so nothing is translated. It gets reports about its
# own workers only, and what it reports about others is ignored. Which pool has started a worker is known from the
# worker's own report alone.
# See docs/protocol.md, Pools.

_POOLS = re.compile(r"(?:.*-)?w(\d+)")  # the names that `worker_id` gives


def worker_id(prefix: str, number: int) -> str:
    """Return the ID of the `number`th worker of a pool, from 1. `prefix` is the mark of the pool."""
    return f"{prefix}w{number}"


def number_of(worker: str) -> int:
    """Return the number in a worker ID that a pool has given; 0 for any other name."""
    match = _POOLS.fullmatch(worker)
    return int(match[1]) if match else 0


def pool_mark(state: CoordinatorState, pool: str) -> str:
    """Return the prefix of the IDs of the workers of `pool`. A new pool is recorded."""
    if pool and pool not in state.pools:
        state.pools.append(pool)
    return f"{pool}-" if pool and pool != state.pools[0] else ""


def offered_id(state: CoordinatorState, hello: Hello) -> str:
    """Return the ID that an unknown worker requests; "" if it requests none that it may have.

    A worker that no pool has started may bring a name, but none that a pool or the run gives.

    A worker that reconnects (its `attempt` is larger than 1) sends its earlier ID.
    """
    worker, again = hello.worker, hello.attempt > 1
    if not hello.pool:
        given = _POOLS.fullmatch(worker) or (not again and worker.startswith("guest-"))
        return "" if given and state.settings.pool else worker
    valid = owns(state, hello.pool, worker) if again else _has_mark(state, hello.pool, worker)
    return worker if valid else ""


def new_id(state: CoordinatorState, hello: Hello) -> str:
    """Return an ID that no worker has or has had."""
    given = worker = offered_id(state, hello)
    used = not worker or (hello.attempt <= 1 and state.is_waited_for(worker))  # the views still contain that name
    while used or worker in state.workers or worker in state.departed:
        state.external_workers, used = state.external_workers + 1, False
        worker = f"{given or 'guest'}-{state.external_workers}"
    return worker


def owns(state: CoordinatorState, pool: str, worker: str) -> bool:
    """Return True if `worker` belongs to `pool`, or would belong to it by its ID."""
    record = state.workers.get(worker) or state.departed.get(worker)
    if record is not None or not pool:
        return record is not None and record.pool == pool != ""
    return _has_mark(state, pool, worker)


def pool_refusal(state: CoordinatorState, hello: Hello, connected: Iterable[Hello]) -> str:
    """Return why the connection of a pool is refused, "" if it is accepted. `connected` are the connected pools.

    Two pools of one name can't be told apart, so the second one is refused. `farandole run` tells the coordinator the
    name and process of its own pool before any worker can come; no other process is taken for it, present or not.
    """
    own = state.settings.pool
    if not hello.pool:
        return "the pool has no name: give it one"
    others = [own, *connected] if own else connected
    if any(o.pool == hello.pool and (o.host, o.pid) != (hello.host, hello.pid) for o in others):
        return f"another pool of this run has the name {hello.pool!r}: give this pool a different name"
    return ""


def _has_mark(state: CoordinatorState, pool: str, worker: str) -> bool:
    """Return True if the ID begins with the mark of `pool`, and not with a longer mark of another pool."""
    own = pool_mark(state, pool)
    others = (pool_mark(state, other) for other in state.pools)
    taken = ("guest-", *(other for other in others if len(other) > len(own)))
    return worker != "" and worker.startswith(own) and not worker.startswith(taken)


# --- requests ---------------------------------------------------------------------------------------------------------


def targets(state: CoordinatorState) -> dict[str, int]:
    """Return the target number of workers of each pool, by pool mark."""
    if not state.settings.pools:
        return dict(state.fixed_targets)
    sizes = [(pool_mark(state, pool.name), pool.size) for pool in state.settings.pools]
    return settings.targets(
        state.shared_target, sizes, state.fixed_targets, state.pool_capacity, _present(state), state.gathering_pools
    )


def _present(state: CoordinatorState) -> Counter[str]:
    """Return the number of workers of each pool that do not leave, by pool mark."""
    return Counter(pool_mark(state, w.pool) for w in state.workers.values() if w.pool and not w.leaving)


def scale(state: CoordinatorState, wanted: int, pool: str = "") -> None:
    """Set the target number of workers of a pool.

    Without a name this is the run's own pool or, if the run has several, all pools without a fixed target together.

    Raises:
        UsageError: the run is ending, there is no such pool, or the total is below the minimum or above the maximum.
    """
    _check_not_ending(state, f"scale {wanted}")
    if pool and pool not in state.pools:
        raise UsageError(f"scale --pool {pool}: no such pool; the pools are: {', '.join(state.pools) or 'none'}")
    s, of_all = state.settings, bool(state.settings.pools) and not pool
    marks = {pool_mark(state, each.name) for each in s.pools} if of_all else {pool_mark(state, pool)}
    current = targets(state)
    before = sum(current.get(mark, 0) for mark in marks)
    total = sum(current.values()) - before + wanted
    with_others = "" if total == wanted else f"with the {total - wanted} of other pools that is "
    if total < s.minimum:
        raise UsageError(
            f"scale {wanted}: {with_others}below the run's --min {s.minimum}; use `farandole stop` to end the run"
        )
    if s.maximum is not None and total > s.maximum:
        raise UsageError(f"scale {wanted}: {with_others}above the run's --max {s.maximum}")
    state.crash_loop = msgspec.structs.replace(state.crash_loop, joiners=0)
    state.startup_failures = {m: n for m, n in state.startup_failures.items() if m not in marks}
    if of_all:
        state.fixed_targets = {mark: n for mark, n in state.fixed_targets.items() if mark not in marks}
        state.shared_target = wanted
    else:
        fix_target(state, pool_mark(state, pool), wanted, before)
    state.record(events.ScaleEvent(wanted=wanted, before=before))
    after = targets(state)
    for mark in marks:
        _make_leave(state, mark, after.get(mark, 0), f"scaled to {wanted}")


def shrink(state: CoordinatorState) -> None:
    """Let the newest workers of a pool leave if its target falls because a preferred pool can have more."""
    if not state.settings.pools or state.ending or state.over:
        return
    before, state.targets = state.targets, targets(state)
    for mark, wanted in state.targets.items():
        if wanted < before.get(mark, 0):
            _make_leave(state, mark, wanted, "a preferred pool provides a worker instead")


def release(state: CoordinatorState, name: str) -> list[str]:
    """Let the worker of that ID, or all workers of the host of that name, leave. Return their IDs.

    The targets of their pools fall by their number, but never below the minimum: then the last one to leave hands the
    state over to its replacement.

    Raises:
        UsageError: the run is ending, or there is no such worker or host.
    """
    _check_not_ending(state, f"release {name}")
    matches = [w for w in state.workers.values() if name in (w.id, w.host) and not w.leaving]
    if not matches:
        present = ", ".join(f"{w.id} on {w.host}" for w in state.workers.values()) or "none"
        raise UsageError(f"release {name}: no such worker or host; the workers are: {present}")
    for worker in matches:
        mark, current = pool_mark(state, worker.pool), targets(state)
        if worker.pool and current.get(mark) and sum(current.values()) > state.settings.minimum:
            size = min(current[mark], _present(state)[mark]) if state.settings.pools else current[mark]
            fix_target(state, mark, size - 1, size)
        request_leave(state, worker, "released")
    return [w.id for w in matches]


def _check_not_ending(state: CoordinatorState, request: str) -> None:
    """Raise UsageError if the run is ending."""
    if ending := state.over or state.ending:
        raise UsageError(f"{request}: the run is ending ({ending.reason}); no worker joins or is replaced any more")


def fix_target(state: CoordinatorState, mark: str, wanted: int, before: int) -> None:
    """Fix the target of that pool, independent of other pools. It had `before` of the shared target."""
    if mark not in state.fixed_targets and state.shared_target is not None:
        state.shared_target = max(state.shared_target - before, 0)
    state.fixed_targets[mark] = wanted


def _make_leave(state: CoordinatorState, mark: str, wanted: int, reason: str) -> None:
    """Ask the newest workers of the pool to leave, so that `wanted` remain."""
    workers = [w for w in state.workers.values() if w.pool and pool_mark(state, w.pool) == mark and not w.leaving]
    for worker in surplus(workers, wanted):
        request_leave(state, worker, reason)


def surplus(workers: Sequence[T], wanted: int) -> Sequence[T]:
    """Return the workers that leave so that `wanted` remain: the newest. `workers` are in the order of joining."""
    return workers[wanted:]


def request_leave(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """Record that the worker is to leave gracefully. `view_changes.next_view` leaves it out of the next view.

    It gets `Goodbye` when all its members have switched to that view.
    """
    if not worker.leaving:
        worker.leaving = reason
        state.record(events.NoticeEvent(worker=worker.id, reason=reason))


def set_deadline(state: CoordinatorState, worker: Worker, within_s: float) -> None:
    """Set when the worker's machine is preempted: it exits before if it has not left (see `m.PreemptionDeadline`)."""
    worker.goes_at = min(worker.goes_at, state.clock + within_s)
    repeat_notice(state, worker)


def repeat_notice(state: CoordinatorState, worker: Worker) -> None:
    """Send the worker its preemption deadline, which it may not have received."""
    if worker.goes_at < math.inf:
        state.send(worker.id, m.PreemptionDeadline(within_s=max(worker.goes_at - state.clock, 0.0)))


# --- roster -----------------------------------------------------------------------------------------------------------
#
# A pool's desired state: how many workers the run wants of it, and what became of those that it has started.

OUT = (EXIT_EVICTED, EXIT_BANNED)  # exit codes of evictions


def build_roster(state: CoordinatorState, pool: str = "") -> Roster:
    """Return the roster of `pool`; without a name, that of the run's own pool."""
    pool = pool or (state.pools[0] if state.pools else "")
    mark = pool_mark(state, pool)

    def own(workers: Iterable[str]) -> tuple[str, ...]:
        """Return the workers that belong to the pool."""
        return tuple(w for w in workers if not pool or owns(state, pool, w))

    ends = state.ending or state.over or any(w.state == "finished" for w in state.workers.values())
    return Roster(
        mark=mark,
        wanted=0 if ends else targets(state).get(mark, 0),
        losses=max(state.crash_loop.count, state.crash_loop.joiners),
        leaving=own(w.id for w in state.workers.values() if w.leaving),
        released=own(w for w, departed in state.departed.items() if departed.code not in OUT),
        evicted=own(w for w, departed in state.departed.items() if departed.code in OUT),
        unfed=own(w for w, departed in state.departed.items() if departed.code == EXIT_DATA_UNAVAILABLE),
        wrong_hosts=tuple(sorted(state.wrong_hosts)),
        over=state.over.code if state.over else -1,
        reason=state.over.reason if state.over else "",
        present=own(state.workers) if state.over else (),
    )
