"""What a pool is told to do: a pure function of its roster, its events and the time, in seconds.

Invariant: `wanted` workers of the pool are there, or asked for, that are neither on their way out nor evicted, as far
as the pool has room; an id is never used twice.

A worker on its way out is replaced before it is gone, so that the view never runs short, and so is one whose host has
notice, or advice; it is given `GRACE_S` to exit once the coordinator has let it go, and once the run is over. One that
is lost is replaced after `QUIET_S`, so that the others' recovery has the cores to itself, and at once if there are
none, or its host is gone. Where losses have brought the run nowhere, as the roster says, each further one doubles the
wait, up to `LONGEST_S`. One that is evicted is lost from then on, and again when it has exited: its peers may see its
end before its pool does, and what it died of, and whether that counts, is known only later.

A start that fails is no worker that was lost: the coordinator hears that it failed, and counts nobody. So it is with a
start of which nothing is heard for `START_S`: it is called off; a worker that comes of it after all is stopped. Which
host is asked, and when again, is in `placing`. Nor is one that was lost whose host could not get it the data, as the
roster says, or the exit code where that comes first: its host is left alone, and another one is asked.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import Counter, deque
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
# On which host of a pool the next worker is started; pure, times are the caller's, in seconds.
#
# - The first of the pool's hosts that has room, has no notice or advice, and is at rest from no trouble.
# - A start that failed is trouble of its host, and so is a worker that ended, unasked, before it had stood for
#   `STOOD_S`. The host is then left alone, twice as long each time up to `LONGEST_S`, until a worker has stood there
#   for so long.
# - After ends of workers alone a host is used nevertheless where no other one is left: what is wrong may be the script,
#   and when that is tried again is for the whole run to say (`keeper.pause`).
# - A host that could not get a worker its data (a full disk, a store out of reach) is left alone too, twice as long
#   each time up to `LONGEST_S`, even if it is the only one; from its end on it is tried again. Others may stand there
#   meanwhile, with what they have, and prove nothing: only `LONGEST_S` of peace after a rest have it begin anew.
# - A pool without capacity is asked again after a while, twice as long each time, whichever host it was asked for.
# - A host on which a worker computed wrong is not asked again.
# - Notice counts until the host has gone, or has stayed for `OVERDUE_S` beyond its deadline; advice until it has gone.

STOOD_S = 60.0
FIRST_REST_S, LONGEST_REST_S = 1.0, 600.0  # of rest
OVERDUE_S = 30.0
SAME_S = 1.0  # between two deadlines that are the same one, told twice


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`count` times in a row, to be left alone until `until`. `start`: the newest was a start that failed."""

    count: int = 0
    until: float = 0.0
    start: bool = False

    def again(self, now: float, *, start: bool) -> Trouble:
        rest_s = min(FIRST_REST_S * 2.0**self.count, LONGEST_REST_S)
        return replace(self, count=self.count + 1, until=now + rest_s, start=start)


