"""Scaling: what users and notices ask of a run. More workers, fewer, or without certain workers.

`targets` is how many workers the run wants of each pool: `scale` and `release` change it, a crash does not. Where a run
has several pools, capacity that returns in one makes the next ones drain workers (`shrink`).
See docs/protocol.md, Pools.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

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

# --- names ------------------------------------------------------------------------------------------------------------
#
# Which pool a worker belongs to. Invariant: a worker's id begins with its pool's mark, so an id shows its pool in
# messages, logs and commands. The run's own pool has the empty mark, any other one NAME-.
# See docs/protocol.md, Pools.

_POOLS = re.compile(r"(?:.*-)?w(\d+)")  # how `worker_id` names them


def worker_id(prefix: str, number: int) -> str:
    """What a pool calls the worker that it starts as its `number`th, from 1."""
    return f"{prefix}w{number}"


def number_of(worker: str) -> int:
    """The other way round; 0 for a name that no pool gives."""
    match = _POOLS.fullmatch(worker)
    return int(match[1]) if match else 0


def pool_mark(state: CoordinatorState, pool: str) -> str:
    """What the ids of that pool's workers begin with."""
    if pool and pool not in state.pools:
        state.pools.append(pool)
    return f"{pool}-" if pool and pool != state.pools[0] else ""


def offered_id(state: CoordinatorState, hello: Hello) -> str:
    """The id that a worker which is not known brings; "" if it brings none that it may have.

    Who comes back, with an `attempt` beyond the first, says what it was called.
    """
    worker, again = hello.worker, hello.attempt > 1
    if not hello.pool:
        given = _POOLS.fullmatch(worker) or (not again and worker.startswith("guest-"))
        return "" if given and state.settings.pool else worker
    its = owns(state, hello.pool, worker) if again else _begins(state, hello.pool, worker)
    return worker if its else ""


def new_id(state: CoordinatorState, hello: Hello) -> str:
    """An id that nobody has, or has had."""
    given = worker = offered_id(state, hello)
    used = not worker or (hello.attempt <= 1 and state.has_part(worker))  # a name that the views still hold
    while used or worker in state.workers or worker in state.departed:
        state.external_workers, used = state.external_workers + 1, False
        worker = f"{given or 'guest'}-{state.external_workers}"
    return worker


def owns(state: CoordinatorState, pool: str, worker: str) -> bool:
    """Whether `worker` is of `pool`, or would be."""
    known = state.workers.get(worker) or state.departed.get(worker)
    if known is not None or not pool:
        return known is not None and known.pool == pool != ""
    return _begins(state, pool, worker)


def pool_refusal(state: CoordinatorState, hello: Hello, connected: Iterable[Hello]) -> str:
    """Why that pool is not to be heard, in words; "" if it is. `connected` are those that are there."""
    own = state.settings.pool
    if not hello.pool:
        return "a pool has to have a name: give this one one of its own"
    others = [own, *connected] if own else connected
    if any(o.pool == hello.pool and (o.host, o.pid) != (hello.host, hello.pid) for o in others):
        return f"another pool of this run is called {hello.pool!r}: give this one a name of its own"
    return ""


def _begins(state: CoordinatorState, pool: str, worker: str) -> bool:
    """Whether an id begins with the pool's mark, and with no longer one of another's."""
    own = pool_mark(state, pool)
    others = (pool_mark(state, other) for other in state.pools)
    taken = ("guest-", *(other for other in others if len(other) > len(own)))
    return worker != "" and worker.startswith(own) and not worker.startswith(taken)


# --- requests ---------------------------------------------------------------------------------------------------------


def targets(state: CoordinatorState) -> dict[str, int]:
    """Workers wanted of each pool, by its mark."""
    if not state.settings.pools:
        return dict(state.fixed_targets)
    sizes = [(pool_mark(state, pool.name), pool.size) for pool in state.settings.pools]
    return settings.targets(
        state.shared_target, sizes, state.fixed_targets, state.pool_capacity, _present(state), state.gathering_pools
    )


def _present(state: CoordinatorState) -> Counter[str]:
    """Workers that do not leave, of each pool."""
    return Counter(pool_mark(state, w.pool) for w in state.workers.values() if w.pool and not w.leaving)


