"""Lost contact: connections that break, workers out of reach, a coordinator that was killed and comes back.

A closed connection or silence does not prove that a worker is dead: it may train on with its peers, who need nothing of
the coordinator. Invariant: a stop is decided only when the newest view that the reports name, and every newer one, is
fenced (a synced member has answered; or all have answered, ended or are past their lease). So at most one view makes
progress at any time.
Argument: docs/protocol.md, Reconnection and the lease 1-8.

    on_absence       the connection of a worker that has a part has closed
    on_return        it is back
    on_silence       the clock's part: silences that last too long, and ends of leases: decides stops and stops views
"""

from __future__ import annotations

import msgspec

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import recovery, shutdown, view_changes
from farandole.protocol.coordinator.state import (
    CoordinatorState,
    CrashLoop,
    Departed,
    Ending,
    IssuedView,
    Stopping,
    Worker,
)
from farandole.protocol.failure_detector import Silence
from farandole.protocol.view import View

STEPS, NEWS = 2, 1.5  # no progress for so many median steps and heartbeats: a member is waited for


def on_return(state: CoordinatorState, worker: Worker, now: float, *, synced: bool) -> None:
    """Handle the reconnection of a participant or saver. Its Welcome is already sent.

    It may have missed anything that was sent, in either direction. So its return stops the view: a proposed view is
    given up, and the decision brings all to the same round. `synced`: it reports that it holds the state. Its answer to
    the stop says more, but a report that its script has ended or failed comes before that answer, and concerns the run
    only if it holds the state.
    """
    stopping = state.stopping
    worker.connected, worker.saves = True, None
    if synced:
        view_changes.mark_holder(state, worker)
    elif worker.state == "member":
        state.unsynced.add(worker.id)
    state.failure_detector.begin(worker.silence, now)
    state.dead.pop(worker.id, None)  # it sent its Hello before its lease was over
    if state.savers:
        shutdown.on_return(state, worker.id)
    elif stopping is None:
        recovery.stop_view(state, f"{worker.id} is back")
    else:
        _be_patient(state, stopping, now)
        stopping.overdue.pop(worker.id, None)
        if worker.id in stopping.unanswered:
            state.send(worker.id, m.Stop(stop=stopping.number))


def _be_patient(state: CoordinatorState, stopping: Stopping, now: float) -> None:
    """Give the overdue workers one more heartbeat timeout, once a stop: the first of them has reconnected."""
    if stopping.patient:
        return
    stopping.patient = True
    for other in [w for w in stopping.overdue if w in state.workers and w not in stopping.expelled]:
        state.failure_detector.begin(state.workers[other].silence, now)
        del stopping.overdue[other]


def on_absence(state: CoordinatorState, worker: Worker, now: float) -> None:
    """Handle the closed connection of a worker that may be alive: its silence begins.

    Nothing is stopped for it, unless a stop is in progress in which the worker was accused or expelled.
    """
    worker.connected = False
    state.failure_detector.begin(worker.silence, now)
    stopping = state.stopping
    if stopping and worker.id in stopping.expelled:
        recovery.mark_overdue(state, worker.id, stopping.expelled[worker.id])
        return
    accusers = [pair for pair in stopping.accusations if pair[1] == worker.id] if stopping else []
    if accusers:
        recovery.mark_overdue(state, worker.id, f"its connection closed, and {accusers[0][0]} has lost it too")


def on_silence(state: CoordinatorState, now: float) -> list[tuple[str, str]]:
    """Act on silences that are too long, at every tick. Returns the workers that the caller must evict, and why.

    These are the workers that nobody waits for, and all workers while the last checkpoint is saved. The other silent
    workers become overdue: this stops the view, which goes on without them if that is safe. A worker whose lease is
    over counts as dead from then on.
    """
    evicted = list[tuple[str, str]]()
    for worker in list(state.workers.values()):
        silence_s = state.failure_detector.lasts_s(worker.silence)
        if silence_s > state.settings.orphan_s and worker.id not in state.dead:
            state.mark_dead(worker.id)
            recovery.recover_if_ready(state)
        if worker.id not in state.workers or (state.stopping and worker.id in state.stopping.overdue):
            continue
        limit_s = state.failure_detector.passed_s(worker.silence, steady=_is_steady(state, worker, now))
        if not limit_s:
            continue
        gap = (
            f"no heartbeat for {limit_s:.3g} s" if worker.connected else f"its connection closed {silence_s:.0f} s ago"
        )
        if state.savers or not state.is_waited_for(worker.id):
            evicted.append((worker.id, gap))
        else:
            recovery.mark_overdue(state, worker.id, gap)
    return evicted


def _is_steady(state: CoordinatorState, worker: Worker, now: float) -> bool:
    """Return True if the usual silence of the worker is its limit (docs/protocol.md, Failure detection 5).

    It must have computed before, and others must wait for it. They do in a stop, and if there is no progress for longer
    than a step and its report take: a round needs each of its members, so while rounds go on none of them is dead. In
    rounds that are no steps a script may do something slow for the first time.
    """
    if not worker.computed or worker.state != "member" or state.savers:
        return False
    if state.stopping is not None:
        return worker.id in state.stopping.unanswered
    progress = state.progress
    return view_changes.in_a_step(state) and progress.unchanged_s(now) > progress.limit(
        NEWS * state.settings.heartbeat_s, STEPS
    )


# --- what a coordinator's restart needs ------------------------------------------------------------------------


class KnownWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a worker in the journal."""

    id: str
    host: str
    pid: int
    pool: str
    session: str
    state: str
    leaving: str
    entered: int = -1
    unreached: str = ""
    last_answer: tuple[int, int] = (0, 0)
    zone: str = ""


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the state that must outlive the coordinator. The workers report everything else when they return.

    Fields have the names that they have in `CoordinatorState`. `name=` is a field's name in journals.
    """

    number: int = 0
    stops: int = 0
    external_workers: int = msgspec.field(default=0, name="guests")
    pools: tuple[str, ...] = ()
    fixed_targets: dict[str, int] = msgspec.field(name="wants")
    shared_target: int | None = msgspec.field(default=0, name="shared")
    pool_capacity: dict[str, int] = msgspec.field(default_factory=dict[str, int], name="can")
    startup_failures: dict[str, int] = {}
    crash_loop: CrashLoop = msgspec.field(default=CrashLoop(), name="losses")
    not_finite: int = -1
    unpromised: int | None = None
    signature: m.Signature | None = None
    previous: View | None = None
    view: View | None = None
    proposed: View | None = None
    issued: tuple[IssuedView, ...] = ()
    # IDs of workers that the others may have to wait for (`CoordinatorState.is_waited_for`)
    waited_for: tuple[str, ...] = msgspec.field(default=(), name="parts")
    workers: tuple[KnownWorker, ...] = ()
    expelled: dict[str, str] = {}
    departed: dict[str, Departed] = {}
    dead: tuple[str, ...] = msgspec.field(default=(), name="gone")
    banned: tuple[str, ...] = msgspec.field(default=(), name="barred")
    wrong_hosts: tuple[str, ...] = ()
    ending: Ending | None = None
    over: Ending | None = None
    newest: m.Newest = m.Newest()
    unrecorded: int = 0


def to_durable(state: CoordinatorState) -> Durable:
    """Return the durable part of the state.

    It must be written before any message is sent that belongs to the same change.
    """
    return Durable(
        number=state.number,
        stops=state.stops,
        external_workers=state.external_workers,
        pools=tuple(state.pools),
        fixed_targets=dict(state.fixed_targets),
        shared_target=state.shared_target,
        pool_capacity=dict(state.pool_capacity),
        startup_failures=dict(state.startup_failures),
        crash_loop=state.crash_loop,
        not_finite=state.not_finite,
        unpromised=state.unpromised,
        signature=state.signature,
        previous=state.previous,
        view=state.view,
        proposed=state.proposed,
        issued=tuple(state.issued),
        waited_for=tuple(worker for worker in state.workers if state.is_waited_for(worker)),
        workers=tuple(
            KnownWorker(
                id=w.id,
                host=w.host,
                pid=w.pid,
                pool=w.pool,
                session=w.session,
                state=w.state,
                leaving=w.leaving,
                entered=w.entered,
                unreached=w.unreached,
                last_answer=w.last_answer,
                zone=w.zone,
            )
            for w in state.workers.values()
        ),
        expelled=dict(state.stopping.expelled) if state.stopping else {},
        departed=dict(state.departed),
        dead=tuple(state.dead),
        banned=tuple(state.banned),
        wrong_hosts=tuple(sorted(state.wrong_hosts)),
        ending=state.ending,
        over=state.over,
        newest=state.newest,
        unrecorded=state.unrecorded,
    )


def restore(state: CoordinatorState, durable: Durable, now: float) -> None:
    """Restore the state of a coordinator that was killed: all workers are unreachable, and a stop is in progress."""
    state.number, state.stops, state.external_workers = durable.number, durable.stops, durable.external_workers
    state.pools = list(durable.pools)
    state.fixed_targets, state.startup_failures = dict(durable.fixed_targets), dict(durable.startup_failures)
    state.signature = durable.signature
    state.previous, state.view, state.proposed = durable.previous, durable.view, durable.proposed
    state.issued, state.shared_target = list(durable.issued), durable.shared_target
    state.pool_capacity = dict(durable.pool_capacity)
    state.departed, state.dead = dict(durable.departed), dict.fromkeys(durable.dead, "")
    state.crash_loop, state.clock, state.ending_at = durable.crash_loop, now, now
    state.banned = dict.fromkeys(durable.banned)
    state.unrecorded, state.wrong_hosts = durable.unrecorded, set(durable.wrong_hosts)
    state.ending, state.over = durable.ending, durable.over
    state.newest, state.not_finite, state.unpromised = durable.newest, durable.not_finite, durable.unpromised
    if state.ending:
        state.ending.saver, state.ending.compared = "", False
    # See docs/protocol.md, Reconnection and the lease 8
    grace_s = state.settings.heartbeat_timeout_s if state.settings.taken_over else 0.0
    for w in durable.workers:
        state.workers[w.id] = Worker(
            id=w.id, host=w.host, pid=w.pid, pool=w.pool, session=w.session, silence=Silence(), connected=False,
            state="member" if w.state == "finished" else w.state,  # it reports its end again
            leaving=w.leaving, entered=w.entered, unreached=w.unreached, saves=None,
            may_write=True, last_answer=w.last_answer, zone=w.zone,
        )  # fmt: skip
        state.failure_detector.begin(state.workers[w.id].silence, now, grace_s)
    state.record(events.CoordinatorBackEvent(workers=tuple(w.id for w in durable.workers)))
    if not state.over and state.views():
        state.stops += 1
        waiting = set(durable.waited_for).intersection(state.workers)
        state.stopping = Stopping(
            number=state.stops, unanswered=waiting, expelled=dict(durable.expelled), cause="the coordinator is back"
        )
        recovery.recover_if_ready(state)
