"""The reconciler of a pool: a pure function of the roster (the desired state), the pool's events and the time, in s.

Invariant: as far as the pool has room, `wanted` workers of the pool run or are requested that are neither leaving nor
evicted. An id is never used twice.

A leaving worker is replaced before it has exited, so that the view never runs short. The same holds for a worker whose
host has a preemption notice or rebalance advice. A leaving worker has `GRACE_S` to exit after the coordinator has
released it, and after the end of the run. A lost worker is replaced after `QUIET_S`, so that the recovery of the others
has the cores to itself; it is replaced at once if there are no others or if its host is gone. In a crash loop (the
roster counts the losses without progress), each further loss doubles the delay, up to `LONGEST_S`. An evicted worker
counts as lost from its eviction on, and again when it has exited: its peers may see its end before its pool does, and
the cause of its death, and whether that counts, is known only later.

A failed start is reported to the coordinator, and does not count as a lost worker. The same holds for a start without
any event for `START_S`: it is cancelled, and a worker that comes of it later is stopped. Class `Placing` decides which
host is used, and when again. A worker that was lost because its host could not get its data does not count either. The
roster reports this, or the exit code if that comes first. Its host is left alone, and another one is used.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from farandole.control.client import Subscription, subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, Refused
from farandole.pool.base import (
    Event,
    Host,
    HostPreempted,
    HostRebalance,
    HostState,
    NothingToGive,
    Pool,
    Priced,
    Provisions,
    ReportedCapacity,
    RunningWorker,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.protocol import messages as m
from farandole.protocol.coordinator.scaling import number_of, worker_id
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE
from farandole.protocol.messages import Hello, Roster

# --- placing ----------------------------------------------------------------------------------------------------------
#
# Selects the host of a pool on which the next worker starts. Pure; times are the caller's, in seconds.
#
# - The first host of the pool that has a free slot, has no preemption notice or rebalance advice, and is not in
#   back-off.
# - A failed start is a failure of its host. So is a worker that exited without a request before it had run for
#   `STOOD_S`. The host is then in back-off: twice as long each time, up to `LONGEST_REST_S`, until a worker has run
#   there for `STOOD_S`.
# - If workers exited but no start failed, the host is used in spite of its back-off when no other host is available:
#   the cause may be the script, and the run as a whole decides when that is tried again (`restart_delay_s`).
# - A host that could not get a worker its data (a full disk, an unreachable store) is in back-off too, even if it is
#   the only host: twice as long each time, up to `LONGEST_REST_S`. It is tried again when the back-off ends. Other
#   workers may run there meanwhile with the data that they have, which proves nothing. Only `LONGEST_REST_S` without
#   trouble after a back-off resets the count.
# - A pool without capacity is asked again after a back-off, twice as long each time, for any host.
# - A host on which a worker computed a wrong result is not used again.
# - A preemption notice counts until the host is gone, or until `OVERDUE_S` after its deadline; advice counts until the
#   host is gone.

STOOD_S = 60.0
FIRST_REST_S, LONGEST_REST_S = 1.0, 600.0  # back-off
OVERDUE_S = 30.0
SAME_S = 1.0  # deadlines closer than this are one deadline, reported twice


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`count` failures in a row; back-off lasts until `until`. `start`: the last failure was a failed start."""

    count: int = 0
    until: float = 0.0
    start: bool = False

    def next_backoff(self, now: float, *, start: bool) -> Trouble:
        rest_s = min(FIRST_REST_S * 2.0**self.count, LONGEST_REST_S)
        return replace(self, count=self.count + 1, until=now + rest_s, start=start)


