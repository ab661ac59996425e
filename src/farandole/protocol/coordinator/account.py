"""The account of a run: how the time of all its workers divides into classes, from the lines of metrics.jsonl alone.

Pure: whole lines in, a value out. Of the steps' lines it reads only the newest before a loss. The result is the same
for a run that is on, over, killed, resumed or rehearsed, and covers what its lines cover. Invariant: the classes of a
worker add up to its time, and the workers' times to that of the run. Workers without a line are named, and their
unknown time is in no sum.
A process is known by its `StartingEvent`; one whose sums have shrunk is another of the same name. If the coordinator
was killed before it wrote the final line of a worker, the time from the newest line to its loss or departure is `lost`,
or `end` if it left. The second computation of a step, after the state was lost or the run was started once more, is
`again`: of the steps between two lines of a worker in proportion, since a line names its step and not the time of each.
That concerns only workers that came after, since those that held the state are gone.
A worker's newest line holds everything, so a missing one costs only what follows. Impossible sums are ignored and
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from farandole.protocol import events
from farandole.protocol.coordinator.accounting import EARLY_S
from farandole.protocol.cost import Cost, HostPrice, HostUse, Prices, Traffic, WorkerTraffic, cost, traffic
from farandole.protocol.events import SentBytes, WorkerTime
from farandole.protocol.metrics import StepLine, parse_line
from farandole.protocol.values import CLASSES, TimeClass

HOUR_S = 3600.0
_EVENT = b'{"event":'  # the beginning of an event's line
_STEP = b'{"step":'
_LATE_S = 60.0  # how late a line may be


class WorkerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one worker.

    `seconds` by class, without those that are 0; they add up to `total_s`. `ended` means that the worker is gone.
    """

    worker: str
    host: str
    pool: str
    seconds: dict[TimeClass, float]
    total_s: float
    ended: bool


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The account of a run. Unknown values are None, never 0.

    Attributes:
        over: the run has ended.
        as_of: the Unix time of the newest line.
        seconds: of all workers, for every class; they add up to `total_s`.
        goodput: the part of `total_s` that computed results that count.
        dollars: the total cost, None if the price of a host is unknown (see `cost`).
        traffic: the bytes between hosts and between zones, and their cost, which is not in `dollars`.
        silent: workers of which no times are known.
        damaged: the number of damaged lines, which were skipped.
        doubtful: the number of impossible sums, which were skipped.
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
    traffic: Traffic
    workers: tuple[WorkerAccount, ...]
    silent: tuple[str, ...]
    damaged: int
    doubtful: int


def account(run: str, lines: Iterable[bytes], prices: Prices | None = None) -> Account:
    """Return the account of a run from the whole lines of metrics.jsonl, oldest first.

    `prices` are used for hosts whose pool has not reported a price.
    """
    reading = AccountReader()
    for line in lines:
        reading.take(line)
    return reading.account(run, prices or Prices())


@dataclass(kw_only=True)
class _Process:
    """The times of one process, as far as the lines contain them.

    `redo` is the newest step that was taken before the process came, -1 for none. `came`, `began`, `newest_at` and
    `gone_at` are Unix times.
    """

    worker: str
    host: str = ""
    zone: str = ""
    pool: str = ""
    came: float | None = None
    redo: int = -1
    step: int = -1
    spent: Mapping[TimeClass, float] = field(default_factory=dict[TimeClass, float])
    sent: Mapping[str, SentBytes] | None = None
    again_s: float = 0.0  # the part of `compute` for steps that were taken before
    began: float = 0.0
    newest_at: float = 0.0  # the time of its newest line
    gone_at: float | None = None
    left: bool = False
    ended: bool = False

    def account(self) -> WorkerAccount:
        """Return the account of this process; all its time is in one of the classes."""
        seconds = dict(self.spent)
        if self.again_s:
            seconds["compute"] = seconds.get("compute", 0.0) - self.again_s
            seconds["again"] = seconds.get("again", 0.0) + self.again_s
        if self.gone_at is not None and not self.ended:
            rest: TimeClass = "end" if self.left else "lost"
            seconds[rest] = seconds.get(rest, 0.0) + max(0.0, self.gone_at - self.newest_at)
        spent: dict[TimeClass, float] = {name: round(seconds[name], 6) for name in CLASSES if seconds.get(name)}
        return WorkerAccount(
            worker=self.worker, host=self.host, pool=self.pool, seconds=spent, total_s=sum(spent.values()),
            ended=self.ended or self.gone_at is not None,
        )  # fmt: skip


