"""Lost contact: connections that break, workers out of reach, a coordinator that was killed and comes back.

A closed connection or silence does not prove that a worker is dead: it may train on with its peers, who need nothing of
the coordinator. Invariant: a stop is decided only when the newest view that the reports name, and every newer one, is
fenced (a synced member has answered; or all have answered, ended or are past their lease). So at most one view makes
progress at any time.
Argument: docs/protocol.md, Reconnection and the lease 1-8.

    on_absence       the connection of a worker that has a part has closed
    on_return        it is back
    silent_workers   the clock's part: silences that last too long (`failure_detector.py`), and ends of leases
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

STEPS, NEWS = 2, 1.5  # median steps, and heartbeats, for which nothing moves where a member is waited for


def on_return(state: CoordinatorState, worker: Worker, now: float) -> None:
    """A worker that has a part in a view, or had to save, has connected again. Its Welcome is on its way."""
    stopping = state.stopping
    worker.connected, worker.saves = True, None
    state.failure_detector.begin(worker.silence, now)
    state.dead.pop(worker.id, None)  # its Hello was sent before its lease was over
    if state.savers:
        shutdown.on_return(state, worker.id)
    elif stopping is None:
        recovery.stop_view(state, f"{worker.id} is back")
    else:
        _be_patient(state, stopping, now)
        stopping.overdue.pop(worker.id, None)
        if worker.id in stopping.waiting:
            state.send(worker.id, m.Stop(stop=stopping.number))


def _be_patient(state: CoordinatorState, stopping: Stopping, now: float) -> None:
    """One is back, perhaps the first after a cut: the others get the heartbeat timeout to follow, once a stop."""
    if stopping.patient:
        return
    stopping.patient = True
    for other in [w for w in stopping.overdue if w in state.workers and w not in stopping.expelled]:
        state.failure_detector.begin(state.workers[other].silence, now)
        del stopping.overdue[other]


def on_absence(state: CoordinatorState, worker: Worker, now: float) -> None:
    """Its connection has closed; it may be alive."""
    worker.connected = False
    state.failure_detector.begin(worker.silence, now)
    stopping = state.stopping
    if stopping and worker.id in stopping.expelled:
        recovery.expel_if_overdue(state, worker.id, stopping.expelled[worker.id])
        return
    accusers = [pair for pair in stopping.accusations if pair[1] == worker.id] if stopping else []
    if accusers:
        recovery.expel_if_overdue(state, worker.id, f"its connection closed, and {accusers[0][0]} has lost it too")


def silent_workers(state: CoordinatorState, now: float) -> list[tuple[str, str]]:
    """Call at every tick. Returns those without a part in a view, or with a checkpoint to save, who are to be evicted,
    and why.

    The others become overdue: the view is stopped, and goes on without them if that is safe.
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
        if state.savers or not state.has_part(worker.id):
            evicted.append((worker.id, gap))
        else:
            recovery.expel_if_overdue(state, worker.id, gap)
    return evicted


def _is_steady(state: CoordinatorState, worker: Worker, now: float) -> bool:
    """Whether what is usual counts for its silence (see `silence`, 5): it has computed before, and others wait for it.

    They do in a stop, and where nothing has moved for longer than a step and the news of one take: a round needs each
    of its members, so while rounds go on none of them is dead. In rounds of another kind than a step a script may do
    for the first time what it likes.
    """
    if not worker.computed or worker.state != "member" or state.savers:
        return False
    if state.stopping is not None:
        return worker.id in state.stopping.waiting
    still = state.progress
    return view_changes.in_a_step(state) and still.stands(now) > still.limit(NEWS * state.settings.heartbeat_s, STEPS)


# --- what a coordinator's restart needs ------------------------------------------------------------------------


class KnownWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker."""

    id: str
    host: str
    pid: int
    pool: str
    session: str
    state: str
    leaving: str
    entered: int = -1
    unreached: str = ""


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The state' part that must outlive the coordinator's process. Everything else the workers say when they return."""

    number: int = 0
    stops: int = 0
    guests: int = 0
    pools: tuple[str, ...] = ()
    wants: dict[str, int]
    shared: int | None = 0
    can: dict[str, int] = {}
    startup_failures: dict[str, int] = {}
    losses: CrashLoop = CrashLoop()
    not_finite: int = -1
    unpromised: int | None = None
    signature: m.Signature | None = None
    previous: View | None = None
    view: View | None = None
    proposed: View | None = None
    issued: tuple[IssuedView, ...] = ()
    parts: tuple[str, ...] = ()  # ids of those who may have to be waited for
    workers: tuple[KnownWorker, ...] = ()
    expelled: dict[str, str] = {}
    departed: dict[str, Departed] = {}
    gone: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    wrong_hosts: tuple[str, ...] = ()
    ending: Ending | None = None
    over: Ending | None = None
    newest: m.Newest = m.Newest()
    unrecorded: int = 0


def to_durable(state: CoordinatorState) -> Durable:
    """To be written before any message goes out that was sent together with a change of it."""
    return Durable(
        number=state.number,
        stops=state.stops,
        guests=state.external_workers,
        pools=tuple(state.pools),
        wants=dict(state.fixed_targets),
        shared=state.shared_target,
        can=dict(state.pool_capacity),
        startup_failures=dict(state.startup_failures),
        losses=state.crash_loop,
        not_finite=state.not_finite,
        unpromised=state.unpromised,
        signature=state.signature,
        previous=state.previous,
        view=state.view,
        proposed=state.proposed,
        issued=tuple(state.issued),
        parts=tuple(worker for worker in state.workers if state.has_part(worker)),
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
            )
            for w in state.workers.values()
        ),
        expelled=dict(state.stopping.expelled) if state.stopping else {},
        departed=dict(state.departed),
        gone=tuple(state.dead),
        barred=tuple(state.banned),
        wrong_hosts=tuple(sorted(state.wrong_hosts)),
        ending=state.ending,
        over=state.over,
        newest=state.newest,
        unrecorded=state.unrecorded,
    )


def restore(state: CoordinatorState, known: Durable, now: float) -> None:
    """Take over from a coordinator that was killed: everyone is out of reach, and a stop is outstanding."""
    state.number, state.stops, state.external_workers = known.number, known.stops, known.guests
    state.pools = list(known.pools)
    state.fixed_targets, state.startup_failures = dict(known.wants), dict(known.startup_failures)
    state.signature = known.signature
    state.previous, state.view, state.proposed = known.previous, known.view, known.proposed
    state.issued, state.shared_target, state.pool_capacity = list(known.issued), known.shared, dict(known.can)
    state.departed, state.dead = dict(known.departed), dict.fromkeys(known.gone, "")
    state.crash_loop, state.clock, state.ending_at = known.losses, now, now
    state.banned = dict.fromkeys(known.barred)
    state.unrecorded, state.wrong_hosts = known.unrecorded, set(known.wrong_hosts)
    state.ending, state.over = known.ending, known.over
    state.newest, state.not_finite, state.unpromised = known.newest, known.not_finite, known.unpromised
    if state.ending:
        state.ending.saver, state.ending.compared = "", False
    grace_s = state.settings.heartbeat_timeout_s if state.settings.taken_over else 0.0  # see 8
    for w in known.workers:
        state.workers[w.id] = Worker(
            id=w.id, host=w.host, pid=w.pid, pool=w.pool, session=w.session, silence=Silence(), connected=False,
            state="member" if w.state == "finished" else w.state,  # it says so again
            leaving=w.leaving, entered=w.entered, unreached=w.unreached, saves=None,
        )  # fmt: skip
        state.failure_detector.begin(state.workers[w.id].silence, now, grace_s)
    state.record(events.CoordinatorBackEvent(workers=tuple(w.id for w in known.workers)))
    if not state.over and state.views():
        state.stops += 1
        waiting = set(known.parts).intersection(state.workers)
        state.stopping = Stopping(
            number=state.stops, waiting=waiting, expelled=dict(known.expelled), cause="the coordinator is back"
        )
        recovery.recover_if_ready(state)
