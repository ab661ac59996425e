"""The account of a run: how the time of all its workers divides into classes, from the lines of metrics.jsonl alone.

Pure: whole lines in, a value out. Of the steps' lines it reads only the newest before a loss. The result is the same
for a run that is on, over, killed, resumed or rehearsed, and covers what its lines cover. Invariant: the classes of a
worker add up to its time, and the workers' times to that of the run. Workers without a line are named, and their
unknown time is in no sum.
Argument: docs/protocol.md, Account 1-4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from farandole.protocol import events
from farandole.protocol.coordinator.accounting import EARLY_S
from farandole.protocol.cost import Cost, HostPrice, HostUse, Prices, cost
from farandole.protocol.events import WorkerTime
from farandole.protocol.metrics import StepLine, parse_line
from farandole.protocol.values import CLASSES, TimeClass

HOUR_S = 3600.0
_EVENT = b'{"event":'  # how such a line begins
_LATE_S = 60.0  # that a line may be late


class WorkerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's. `seconds` by class, those that are not 0; they add up to `total_s`. `ended`: it is gone."""

    worker: str
    host: str
    pool: str
    seconds: dict[TimeClass, float]
    total_s: float
    ended: bool


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run. What is not known is None, never 0.

    `seconds` of all workers by class, every class; they add up to `total_s`. `goodput`: the part of it that computed
    what counts. `dollars` is None where the price of some host is unknown, see `cost`. `as_of`: Unix time of the newest
    line; `over`: the run has ended. `silent`: workers of which nothing is known. `damaged` lines were passed over, and
    `doubtful` sums.
    """

    run: str
    over: bool
    as_of: float | None
    seconds: dict[TimeClass, float] | None
    total_s: float | None
    goodput: float | None
    worker_hours: float | None
    dollars: float | None
    cost: Cost
    workers: tuple[WorkerAccount, ...]
    silent: tuple[str, ...]
    damaged: int
    doubtful: int


def account(run: str, lines: Iterable[bytes], prices: Prices | None = None) -> Account:
    """`lines` are the whole lines of metrics.jsonl, oldest first; what `prices` says goes where no pool has said it."""
    reading = AccountReader()
    for line in lines:
        reading.take(line)
    return reading.account(run, prices or Prices())


@dataclass(kw_only=True)
class _Process:
    """What has been read of one. `redo`: steps up to this one were taken before it came, -1: none."""

    worker: str
    host: str = ""
    pool: str = ""
    came: float | None = None
    redo: int = -1
    step: int = -1
    told: Mapping[TimeClass, float] = field(default_factory=dict[TimeClass, float])
    again_s: float = 0.0  # of `compute`
    began: float = 0.0  # Unix time
    told_at: float = 0.0
    gone_at: float | None = None
    left: bool = False
    ended: bool = False

    def account(self) -> WorkerAccount:
        seconds = dict(self.told)
        if self.again_s:
            seconds["compute"] = seconds.get("compute", 0.0) - self.again_s
            seconds["again"] = seconds.get("again", 0.0) + self.again_s
        if self.gone_at is not None and not self.ended:
            rest: TimeClass = "end" if self.left else "lost"
            seconds[rest] = seconds.get(rest, 0.0) + max(0.0, self.gone_at - self.told_at)
        spent: dict[TimeClass, float] = {name: round(seconds[name], 6) for name in CLASSES if seconds.get(name)}
        return WorkerAccount(
            worker=self.worker, host=self.host, pool=self.pool, seconds=spent, total_s=sum(spent.values()),
            ended=self.ended or self.gone_at is not None,
        )  # fmt: skip


class AccountReader:
    """The lines so far: `take` each whole one, oldest first, and ask for the `account` at any time."""

    def __init__(self) -> None:
        self._all: list[_Process] = []
        self._newest: dict[str, _Process] = {}
        self._step_line = b""
        self._redo = -1  # steps up to this one have been taken
        self._from = 0  # the step with which the state began
        self._as_of: float | None = None
        self._over = False
        self._priced: dict[str, events.PricedEvent] = {}
        self._gone_at: dict[str, float] = {}  # hosts, of those
        self._damaged = self._doubtful = 0

    def take(self, line: bytes) -> None:
        if not line.startswith(_EVENT):
            self._step_line = line
            return
        event = parse_line(line)
        if not isinstance(event, events.Event):
            self._damaged += event is None
            return
        self._as_of = event.time
        match event:
            case events.StartingEvent(worker=worker, host=host):
                self._over = False
                self._begin(worker, host=host, came=event.time)
            case events.TimeSpentEvent(workers=workers, ended=ended):
                for worker, spent in workers.items():
                    self._spent(worker, spent, event.time, ended=worker in ended)
            case events.LostEvent(worker=worker) | events.LeftEvent(worker=worker) if worker in self._newest:
                self._newest[worker].gone_at = event.time
                self._newest[worker].left = isinstance(event, events.LeftEvent)
            case events.PricedEvent():
                self._priced[event.host] = event
            case events.HostEvent(host=host, state="gone") if host in self._priced:
                self._gone_at[host] = event.time
            case events.StateLostEvent():
                self._again(0)
            case events.RunStartedEvent():
                for process in self._newest.values():
                    process.ended = True  # after its newest line nothing says what its time went to
                self._over = False
                self._again(0)
            case events.ResumedEvent(step=step):
                self._over = False
                self._again(max(step, 0))
            case events.OverEvent():  # instances end with the run
                self._over = True
                self._gone_at = {**dict.fromkeys(self._priced, event.time), **self._gone_at}
            case _:
                pass

    def _begin(self, worker: str, host: str = "", came: float | None = None) -> _Process:
        new = _Process(worker=worker, host=host, came=came, redo=self._redo)
        self._all.append(new)
        self._newest[worker] = new
        return new

    def _spent(self, worker: str, spent: WorkerTime, time: float, *, ended: bool) -> None:
        known = self._newest.get(worker)
        if known is None or known.ended or any(spent.seconds.get(n, 0.0) < s for n, s in known.told.items()):
            known = self._begin(worker)
        total_s = sum(spent.seconds.values())
        if known.came is not None and total_s > time - known.came + EARLY_S + _LATE_S:
            self._doubtful += 1
            return
        if not known.told:
            known.began = time - total_s
        computed_s = spent.seconds.get("compute", 0.0) - known.told.get("compute", 0.0)
        known.again_s += computed_s * self._part(known, spent.step)
        known.host, known.pool, known.step = spent.host, spent.pool, max(known.step, spent.step)
        known.told, known.told_at, known.ended = spent.seconds, time, ended

    def _part(self, known: _Process, step: int) -> float:
        """Of the steps that it has taken since its line before, how many had been taken."""
        before = known.step if known.step >= 0 else self._from
        if step <= known.redo or before >= known.redo:
            return float(step <= known.redo)
        return (known.redo - before) / (step - before)

    def _again(self, step: int) -> None:
        """From now on the state is that of `step`."""
        newest = parse_line(self._step_line) if self._step_line else None
        if isinstance(newest, StepLine):
            self._redo = max(self._redo, newest.step)
        self._step_line, self._from = b"", step
        for process in self._newest.values():
            if process.gone_at is None and not process.ended:
                process.redo = self._redo

    def _told(self, priced: events.PricedEvent) -> HostPrice:
        """Of a host that is not gone yet, as far as the lines go."""
        ends = self._gone_at.get(priced.host, self._as_of or priced.since)
        return HostPrice(
            host=priced.host, pool=priced.pool, dollars=priced.dollars, day=priced.day, began=priced.since, ends=ends
        )

    def account(self, run: str, prices: Prices) -> Account:
        known = [(process, process.account()) for process in self._all if process.told]
        stays = [HostUse(host=p.host, pool=p.pool, began=p.began, seconds=a.total_s) for p, a in known]
        paid = cost(stays, prices, map(self._told, self._priced.values()))
        seconds: dict[TimeClass, float] | None = None
        total_s = goodput = None
        if known:
            seconds = {n: round(sum(each.seconds.get(n, 0.0) for _, each in known), 6) for n in CLASSES}
            total_s = sum(seconds.values())
            goodput = seconds["compute"] / total_s if total_s else None
        return Account(
            run=run, over=self._over, as_of=self._as_of, seconds=seconds, total_s=total_s, goodput=goodput,
            worker_hours=None if total_s is None else total_s / HOUR_S, dollars=paid.dollars, cost=paid,
            workers=tuple(each for _, each in known),
            silent=tuple(process.worker for process in self._all if not process.told),
            damaged=self._damaged, doubtful=self._doubtful,
        )  # fmt: skip