class Placing:
    """What is known of a pool's hosts."""

    def __init__(self) -> None:
        self._troubles: dict[str, Trouble] = {}
        self._unfed: dict[str, Trouble] = {}
        self._capacity = Trouble()
        self._noticed: dict[str, float] = {}  # until when that counts
        self._advised: set[str] = set()
        self._wrong: Collection[str] = ()

    def host(self, hosts: Sequence[Host], workers: Mapping[str, int], now: float) -> str | None:
        """Where to start one, None for nowhere now. `workers`: how many there are on each host."""
        if self.is_short(now):
            return None
        open_ = [host for host in hosts if host.room(workers.get(host.name, 0)) and host.name not in self._wrong]
        room = [host.name for host in open_ if not self.goes(host.name, now) and not self.is_unfed(host.name, now)]
        rested = [name for name in room if self._trouble(name).until <= now]
        tried = [name for name in room if not self._trouble(name).start]
        return next(iter(rested or tried), None)

    def capacity(self, hosts: Sequence[Host], workers: Mapping[str, int], now: float) -> int | None:
        """How many workers there can be, `workers` of them there; None: no limit is known."""
        if self.is_short(now):
            return sum(workers.values())
        open_ = [host for host in hosts if host.name not in self._wrong and not self.goes(host.name, now)]
        slots = [workers.get(host.name, 0) if self.is_unfed(host.name, now) else host.slots for host in open_]
        return None if None in slots else sum(slot or 0 for slot in slots)

    def goes(self, host: str, now: float) -> bool:
        """Whether it will go, or may."""
        return host in self._advised or self._noticed.get(host, now) > now

    def computed_wrong(self, hosts: Collection[str]) -> None:
        """All such, as the run knows them."""
        self._wrong = hosts

    def noticed(self, notice: HostPreempted, now: float) -> bool:
        """Whether it goes sooner than was known."""
        until = now + notice.deadline_s + OVERDUE_S
        known = self._noticed.get(notice.host, now)
        self._noticed[notice.host] = until
        return known <= now or until < known - SAME_S

    def advised(self, advice: HostRebalance) -> bool:
        """Whether that is new."""
        new = advice.host not in self._advised
        self._advised.add(advice.host)
        return new

    def failed(self, host: str, now: float, *, start: bool) -> None:
        """A start there has failed, or a worker has ended too soon."""
        self._troubles[host] = self._trouble(host).again(now, start=start)

    def unfed(self, host: str, now: float) -> float:
        """A worker there could not get its data. How long the host is left alone, in s; 0: it is so already."""
        known = self._unfed.get(host, Trouble())
        if now < known.until:
            return 0.0
        known = known if now - known.until < LONGEST_REST_S else Trouble()
        self._unfed[host] = again = known.again(now, start=True)
        return again.until - now

    def is_unfed(self, host: str, now: float) -> bool:
        """It is left alone for that."""
        return now < self._unfed.get(host, Trouble()).until

    def is_short(self, now: float) -> bool:
        """It had no capacity, and is not to be asked yet."""
        return now < self._capacity.until

    def short(self, now: float) -> bool:
        """The pool has no capacity. Whether that is new."""
        new = not self._capacity.count
        self._capacity = self._capacity.again(now, start=True)
        return new

    def started(self) -> None:
        """The pool has capacity."""
        self._capacity = Trouble()

    def stood(self, host: str) -> None:
        """A worker there has stood."""
        self._troubles.pop(host, None)

    def there(self, hosts: Sequence[Host]) -> None:
        """What was said of a host goes with it; who comes under that name is another one."""
        names = {host.name for host in hosts}
        self._noticed = {name: until for name, until in self._noticed.items() if name in names}
        self._advised &= names

    def _trouble(self, host: str) -> Trouble:
        return self._troubles.get(host, Trouble())


# --- keeper -----------------------------------------------------------------------------------------------------------

GRACE_S = 10.0
QUIET_S, LONGEST_S = 1.0, 60.0
START_S = 600.0
UNFED_EXIT = f"exited with code {EXIT_DATA_UNAVAILABLE}"
LEAVE_S = 3600  # for whom a host has no slot any more


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`start` new workers, `stop` these."""

    start: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolActions:
    """What the pool is to do: `stop` these, then `start` these, each on its host."""

    stop: tuple[str, ...] = ()
    start: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class WorkerRecord:
    """A worker that was asked for. Times are infinite for what has not happened."""

    host: str
    asked_at: float
    started_at: float = math.inf
    stopped_at: float = math.inf  # last
    let_go_at: float = math.inf
    unfed: bool = False  # and that counts


def decide(roster: Roster, running: Collection[str], out: Collection[str] = ()) -> Decision:
    """What a pool does about a roster. `out`: who was in earlier rosters' `leaving`, or is on a host that goes."""
    stop = tuple(worker for worker in running if worker in roster.evicted)
    if roster.over >= 0:  # those who are only starting have nothing to end, and would find nobody to tell them
        heard = {*roster.present, *roster.released}
        return Decision(stop=tuple(worker for worker in running if worker in stop or worker not in heard))
    staying = [w for w in running if w not in roster.leaving and w not in roster.evicted and w not in out]
    return Decision(start=max(roster.wanted - len(staying), 0), stop=stop)


def pause(losses: int, *, others: bool) -> float:
    """How long after a loss a replacement is started, in s. `losses` in a row were in vain; `others` are running,
    who recover first: a replacement's start-up may take their cores. Not so where the host is gone.
    """
    if losses == 0:
        return QUIET_S if others else 0.0
    return min(QUIET_S * 2.0 ** (losses - 1), LONGEST_S)