class AccountReader:
    """Computes an account from lines: `take` each whole line, oldest first, and call `account` at any time."""

    def __init__(self) -> None:
        self._all: list[_Process] = []
        self._newest: dict[str, _Process] = {}
        self._step_line = b""
        self._redo = -1  # the newest step that has been taken
        self._from = 0  # the step that the present state began with
        self._as_of: float | None = None
        self._over = False
        self._priced: dict[str, events.PricedEvent] = {}
        self._gone_at: dict[str, float] = {}  # when the hosts in `_priced` went
        self._steps = 0
        self._accounted_steps = 0  # when the newest times were written
        self._damaged = self._doubtful = 0

    def take(self, line: bytes) -> None:
        """Read one line. A damaged line is counted and skipped."""
        if not line.startswith(_EVENT):
            self._step_line = line
            self._steps += line.startswith(_STEP)
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
                self._accounted_steps = self._steps
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
                    process.ended = True  # no line says how it spent the time after its newest line
                self._over = False
                self._again(0)
            case events.ResumedEvent(step=step):
                self._over = False
                self._again(max(step, 0))
            case events.OverEvent():  # the run's instances end with the run
                self._over = True
                self._gone_at = {**dict.fromkeys(self._priced, event.time), **self._gone_at}
            case _:
                pass

    def _begin(self, worker: str, host: str = "", came: float | None = None) -> _Process:
        """Start the record of a new process of that name."""
        new = _Process(worker=worker, host=host, came=came, redo=self._redo)
        self._all.append(new)
        self._newest[worker] = new
        return new

    def _spent(self, worker: str, spent: WorkerTime, time: float, *, ended: bool) -> None:
        """Record the times of a worker."""
        process = self._newest.get(worker)
        if process is None or process.ended or any(spent.seconds.get(n, 0.0) < s for n, s in process.spent.items()):
            process = self._begin(worker)
        total_s = sum(spent.seconds.values())
        if process.came is not None and total_s > time - process.came + EARLY_S + _LATE_S:
            self._doubtful += 1
            return
        if not process.spent:
            process.began = time - total_s
        computed_s = spent.seconds.get("compute", 0.0) - process.spent.get("compute", 0.0)
        process.again_s += computed_s * self._part(process, spent.step)
        process.host, process.pool, process.step = spent.host, spent.pool, max(process.step, spent.step)
        process.spent, process.newest_at, process.ended = spent.seconds, time, ended
        process.sent, process.zone = spent.sent, spent.zone

    def _part(self, process: _Process, step: int) -> float:
        """Return the fraction of the steps since its previous line that had been taken before."""
        before = process.step if process.step >= 0 else self._from
        if step <= process.redo or before >= process.redo:
            return float(step <= process.redo)
        return (process.redo - before) / (step - before)

    def _again(self, step: int) -> None:
        """Continue from the state of `step`: later steps may be taken again."""
        newest = parse_line(self._step_line) if self._step_line else None
        if isinstance(newest, StepLine):
            self._redo = max(self._redo, newest.step)
        self._step_line, self._from = b"", step
        for process in self._newest.values():
            if process.gone_at is None and not process.ended:
                process.redo = self._redo

    def _host_price(self, priced: events.PricedEvent) -> HostPrice:
        """Return the price of a host. For a host that is still up, it ends with the newest line."""
        ends = self._gone_at.get(priced.host, self._as_of or priced.since)
        return HostPrice(
            host=priced.host, pool=priced.pool, dollars=priced.dollars, day=priced.day, began=priced.since, ends=ends
        )

    def account(self, run: str, prices: Prices) -> Account:
        """Return the account of the run up to the newest line."""
        accounts = [(process, process.account()) for process in self._all if process.spent]
        uses = [HostUse(host=p.host, pool=p.pool, began=p.began, seconds=a.total_s) for p, a in accounts]
        paid = cost(uses, prices, map(self._host_price, self._priced.values()))
        sent = [WorkerTraffic(worker=p.worker, host=p.host, zone=p.zone, sent=_sums(p.sent)) for p, _ in accounts]
        seconds: dict[TimeClass, float] | None = None
        total_s = goodput = None
        if accounts:
            seconds = {n: round(sum(each.seconds.get(n, 0.0) for _, each in accounts), 6) for n in CLASSES}
            total_s = sum(seconds.values())
            goodput = seconds["compute"] / total_s if total_s else None
        return Account(
            run=run, over=self._over, as_of=self._as_of, seconds=seconds, total_s=total_s, goodput=goodput,
            worker_hours=None if total_s is None else total_s / HOUR_S, dollars=paid.dollars, cost=paid,
            traffic=traffic(sent, self._accounted_steps, prices.traffic_price),
            workers=tuple(each for _, each in accounts),
            silent=tuple(process.worker for process in self._all if not process.spent),
            damaged=self._damaged, doubtful=self._doubtful,
        )  # fmt: skip


def _sums(sent: Mapping[str, SentBytes] | None) -> dict[str, tuple[int, int]] | None:
    return None if sent is None else {host: (each.exchange, each.state) for host, each in sent.items()}
