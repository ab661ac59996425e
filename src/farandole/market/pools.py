"""The pools of a run on a spot market, by the decisions that `farandole run` makes.

A job has two pools: one of spot machines in all zones, one of on-demand machines. One worker runs on each machine.

- `protocol.settings.targets` says how many workers each pool is to have.
- `protocol.coordinator.scaling.surplus` says which workers leave if there are too many.
- `pool.reconciler.PoolReconciler` says what each pool starts, and where. It gets a notice of each machine that the
  market takes back, and reports the pool's capacity.

The market lists its machines: those first that do the most for a dollar, then those of the zone with the most room.
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.market.play import Machines, Moment
from farandole.pool.base import Host, HostPreempted, Started, WorkerExited
from farandole.pool.reconciler import QUIET_S, PoolReconciler
from farandole.protocol import messages as m
from farandole.protocol import settings
from farandole.protocol.coordinator.scaling import surplus

SPOT, RESERVE = "spot-", "reserve-"  # the marks of the pools
NOTICE_S = 120.0
_ON_DEMAND = Host(name="on demand")  # all on-demand machines: there are always more


class PoolsOfRun:
    """The workers of both pools. Call `decide` at the beginning of each interval.

    `most`: the largest number of workers. `reserve`: the size of the pool of on-demand machines, which is the first
    pool then. 0: it is the last one, and its target is an argument of `decide`.
    """

    def __init__(self, most: int, reserve: int = 0) -> None:
        self._most, self._reserve = most, reserve
        self._pools = {mark: _Pool(mark) for mark in ((RESERVE, SPOT) if reserve else (SPOT, RESERVE))}
        self._last: tuple[Sequence[int], Machines, int] | None = None  # what the last decision was about, its result

    def decide(self, now: Moment, on_demand: int = 0) -> Machines:
        """Return the machines of the interval that begins. `on_demand`: the target of the pool that has these."""
        if self._last == (now.available, now.fleet, on_demand):
            return now.fleet  # nothing has changed
        spot, reserve = self._pools[SPOT], self._pools[RESERVE]
        for zone, count in enumerate(now.fleet.spot):
            workers = spot.in_zone(zone)
            for worker in workers[: len(workers) - count]:  # the market takes the oldest back
                spot.lose(worker, now.time_s)
        targets = self._targets(on_demand)
        for mark, pool in self._pools.items():
            pool.ask(targets[mark], now.time_s)
        spot.act(self._hosts(now), now.time_s + QUIET_S)
        reserve.act({_ON_DEMAND: 0}, now.time_s + QUIET_S)
        counts = tuple(len(spot.in_zone(zone)) for zone in range(len(now.available)))
        fleet = Machines(spot=counts, on_demand=len(reserve.workers))
        self._last = now.available, fleet, on_demand
        return fleet

    def _targets(self, on_demand: int) -> dict[str, int]:
        sizes = [(mark, self._reserve if self._reserve and mark == RESERVE else None) for mark in self._pools]
        fixed = {} if self._reserve else {RESERVE: on_demand}
        capacity = {mark: pool.capacity for mark, pool in self._pools.items() if pool.capacity is not None}
        present = {mark: len(pool.workers) for mark, pool in self._pools.items()}
        gather = [mark for mark, pool in self._pools.items() if pool.gathers]
        return settings.targets(self._most - sum(fixed.values()), sizes, fixed, capacity, present, gather)

    def _hosts(self, now: Moment) -> dict[Host, int]:
        """Return the spot machines that there are, best first, with their zones."""
        spot = self._pools[SPOT]
        free = [there - len(spot.in_zone(zone)) for zone, there in enumerate(now.available)]
        best = sorted(range(len(free)), key=lambda zone: (now.types[zone].work_dollars, -free[zone]))
        names = ((f"{zone} {now.time_s} {n}", zone) for zone in best for n in range(free[zone]))
        return {**spot.hosts, **{Host(name=name, slots=1): zone for name, zone in names}}


class _Pool:
    """A pool, and what it has reported.

    Attributes:
        workers: the host of each worker, the oldest first.
        hosts: the zone of each of these hosts.
        capacity: the largest number of workers that it can have; None: not known.
        gathers: its hosts still start.
    """

    def __init__(self, mark: str) -> None:
        self._mark, self._reconciler = mark, PoolReconciler()
        self.workers: dict[str, Host] = {}
        self.hosts: dict[Host, int] = {}
        self.capacity: int | None = None
        self.gathers = False

    def in_zone(self, zone: int) -> list[str]:
        """Return the workers in a zone, the oldest first."""
        return [worker for worker, host in self.workers.items() if self.hosts[host] == zone]

    def lose(self, worker: str, now: float) -> None:
        """The market takes the machine of a worker back."""
        self._reconciler.on_event(HostPreempted(self.workers[worker].name, NOTICE_S, "taken back"), now)
        self._exit(worker, now)

    def ask(self, wanted: int, now: float) -> None:
        """The run wants so many workers. Those that are too many leave."""
        leaving = surplus([*self.workers], wanted)
        self._reconciler.update(m.Roster(mark=self._mark, wanted=wanted, leaving=tuple(leaving)), now)
        for worker in leaving:
            self._exit(worker, now)
        if leaving:
            self._reconciler.update(m.Roster(mark=self._mark, wanted=wanted), now)

    def act(self, hosts: dict[Host, int], now: float) -> None:
        """Start workers on these hosts, best first. Their zones are the values."""
        by_name = {host.name: host for host in hosts}
        actions = self._reconciler.take_actions([*hosts], now)
        assert not actions.stop, f"{actions.stop}: nothing that runs is to be stopped"
        for worker, name in actions.start:
            self._reconciler.on_event(Started(worker, name), now)
            self.workers[worker] = by_name[name]
            self.hosts[by_name[name]] = hosts[by_name[name]]
        for message in self._reconciler.take_messages():
            if isinstance(message, m.Capacity):
                self.capacity, self.gathers = message.workers, message.gathers

    def _exit(self, worker: str, now: float) -> None:
        self._reconciler.on_event(WorkerExited(worker, "exited with code 0"), now)
        host = self.workers.pop(worker)
        if host not in self.workers.values():
            del self.hosts[host]