class Keeper:
    """Feed it, then do what is `due`, and send what it has `said`. `count` workers were started earlier."""

    def __init__(self, count: int = 0) -> None:
        self.roster: Roster | None = None
        self._count = count
        self._workers: dict[str, WorkerRecord] = {}
        self._called_off: set[str] = set()  # what may yet come of a start that was given up
        self._out: set[str] = set()
        self._placing = Placing()
        self._full = False  # and that was said
        self._over_at = math.inf
        self._lost_at = -math.inf
        self._lost_on = ""  # that host
        self._says: list[m.FromPool] = []
        self._told = ReportedCapacity()

    @property
    def running(self) -> list[str]:
        """Who is there, or was asked for."""
        return list(self._workers)

    @property
    def started(self) -> list[str]:
        """Who is there."""
        return [worker for worker, kept in self._workers.items() if kept.started_at < math.inf]

    @property
    def done(self) -> bool:
        """The run is over and nobody is there."""
        return self.roster is not None and self.roster.over >= 0 and not self._workers

    def said(self) -> list[m.FromPool]:
        """What the coordinator is to hear, each once."""
        says, self._says = self._says, []
        return says

    # --- what comes in ---------------------------------------------------------------------------------------

    def update(self, roster: Roster, now: float) -> None:
        known = self.roster.evicted if self.roster else ()
        for worker in set(roster.evicted).difference(known).intersection(self._workers):
            self._lost_at, self._lost_on = now, self._workers[worker].host
        self.roster = roster
        self._placing.computed_wrong(roster.wrong_hosts)
        for worker in sorted(set(roster.unfed).intersection(self._workers)):
            self._is_unfed(worker, self._workers[worker], now)
        self._out.update(roster.leaving, roster.released)
        for worker in set(roster.released).intersection(self._workers):
            kept = self._workers[worker]
            kept.let_go_at = min(kept.let_go_at, now)
        if roster.over >= 0:
            self._over_at = min(self._over_at, now)

    def heard(self, event: Event, now: float) -> None:
        """Of the pool. Whatever is told twice, or of a worker that nobody asked for, counts once, or not at all."""
        match event:
            case Started(worker, host):
                self._started(worker, host, now)
            case RunningWorker(worker, host):
                self._found(worker, host, now)
            case WorkerStartFailed(worker, reason):
                self._start_failed(worker, reason, now)
            case NothingToGive(worker, reason):
                if self._workers.pop(worker, None) and self._placing.short(now):
                    self._says.append(m.NoCapacity(reason=reason))
            case HostPreempted(host, deadline_s, reason):
                sooner = self._placing.noticed(event, now)
                there = [worker for worker, kept in self._workers.items() if kept.host == host]
                workers = tuple(worker for worker in there if sooner or worker not in self._out)
                self._out.update(workers)
                if workers:
                    self._says.append(
                        m.PreemptionNotice(workers=workers, host=host, within_s=round(deadline_s), reason=reason)
                    )
            case HostRebalance(host, reason):
                if self._placing.advised(event):
                    self._says.append(m.RebalanceAdvice(host=host, reason=reason))
            case WorkerExited(worker, reason):
                self._gone(worker, reason, now)
            case HostState(host, state, reason):
                self._says.append(m.HostSeen(host=host, state=state, reason=reason))
            case Priced(host, dollars, since, day):
                self._says.append(m.HostPriced(host=host, dollars=dollars, since=since, day=day))

    def _started(self, worker: str, host: str, now: float) -> None:
        self._placing.started()
        if kept := self._workers.get(worker):
            if host != kept.host:  # what it was asked of has given what was asked for
                self._placing.stood(kept.host)
            kept.host, kept.started_at = host, min(kept.started_at, now)
        else:
            self._called_off.add(worker)

    def _found(self, worker: str, host: str, now: float) -> None:
        """It is one of ours: who comes next has a number beyond its."""
        if worker not in self._workers:
            self._workers[worker] = WorkerRecord(host=host, asked_at=now, started_at=now)
            self._count = max(self._count, number_of(worker))

    def _start_failed(self, worker: str, reason: str, now: float) -> None:
        kept = self._workers.pop(worker, None)
        if kept is None:
            return
        if kept.stopped_at == math.inf:
            self._placing.failed(kept.host, now, start=True)
            self._says.append(m.StartFailed(worker=worker, host=kept.host, reason=reason))

    def _gone(self, worker: str, reason: str, now: float) -> None:
        kept = self._workers.pop(worker, None)
        if kept is None:
            self._called_off.discard(worker)
            return
        self._lost_at, self._lost_on = now, kept.host
        asked_to = kept.stopped_at < math.inf or worker in self._out
        if reason == UNFED_EXIT:
            self._is_unfed(worker, kept, now)
        if not asked_to and not kept.unfed and now - kept.started_at < STOOD_S:
            self._placing.failed(kept.host, now, start=False)
        self._says.append(m.WorkerProcessExited(worker=worker, reason=reason))

    def _is_unfed(self, worker: str, kept: WorkerRecord, now: float) -> None:
        if kept.unfed:
            return
        kept.unfed, self._lost_at, self._lost_on = True, now, kept.host  # the others recover
        if rest_s := self._placing.unfed(kept.host, now):
            reason = f"for {rest_s:.0f} s: {worker} could not get the run's data there"
            self._says.append(m.HostSeen(host=kept.host, state="left alone", reason=reason))

    # --- what is due -----------------------------------------------------------------------------------------

    def due(self, hosts: Sequence[Host], now: float) -> PoolActions:
        """Ask from time to time as well: graces and rests end. What it names is taken to be done."""
        if self.roster is None:
            return PoolActions()
        self._placing.there(hosts)
        self._shrink(hosts)
        load = Counter(kept.host for kept in self._workers.values())
        can = self._placing.capacity(hosts, load, now)
        if self._told.news(can, now, short=self._placing.is_short(now)):
            self._says.append(m.Capacity(workers=can, gathers=self._told.gathers))
        given_up = self._give_up(now)
        for kept in self._workers.values():
            if now - kept.started_at >= STOOD_S:
                self._placing.stood(kept.host)
        goes = {worker for worker, kept in self._workers.items() if self._placing.goes(kept.host, now)}
        decision = decide(self.roster, self._workers, self._out | goes)
        late = [worker for worker, kept in self._workers.items() if self._is_late(kept, now)]
        stop = (*given_up, *self._stopped((*decision.stop, *late), now))
        others = bool(self._workers) and any(host.name == self._lost_on for host in hosts)
        waits = now - self._lost_at < pause(self.roster.losses, others=others)
        return PoolActions(stop=stop, start=() if waits else tuple(self._start(decision.start, hosts, now)))

    def _shrink(self, hosts: Sequence[Host]) -> None:
        """A host that has fewer slots than workers now: the newest of them are to leave, as with notice."""
        for host in hosts:
            there = [w for w, kept in self._workers.items() if kept.host == host.name and w not in self._out]
            if host.slots is not None and len(there) > host.slots:
                beyond = tuple(there[host.slots :])
                self._out.update(beyond)
                reason = f"{host.name} has {host.slots} slots now"
                self._says.append(m.PreemptionNotice(workers=beyond, host=host.name, within_s=LEAVE_S, reason=reason))

    def stop_all(self, now: float) -> tuple[str, ...]:
        """Whom the pool is to stop where nothing is to be left."""
        return tuple(self._stopped(self._workers, now))

    def _is_late(self, kept: WorkerRecord, now: float) -> bool:
        return now - min(kept.let_go_at, self._over_at) > GRACE_S

    def _stopped(self, workers: Collection[str], now: float) -> list[str]:
        """Those of `workers` who were not told, or some time ago."""
        told = [w for w in dict.fromkeys(workers) if not 0 <= now - self._workers[w].stopped_at <= GRACE_S]
        for worker in told:
            self._workers[worker].stopped_at = now
        return told

    def _give_up(self, now: float) -> list[str]:
        """Starts of which nothing was heard for too long, or once they were stopped; and what came of such ones."""
        silent = [
            (worker, kept)
            for worker, kept in self._workers.items()
            if kept.started_at == math.inf and (now - kept.asked_at > START_S or now - kept.stopped_at > GRACE_S)
        ]
        for worker, kept in silent:
            self._start_failed(worker, f"nothing was heard of it for {now - kept.asked_at:.0f} s", now)
        called_off, self._called_off = self._called_off, set()
        return [*(worker for worker, _ in silent), *sorted(called_off)]

    def _start(self, number: int, hosts: Sequence[Host], now: float) -> list[tuple[str, str]]:
        assert self.roster is not None
        started: list[tuple[str, str]] = []
        load = Counter(kept.host for kept in self._workers.values())
        for _ in range(number):
            host = self._placing.host(hosts, load, now)
            if host is None:
                self._say_full(hosts, load)
                break
            self._full = False
            self._count += 1
            worker = worker_id(self.roster.mark, self._count)
            self._workers[worker] = WorkerRecord(host=host, asked_at=now)
            load[host] += 1
            started.append((worker, host))
        return started

    def _say_full(self, hosts: Sequence[Host], load: Counter[str]) -> None:
        if self._full or any(host.room(load[host.name]) for host in hosts):
            return
        self._full = True
        slots = sum(host.slots or 0 for host in hosts)
        self._says.append(m.NoCapacity(reason=f"all {slots} slots of its {len(hosts)} hosts are taken"))