def scale(state: CoordinatorState, wanted: int, pool: str = "") -> None:
    """How many workers the run wants of a pool; without a name, of its own, or of those of which no number is fixed.

    Raises:
        UsageError: the run is ending, there is no such pool, or in all below the minimum or above the maximum.
    """
    _see_that_it_goes_on(state, f"scale {wanted}")
    if pool and pool not in state.pools:
        raise UsageError(f"scale --pool {pool}: no such pool; there are: {', '.join(state.pools) or 'none'}")
    s, of_all = state.settings, bool(state.settings.pools) and not pool
    ours = {pool_mark(state, each.name) for each in s.pools} if of_all else {pool_mark(state, pool)}
    its = targets(state)
    before = sum(its.get(mark, 0) for mark in ours)
    total = sum(its.values()) - before + wanted
    with_others = "" if total == wanted else f"with other pools' {total - wanted} that is "
    if total < s.minimum:
        raise UsageError(
            f"scale {wanted}: {with_others}below the run's --min {s.minimum}; use `farandole stop` to end the run"
        )
    if s.maximum is not None and total > s.maximum:
        raise UsageError(f"scale {wanted}: {with_others}above the run's --max {s.maximum}")
    state.crash_loop = msgspec.structs.replace(state.crash_loop, joiners=0)
    state.startup_failures = {m: n for m, n in state.startup_failures.items() if m not in ours}
    if of_all:
        state.fixed_targets = {mark: n for mark, n in state.fixed_targets.items() if mark not in ours}
        state.shared_target = wanted
    else:
        fix_target(state, pool_mark(state, pool), wanted, before)
    state.record(events.ScaleEvent(wanted=wanted, before=before))
    after = targets(state)
    for mark in ours:
        _let_go(state, mark, after.get(mark, 0), f"scaled to {wanted}")


def shrink(state: CoordinatorState) -> None:
    """Where a pool is to have fewer since another one can have more, its newest workers go."""
    if not state.settings.pools or state.ending or state.over:
        return
    before, state.targets = state.targets, targets(state)
    for mark, wanted in state.targets.items():
        if wanted < before.get(mark, 0):
            _let_go(state, mark, wanted, "a pool that is preferred has its place")


def release(state: CoordinatorState, name: str) -> list[str]:
    """Let a worker (its id) or a host (its name) go; what is wanted falls by what its pools had of it.

    Never below the minimum: the last to leave hands the state over to its replacement.

    Raises:
        UsageError: the run is ending, or there is no such worker or host.
    """
    _see_that_it_goes_on(state, f"release {name}")
    found = [w for w in state.workers.values() if name in (w.id, w.host) and not w.leaving]
    if not found:
        known = ", ".join(f"{w.id} on {w.host}" for w in state.workers.values()) or "none"
        raise UsageError(f"release {name}: no such worker or host; there are: {known}")
    for worker in found:
        mark, its = pool_mark(state, worker.pool), targets(state)
        if worker.pool and its.get(mark) and sum(its.values()) > state.settings.minimum:
            has = min(its[mark], _present(state)[mark]) if state.settings.pools else its[mark]
            fix_target(state, mark, has - 1, has)  # but who leaves last hands over to a replacement
        request_leave(state, worker, "released")
    return [w.id for w in found]


def _see_that_it_goes_on(state: CoordinatorState, request: str) -> None:
    if ending := state.over or state.ending:
        raise UsageError(f"{request}: the run is ending ({ending.reason}); nobody joins or is replaced any more")


def fix_target(state: CoordinatorState, mark: str, wanted: int, before: int) -> None:
    """So many are wanted of that pool from now on, whatever others have; of what they share it had `before`."""
    if mark not in state.fixed_targets and state.shared_target is not None:
        state.shared_target = max(state.shared_target - before, 0)
    state.fixed_targets[mark] = wanted


def _let_go(state: CoordinatorState, mark: str, wanted: int, reason: str) -> None:
    ours = [w for w in state.workers.values() if w.pool and pool_mark(state, w.pool) == mark and not w.leaving]
    for worker in ours[wanted:]:  # the newest go first
        request_leave(state, worker, reason)


def request_leave(state: CoordinatorState, worker: Worker, reason: str) -> None:
    """The worker is to leave gracefully: the next view is without it. It hears of that when it has left."""
    if not worker.leaving:
        worker.leaving = reason
        state.record(events.NoticeEvent(worker=worker.id, reason=reason))


def set_deadline(state: CoordinatorState, worker: Worker, within_s: float) -> None:
    """Its machine goes then: it ends itself before, should it be there still. See `deadline`."""
    worker.goes_at = min(worker.goes_at, state.clock + within_s)
    repeat_notice(state, worker)


def repeat_notice(state: CoordinatorState, worker: Worker) -> None:
    """It may not have heard of its deadline."""
    if worker.goes_at < math.inf:
        state.send(worker.id, m.PreemptionDeadline(within_s=max(worker.goes_at - state.clock, 0.0)))


# --- roster -----------------------------------------------------------------------------------------------------------
#
# A pool's desired state: how many workers the run wants of it, and what became of those that it has started.

OUT = (EXIT_EVICTED, EXIT_BANNED)


def build_roster(state: CoordinatorState, pool: str = "") -> Roster:
    """That pool's; without a name, that of the run's own."""
    pool = pool or (state.pools[0] if state.pools else "")
    mark = pool_mark(state, pool)

    def own(workers: Iterable[str]) -> tuple[str, ...]:
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
