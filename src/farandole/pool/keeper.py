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

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from farandole.membership import messages as m
from farandole.membership.books import UNFED
from farandole.membership.messages import Roster
from farandole.membership.names import number_of, worker_id
from farandole.pool.base import Advice, Event, Found, Gone, Host, NoCapacity, Notice, Priced, Seen, Started, StartFailed
from farandole.pool.capacity import Told
from farandole.pool.placing import STOOD_S, Placing

GRACE_S = 10.0
QUIET_S, LONGEST_S = 1.0, 60.0
START_S = 600.0
UNFED_EXIT = f"exited with code {UNFED}"
LEAVE_S = 3600  # for whom a host has no slot any more


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`start` new workers, `stop` these."""

    start: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the pool is to do: `stop` these, then `start` these, each on its host."""

    stop: tuple[str, ...] = ()
    start: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class Kept:
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
        self._workers: dict[str, Kept] = {}
        self._called_off: set[str] = set()  # what may yet come of a start that was given up
        self._out: set[str] = set()
        self._placing = Placing()
        self._full = False  # and that was said
        self._over_at = math.inf
        self._lost_at = -math.inf
        self._lost_on = ""  # that host
        self._says: list[m.FromPool] = []
        self._told = Told()

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
            case Found(worker, host):
                self._found(worker, host, now)
            case StartFailed(worker, reason):
                self._start_failed(worker, reason, now)
            case NoCapacity(worker, reason):
                if self._workers.pop(worker, None) and self._placing.short(now):
                    self._says.append(m.NoCapacity(reason=reason))
            case Notice(host, deadline_s, reason):
                sooner = self._placing.noticed(event, now)
                there = [worker for worker, kept in self._workers.items() if kept.host == host]
                workers = tuple(worker for worker in there if sooner or worker not in self._out)
                self._out.update(workers)
                if workers:
                    self._says.append(m.Noticed(workers=workers, host=host, within_s=round(deadline_s), reason=reason))
            case Advice(host, reason):
                if self._placing.advised(event):
                    self._says.append(m.Advised(host=host, reason=reason))
            case Gone(worker, reason):
                self._gone(worker, reason, now)
            case Seen(host, state, reason):
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
            self._workers[worker] = Kept(host=host, asked_at=now, started_at=now)
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
        self._says.append(m.Exited(worker=worker, reason=reason))

    def _is_unfed(self, worker: str, kept: Kept, now: float) -> None:
        if kept.unfed:
            return
        kept.unfed, self._lost_at, self._lost_on = True, now, kept.host  # the others recover
        if rest_s := self._placing.unfed(kept.host, now):
            reason = f"for {rest_s:.0f} s: {worker} could not get the run's data there"
            self._says.append(m.HostSeen(host=kept.host, state="left alone", reason=reason))

    # --- what is due -----------------------------------------------------------------------------------------

    def due(self, hosts: Sequence[Host], now: float) -> Due:
        """Ask from time to time as well: graces and rests end. What it names is taken to be done."""
        if self.roster is None:
            return Due()
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
        return Due(stop=stop, start=() if waits else tuple(self._start(decision.start, hosts, now)))

    def _shrink(self, hosts: Sequence[Host]) -> None:
        """A host that has fewer slots than workers now: the newest of them are to leave, as with notice."""
        for host in hosts:
            there = [w for w, kept in self._workers.items() if kept.host == host.name and w not in self._out]
            if host.slots is not None and len(there) > host.slots:
                beyond = tuple(there[host.slots :])
                self._out.update(beyond)
                reason = f"{host.name} has {host.slots} slots now"
                self._says.append(m.Noticed(workers=beyond, host=host.name, within_s=LEAVE_S, reason=reason))

    def stop_all(self, now: float) -> tuple[str, ...]:
        """Whom the pool is to stop where nothing is to be left."""
        return tuple(self._stopped(self._workers, now))

    def _is_late(self, kept: Kept, now: float) -> bool:
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
            self._workers[worker] = Kept(host=host, asked_at=now)
            load[host] += 1
            started.append((worker, host))
        return started

    def _say_full(self, hosts: Sequence[Host], load: Counter[str]) -> None:
        if self._full or any(host.room(load[host.name]) for host in hosts):
            return
        self._full = True
        slots = sum(host.slots or 0 for host in hosts)
        self._says.append(m.NoCapacity(reason=f"all {slots} slots of its {len(hosts)} hosts are taken"))