# --- service ----------------------------------------------------------------------------------------------------------
#
# A pool serves a run: the keeper decides, the pool does it, and the coordinator is told, over one connection after the
# other.

WAKE_S = 1.0  # graces are looked at this often
AGAIN_S = 0.2  # between two tries to reach a coordinator that has gone
KEPT = 1000  # messages
WITH_IT = "its `farandole run` was killed"
AGAIN = (
    m.WorkerProcessExited,
    m.PreemptionNotice,
    m.Capacity,
    m.HostPriced,
)  # is told again to a coordinator that is back


async def keep(
    pool: Pool, ticket: Ticket, seen: Callable[[Roster], None] | None = None, count: int = 0, ended: Iterable[str] = ()
) -> Roster:
    """Serve the run with this pool until it is over and all of its processes have exited. Returns the last roster.

    A coordinator that goes is waited for, for as long as this is not cancelled: its workers train on meanwhile. It is
    told all exits again when it is back. `seen` is called with every roster, for whoever shows it.
    `count` workers were started when the run was on before, of which these have `ended` with an earlier process.

    Raises:
        CoordinatorUnreachable: the coordinator was never there.
        Refused: another pool of the run has the same name.
    """
    hello = Hello(kind="pool", host=socket.gethostname(), pid=os.getpid(), pool=pool.name)
    service = _Service(
        pool, Keeper(count), seen, [m.WorkerProcessExited(worker=worker, reason=WITH_IT) for worker in ended]
    )
    try:
        while not service.keeper.done:
            try:
                async with subscribe(ticket, hello) as subscription:
                    await service.follow(subscription)
            except CoordinatorUnreachable:
                if service.keeper.roster is None:
                    raise
            await service.pause(AGAIN_S)
        assert service.keeper.roster is not None
        return service.keeper.roster
    finally:
        await service.end()