class Placing:
    """The state of a pool's hosts: failures, back-offs, notices and advice."""

    def __init__(self) -> None:
        self._troubles: dict[str, Trouble] = {}
        self._unfed: dict[str, Trouble] = {}
        self._capacity = Trouble()
        self._noticed: dict[str, float] = {}  # the time until which the notice counts
        self._advised: set[str] = set()
        self._wrong: Collection[str] = ()

    def usable(self, hosts: Sequence[Host], now: float) -> list[Host]:
        """The hosts on which workers may start now if they have room, best first."""
        if self.is_short(now):
            return []
        open_ = [
            host
            for host in hosts
            if host.name not in self._wrong
            and not self.is_leaving(host.name, now)
            and not self.is_data_unavailable(host.name, now)
        ]
        rested = [host for host in open_ if self._trouble(host.name).until <= now]
        tried = [host for host in open_ if (it := self._trouble(host.name)).until > now and not it.start]
        return rested + tried

    def capacity(self, hosts: Sequence[Host], workers: Mapping[str, int], now: float) -> int | None:
        """The number of workers that the pool can have; None: no limit is known. `workers`: how many each host has."""
        if self.is_short(now):
            return sum(workers.values())
        open_ = [host for host in hosts if host.name not in self._wrong and not self.is_leaving(host.name, now)]
        slots = [
            workers.get(host.name, 0) if self.is_data_unavailable(host.name, now) else host.slots for host in open_
        ]
        return None if None in slots else sum(slot or 0 for slot in slots)

    def is_leaving(self, host: str, now: float) -> bool:
        """Returns True if the host has a preemption notice or rebalance advice that counts."""
        return host in self._advised or self._noticed.get(host, now) > now

    def set_wrong_hosts(self, hosts: Collection[str]) -> None:
        """Set the hosts on which a worker computed a wrong result, as the run knows them."""
        self._wrong = hosts

    def record_preemption(self, notice: HostPreempted, now: float) -> bool:
        """Returns True if the host goes sooner than was known."""
        until = now + notice.deadline_s + OVERDUE_S
        previous = self._noticed.get(notice.host, now)
        self._noticed[notice.host] = until
        return previous <= now or until < previous - SAME_S

    def record_rebalance(self, advice: HostRebalance) -> bool:
        """Returns True if the advice is new."""
        new = advice.host not in self._advised
        self._advised.add(advice.host)
        return new

    def record_failure(self, host: str, now: float, *, start: bool) -> None:
        """Record that a start failed there, or that a worker exited too soon."""
        self._troubles[host] = self._trouble(host).next_backoff(now, start=start)

    def record_data_unavailable(self, host: str, now: float) -> float:
        """Record that a worker there could not get its data. Returns the back-off in s; 0: it is in back-off
        already.
        """
        trouble = self._unfed.get(host, Trouble())
        if now < trouble.until:
            return 0.0
        trouble = trouble if now - trouble.until < LONGEST_REST_S else Trouble()
        self._unfed[host] = longer = trouble.next_backoff(now, start=True)
        return longer.until - now

    def is_data_unavailable(self, host: str, now: float) -> bool:
        """Returns True if the host is in back-off because it could not get the data."""
        return now < self._unfed.get(host, Trouble()).until

    def is_short(self, now: float) -> bool:
        """Returns True if the pool had no capacity and its back-off has not ended."""
        return now < self._capacity.until

    def record_shortage(self, now: float) -> bool:
        """Record that the pool has no capacity. Returns True if that is new."""
        new = not self._capacity.count
        self._capacity = self._capacity.next_backoff(now, start=True)
        return new

    def record_capacity(self) -> None:
        """Record that the pool has capacity."""
        self._capacity = Trouble()

    def record_survived(self, host: str) -> None:
        """Record that a worker there has run for `STOOD_S`: the back-off ends."""
        self._troubles.pop(host, None)

    def keep_only(self, hosts: Sequence[Host]) -> None:
        """Forget the notices and advice of hosts that are gone. A new host of the same name starts without them."""
        names = {host.name for host in hosts}
        self._noticed = {name: until for name, until in self._noticed.items() if name in names}
        self._advised &= names

    def _trouble(self, host: str) -> Trouble:
        return self._troubles.get(host, Trouble())


# --- reconciler -------------------------------------------------------------------------------------------------------