class _Service:
    """A keeper between its pool and one connection after the other."""

    def __init__(
        self, pool: Pool, keeper: Keeper, seen: Callable[[Roster], None] | None, ended: Sequence[m.WorkerProcessExited]
    ) -> None:
        self.keeper = keeper
        self._pool = pool
        self._seen = seen
        self._again: deque[m.FromPool] = deque(ended, maxlen=KEPT)  # was told, or is to be
        self._untold: deque[m.FromPool] = deque(maxlen=KEPT)
        self._events = asyncio.ensure_future(pool.events())

    async def follow(self, subscription: Subscription) -> None:
        """Until the connection ends or the work is done."""
        for message in tuple(self._again):
            await subscription.send(message)
        received = asyncio.ensure_future(subscription.receive())
        try:
            while not self.keeper.done:
                await self._tell(subscription)
                await asyncio.wait({self._events, received}, timeout=WAKE_S, return_when=asyncio.FIRST_COMPLETED)
                self._hear()
                await self._tell(subscription)
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
        """Without a coordinator: the pool is heard. Once the run is over, until all have exited."""
        if not self.keeper.done:
            await asyncio.wait({self._events}, timeout=seconds)
            self._hear()
            if self.keeper.roster is not None and self.keeper.roster.over >= 0:
                self._act()

    async def end(self) -> None:
        """Nothing of the pool's is left when this returns; but for starts of which the pool has never said anything."""
        until = self._now() + GRACE_S
        for worker in self.keeper.stop_all(self._now()):
            self._pool.stop(worker)
        while self.keeper.running and (self.keeper.started or self._now() < until):
            await asyncio.wait({self._events}, timeout=WAKE_S)
            self._hear()
        self._events.cancel()

    def _hear(self) -> None:
        if self._events.done():
            for event in self._events.result():
                self.keeper.heard(event, self._now())
            self._events = asyncio.ensure_future(self._pool.events())

    async def _tell(self, subscription: Subscription) -> None:
        said = self.keeper.said()
        self._again.extend(message for message in said if isinstance(message, AGAIN))
        self._untold.extend(said)
        while self._untold:
            await subscription.send(self._untold[0])
            self._untold.popleft()

    def _act(self) -> None:
        due = self.keeper.due(self._pool.list(), self._now())
        for worker in due.stop:
            self._pool.stop(worker)
        for worker, host in due.start:
            self._pool.start(worker, host)

    def _update(self, roster: Roster) -> None:
        self.keeper.update(roster, self._now())
        if self._seen is not None:
            self._seen(roster)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