GRACE_S = 10.0
QUIET_S, LONGEST_S = 1.0, 60.0
START_S = 600.0
DATA_UNAVAILABLE_EXIT = f"exited with code {EXIT_DATA_UNAVAILABLE}"
LEAVE_S = 3600  # the deadline of workers for which their host has no slot any more


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Start `start` new workers and stop the workers in `stop`."""

    start: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolActions:
    """The actions for the pool: first `stop` these workers, then `start` these, as pairs of worker and host."""

    stop: tuple[str, ...] = ()
    start: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class WorkerRecord:
    """A requested worker. A time is infinite until its event has happened."""

    host: str
    requested_at: float
    started_at: float = math.inf
    stopped_at: float = math.inf  # the last time
    released_at: float = math.inf
    data_unavailable: bool = False  # its host could not get its data, so its loss does not count


def decide(roster: Roster, running: Collection[str], out: Collection[str] = ()) -> Decision:
    """The actions that follow from a roster. `out`: workers that earlier rosters listed in `leaving` or whose host
    goes.
    """
    stop = tuple(worker for worker in running if worker in roster.evicted)
    if roster.over >= 0:  # workers that are still starting have nothing to end, and nobody would dismiss them
        connected = {*roster.present, *roster.released}
        return Decision(stop=tuple(worker for worker in running if worker in stop or worker not in connected))
    staying = [w for w in running if w not in roster.leaving and w not in roster.evicted and w not in out]
    return Decision(start=max(roster.wanted - len(staying), 0), stop=stop)


def restart_delay_s(losses: int, *, others: bool) -> float:
    """The delay between a loss and the start of its replacement, in s. `losses`: losses in a row without progress.

    `others`: other workers are running and recover first, because a replacement's start-up may take their cores. False
    if the host is gone.
    """
    if losses == 0:
        return QUIET_S if others else 0.0
    return min(QUIET_S * 2.0 ** (losses - 1), LONGEST_S)


class PoolReconciler:
    """Pass it rosters and events, carry out what `due` returns, and send the messages from `take_messages`.

    `count`: the number of workers that were started earlier. `provisions`: the pool requests hosts that it does not
    have yet, and reports that itself. `claims_size`: see `Provisions`.
    """

    def __init__(self, count: int = 0, *, provisions: bool = False, claims_size: bool = False) -> None:
        self.roster: Roster | None = None
        self._count, self._provisions, self._claims_size = count, provisions, claims_size
        self._workers: dict[str, WorkerRecord] = {}
        self._called_off: set[str] = set()  # workers of cancelled starts that may still appear
        self._out: set[str] = set()  # leaving workers
        self._placing = Placing()
        self._full = False  # all slots are taken, and that was reported
        self._over_at = math.inf
        self._lost_at = -math.inf
        self._lost_on = ""  # the host of the last loss
        self._outbox: list[m.FromPool] = []
        self._capacity_report = ReportedCapacity()

    @property
    def running(self) -> list[str]:
        """The workers that run or are requested."""
        return list(self._workers)

    @property
    def started(self) -> list[str]:
        """The workers that run."""
        return [worker for worker, record in self._workers.items() if record.started_at < math.inf]

    @property
    def is_done(self) -> bool:
        """The run is over and no worker is left."""
        return self.roster is not None and self.roster.over >= 0 and not self._workers

    def take_messages(self) -> list[m.FromPool]:
        """The messages for the coordinator, each returned once."""
        messages, self._outbox = self._outbox, []
        return messages

    # --- what comes in ---------------------------------------------------------------------------------------

    def update(self, roster: Roster, now: float) -> None:
        before = self.roster.evicted if self.roster else ()
        for worker in set(roster.evicted).difference(before).intersection(self._workers):
            self._lost_at, self._lost_on = now, self._workers[worker].host
        self.roster = roster
        self._placing.set_wrong_hosts(roster.wrong_hosts)
        for worker in sorted(set(roster.unfed).intersection(self._workers)):
            self._record_data_unavailable(worker, self._workers[worker], now)
        self._out.update(roster.leaving, roster.released)
        for worker in set(roster.released).intersection(self._workers):
            record = self._workers[worker]
            record.released_at = min(record.released_at, now)
        if roster.over >= 0:
            self._over_at = min(self._over_at, now)

    def on_event(self, event: Event, now: float) -> None:
        """Process an event of the pool. A repeated event counts once; an event of an unknown worker does not count."""
        match event:
            case Started(worker, host):
                self._started(worker, host, now)
            case RunningWorker(worker, host):
                self._taken_over(worker, host, now)
            case WorkerStartFailed(worker, reason):
                self._start_failed(worker, reason, now)
            case NothingToGive(worker, reason):
                if self._workers.pop(worker, None) and self._placing.record_shortage(now):
                    self._outbox.append(m.NoCapacity(reason=reason))
            case HostPreempted(host, deadline_s, reason):
                sooner = self._placing.record_preemption(event, now)
                on_host = [worker for worker, record in self._workers.items() if record.host == host]
                workers = tuple(worker for worker in on_host if sooner or worker not in self._out)
                self._out.update(workers)
                if workers:
                    self._outbox.append(
                        m.PreemptionNotice(workers=workers, host=host, within_s=round(deadline_s), reason=reason)
                    )
            case HostRebalance(host, reason):
                if self._placing.record_rebalance(event):
                    self._outbox.append(m.RebalanceAdvice(host=host, reason=reason))
            case WorkerExited(worker, reason):
                self._on_exit(worker, reason, now)
            case HostState(host, state, reason):
                self._outbox.append(m.HostSeen(host=host, state=state, reason=reason))
            case Priced(host, dollars, since, day):
                self._outbox.append(m.HostPriced(host=host, dollars=dollars, since=since, day=day))

    def _started(self, worker: str, host: str, now: float) -> None:
        self._placing.record_capacity()
        if record := self._workers.get(worker):
            if host != record.host:  # the worker started on another host, so the requested host did not fail
                self._placing.record_survived(record.host)
            record.host, record.started_at = host, min(record.started_at, now)
        else:
            self._called_off.add(worker)

    def _taken_over(self, worker: str, host: str, now: float) -> None:
        """Take over a worker of an earlier process of this pool. New workers get higher numbers."""
        if worker not in self._workers:
            self._workers[worker] = WorkerRecord(host=host, requested_at=now, started_at=now)
            self._count = max(self._count, number_of(worker))

    def _start_failed(self, worker: str, reason: str, now: float) -> None:
        record = self._workers.pop(worker, None)
        if record is None:
            return
        if record.stopped_at == math.inf:
            self._placing.record_failure(record.host, now, start=True)
            self._outbox.append(m.StartFailed(worker=worker, host=record.host, reason=reason))

    def _on_exit(self, worker: str, reason: str, now: float) -> None:
        record = self._workers.pop(worker, None)
        if record is None:
            self._called_off.discard(worker)
            return
        self._lost_at, self._lost_on = now, record.host
        requested = record.stopped_at < math.inf or worker in self._out
        if reason == DATA_UNAVAILABLE_EXIT:
            self._record_data_unavailable(worker, record, now)
        if not requested and not record.data_unavailable and now - record.started_at < STOOD_S:
            self._placing.record_failure(record.host, now, start=False)
        self._outbox.append(m.WorkerProcessExited(worker=worker, reason=reason))

    def _record_data_unavailable(self, worker: str, record: WorkerRecord, now: float) -> None:
        if record.data_unavailable:
            return
        record.data_unavailable, self._lost_at, self._lost_on = True, now, record.host  # the others recover
        if rest_s := self._placing.record_data_unavailable(record.host, now):
            reason = f"for {rest_s:.0f} s: {worker} could not get the run's data there"
            self._outbox.append(m.HostSeen(host=record.host, state="left alone", reason=reason))

    # --- what is due -----------------------------------------------------------------------------------------

    def take_actions(self, hosts: Sequence[Host], now: float) -> PoolActions:
        """The actions that are due now, recorded as done. Call it periodically too: grace times and back-offs end."""
        if self.roster is None:
            return PoolActions()
        self._placing.keep_only(hosts)
        self._shrink(hosts)
        load = Counter(record.host for record in self._workers.values())
        can = None if self._claims_size else self._placing.capacity(hosts, load, now)
        if self._capacity_report.update(can, now, short=self._placing.is_short(now)):
            self._outbox.append(m.Capacity(workers=can, gathers=self._capacity_report.gathers))
        given_up = self._give_up(now)
        for record in self._workers.values():
            if now - record.started_at >= STOOD_S:
                self._placing.record_survived(record.host)
        goes = {worker for worker, record in self._workers.items() if self._placing.is_leaving(record.host, now)}
        decision = decide(self.roster, self._workers, self._out | goes)
        late = [worker for worker, record in self._workers.items() if self._is_overdue(record, now)]
        stop = (*given_up, *self._stopped((*decision.stop, *late), now))
        others = bool(self._workers) and any(host.name == self._lost_on for host in hosts)
        waits = now - self._lost_at < restart_delay_s(self.roster.losses, others=others)
        return PoolActions(stop=stop, start=() if waits else tuple(self._start(decision.start, hosts, now)))

    def _shrink(self, hosts: Sequence[Host]) -> None:
        """Ask the newest workers to leave, as with a preemption notice, if a host has fewer slots than workers now."""
        by_host = defaultdict[str, list[str]](list)
        for worker, record in self._workers.items():
            if worker not in self._out:
                by_host[record.host].append(worker)
        for host in hosts:
            on_host = by_host.get(host.name, [])
            if host.slots is not None and len(on_host) > host.slots:
                surplus = tuple(on_host[host.slots :])
                self._out.update(surplus)
                reason = f"{host.name} has {host.slots} slots now"
                self._outbox.append(
                    m.PreemptionNotice(workers=surplus, host=host.name, within_s=LEAVE_S, reason=reason)
                )

    def stop_all(self, now: float) -> tuple[str, ...]:
        """The workers that the pool must stop so that none is left."""
        return tuple(self._stopped(self._workers, now))

    def _is_overdue(self, record: WorkerRecord, now: float) -> bool:
        return now - min(record.released_at, self._over_at) > GRACE_S

    def _stopped(self, workers: Collection[str], now: float) -> list[str]:
        """Those of `workers` that got no stop yet, or got it more than `GRACE_S` ago. Records the stop."""
        to_stop = [w for w in dict.fromkeys(workers) if not 0 <= now - self._workers[w].stopped_at <= GRACE_S]
        for worker in to_stop:
            self._workers[worker].stopped_at = now
        return to_stop

    def _give_up(self, now: float) -> list[str]:
        """Cancel starts without an event for too long, or too long after a stop; add workers of cancelled starts."""
        silent = [
            (worker, record)
            for worker, record in self._workers.items()
            if record.started_at == math.inf
            and (now - record.requested_at > START_S or now - record.stopped_at > GRACE_S)
        ]
        for worker, record in silent:
            self._start_failed(worker, f"no event of its start for {now - record.requested_at:.0f} s", now)
        called_off, self._called_off = self._called_off, set()
        return [*(worker for worker, _ in silent), *sorted(called_off)]

    def _start(self, number: int, hosts: Sequence[Host], now: float) -> list[tuple[str, str]]:
        assert self.roster is not None
        started: list[tuple[str, str]] = []
        load = Counter(record.host for record in self._workers.values())
        for host in self._placing.usable(hosts, now):
            while len(started) < number and host.room(load[host.name]):
                self._full = False
                self._count += 1
                worker = worker_id(self.roster.mark, self._count)
                self._workers[worker] = WorkerRecord(host=host.name, requested_at=now)
                load[host.name] += 1
                started.append((worker, host.name))
        if len(started) < number:
            self._report_full(hosts, load)
        return started

    def _report_full(self, hosts: Sequence[Host], load: Counter[str]) -> None:
        if self._full or self._provisions or any(host.room(load[host.name]) for host in hosts):
            return
        self._full = True
        slots = sum(host.slots or 0 for host in hosts)
        full = f"all {slots} slots of its {len(hosts)} hosts are taken"
        self._outbox.append(m.NoCapacity(reason=full if hosts else "none of its hosts is ready yet"))


# --- service ----------------------------------------------------------------------------------------------------------
#
# A pool serves a run: the reconciler decides, the pool acts, and the messages go to the coordinator, over one
# connection after another.

WAKE_S = 1.0  # how often grace times are checked
AGAIN_S = 0.2  # between two attempts to reach a lost coordinator
KEPT_MESSAGES = 1000  # messages
WITH_IT = "its `farandole run` was killed"
RESENT_MESSAGES = (
    m.WorkerProcessExited,
    m.PreemptionNotice,
    m.Capacity,
    m.HostPriced,
)  # sent again to a coordinator that is back


async def serve_pool(
    pool: Pool,
    ticket: Ticket,
    on_roster: Callable[[Roster], None] | None = None,
    count: int = 0,
    ended: Iterable[str] = (),
) -> Roster:
    """Serve the run with this pool until it is over and all of its processes have exited. Returns the last roster.

    If the coordinator is lost, this waits for it until it is cancelled: the workers train on meanwhile. When the
    coordinator is back, it gets all exits again. `on_roster` is called with every roster, for display. `count` workers
    were started in an earlier process of the run; the workers in `ended` exited with that process.

    Raises:
        CoordinatorUnreachable: the coordinator was never reached.
        Refused: another pool of the run has the same name.
    """
    hello = Hello(kind="pool", host=socket.gethostname(), pid=os.getpid(), pool=pool.name)
    service = _Service(
        pool,
        PoolReconciler(
            count,
            provisions=isinstance(pool, Provisions),
            claims_size=isinstance(pool, Provisions) and pool.claims_size,
        ),
        on_roster,
        [m.WorkerProcessExited(worker=worker, reason=WITH_IT) for worker in ended],
    )
    try:
        while not service.reconciler.is_done:
            try:
                async with subscribe(ticket, hello) as subscription:
                    await service.follow(subscription)
            except CoordinatorUnreachable:
                if service.reconciler.roster is None:
                    raise
            await service.pause(AGAIN_S)
        assert service.reconciler.roster is not None
        return service.reconciler.roster
    finally:
        await service.end()


class _Service:
    """Connects the reconciler to its pool and to one coordinator connection after another."""

    def __init__(
        self,
        pool: Pool,
        reconciler: PoolReconciler,
        on_roster: Callable[[Roster], None] | None,
        ended: Sequence[m.WorkerProcessExited],
    ) -> None:
        self.reconciler = reconciler
        self._pool = pool
        self._on_roster = on_roster
        self._resend: deque[m.FromPool] = deque(ended, maxlen=KEPT_MESSAGES)  # a new connection gets all of these
        self._unsent: deque[m.FromPool] = deque(maxlen=KEPT_MESSAGES)
        self._events = asyncio.ensure_future(pool.events())

    async def follow(self, subscription: Subscription) -> None:
        """Serve until the connection ends or the work is done."""
        for message in tuple(self._resend):
            await subscription.send(message)
        received = asyncio.ensure_future(subscription.receive())
        try:
            while not self.reconciler.is_done:
                await self._send(subscription)
                await asyncio.wait({self._events, received}, timeout=WAKE_S, return_when=asyncio.FIRST_COMPLETED)
                self._take_events()
                await self._send(subscription)
                if received.done():
                    message = received.result()
                    if message is None:
                        return
                    if isinstance(message, m.JoinRefused):
                        raise Refused(message.reason)
                    if isinstance(message, Roster):
                        self._update(message)
                    received = asyncio.ensure_future(subscription.receive())
                self._act()
        finally:
            received.cancel()

    async def pause(self, seconds: float) -> None:
        """Process the pool's events without a coordinator. Once the run is over, stop workers until all have exited."""
        if not self.reconciler.is_done:
            await asyncio.wait({self._events}, timeout=seconds)
            self._take_events()
            if self.reconciler.roster is not None and self.reconciler.roster.over >= 0:
                self._act()

    async def end(self) -> None:
        """Stop all workers and wait until none is left, except for starts of which the pool never reported anything."""
        until = self._now() + GRACE_S
        for worker in self.reconciler.stop_all(self._now()):
            self._pool.stop(worker)
        while self.reconciler.running and (self.reconciler.started or self._now() < until):
            await asyncio.wait({self._events}, timeout=WAKE_S)
            self._take_events()
        self._events.cancel()

    def _take_events(self) -> None:
        if self._events.done():
            for event in self._events.result():
                self.reconciler.on_event(event, self._now())
            self._events = asyncio.ensure_future(self._pool.events())

    async def _send(self, subscription: Subscription) -> None:
        messages = self.reconciler.take_messages()
        self._resend.extend(message for message in messages if isinstance(message, RESENT_MESSAGES))
        self._unsent.extend(messages)
        while self._unsent:
            await subscription.send(self._unsent[0])
            self._unsent.popleft()

    def _act(self) -> None:
        actions = self.reconciler.take_actions(self._pool.list(), self._now())
        for worker in actions.stop:
            self._pool.stop(worker)
        for worker, host in actions.start:
            self._pool.start(worker, host)

    def _update(self, roster: Roster) -> None:
        self.reconciler.update(roster, self._now())
        if isinstance(self._pool, Provisions):
            self._pool.want(roster.wanted, roster.wrong_hosts)
        if self._on_roster is not None:
            self._on_roster(roster)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
