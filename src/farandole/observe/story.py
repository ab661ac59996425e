"""The timeline of a run from its lines: the content of the dashboard and the report.

Call `take` with the complete lines of metrics.jsonl, oldest first, whenever there are new ones. This works alike for a
run that is live, over, killed, resumed or rehearsed. Steps that are repeated, after `resumed` or a lost state, replace
the earlier ones. A line that is damaged, or of a kind unknown to this version, is skipped and counted. A clock that
jumps shifts points on a time axis, but never changes the order, which is that of the lines.

Left out: facts that the coordinator does not write (speeds, stalled workers); `Status` has them.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from farandole.control.status import RATE_STEPS, Status, left_s, samples_per_s
from farandole.observe import export_common
from farandole.observe.live import QUIET
from farandole.observe.summary import Pause, RunReader
from farandole.observe.text import describe, link_figures, not_promised
from farandole.protocol import events
from farandole.protocol.coordinator.account import HOUR_S, Account
from farandole.protocol.metrics import Line, LogLine, StepLine
from farandole.protocol.numeric_facts import DECODER, DEVICE, NUMPY, OPERATION, SETTING, TORCH
from farandole.protocol.values import CLASSES, FAILURES, MEANING

# --- series -----------------------------------------------------------------------------------------------------------
#
# One number of a run by step, reduced for a chart: at most `POINTS` points for a million steps, and no spike is lost.
#
# The values are divided into buckets of `width` neighbours. The chart shows the least and the greatest value of each
# bucket, each at its own step. When there are more than `BUCKETS` buckets, each two are merged, and `width` doubles. So
# the chart has the envelope of all values, whatever their number (min-max decimation). A NaN is skipped; a bucket with
# nothing else is a gap.
#
# A `Patch` updates a chart on a page: it has the first point that changes, and all points from there on. Usually these
# are the new points and the bucket that they fall into. There are more only when the width doubles, which is each
# time that the run has become twice as long, or when steps are repeated from long ago.

BUCKETS = 600
POINTS = 2 * BUCKETS


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """An update of a chart: its points from index `at` on are replaced by these. `y` is None at a gap."""

    at: int
    x: list[int]
    y: list[float | None]


class PageState(msgspec.Struct, kw_only=True):
    """The state of a page's chart: it has `count` values in buckets of `width`, and has applied `cuts`."""

    count: int = 0
    width: int = 1
    cuts: int = 0


class Series:
    """A decimated series. Call `put` in the order of steps; a repeated step replaces its value and all later ones."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")
        self._width = 1
        self._least = array("q")  # for each bucket, the index of its least value
        self._greatest = array("q")
        self._cuts: list[int] = []  # for each call of `cut`, the number of values that remained

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float | None:
        """Returns the newest value; None if there is none or it is NaN."""
        return self._shown(len(self) - 1) if self._values else None

    def put(self, step: int, value: float) -> None:
        if self._steps and step <= self._steps[-1]:
            self.cut(step)
        self._steps.append(step)
        self._values.append(value)
        self._count(len(self) - 1)
        if len(self._least) > BUCKETS:
            self._double()

    def cut(self, step: int) -> None:
        """Drops the values of `step` and later steps."""
        remaining = bisect_left(self._steps, step)
        if remaining == len(self):
            return
        del self._steps[remaining:], self._values[remaining:]
        whole = remaining // self._width
        del self._least[whole:], self._greatest[whole:]
        for index in range(whole * self._width, remaining):
            self._count(index)
        self._cuts.append(remaining)

    def patch(self, page: PageState) -> Patch | None:
        """Returns the points that a chart in the state `page` lacks, None if none, and updates `page`."""
        unchanged = min([page.count, *self._cuts[page.cuts :]])
        if unchanged == len(self) == page.count and page.width == self._width:
            page.cuts = len(self._cuts)
            return None
        bucket = unchanged // self._width if page.width == self._width else 0
        page.count, page.width, page.cuts = len(self), self._width, len(self._cuts)
        x: list[int] = []
        y: list[float | None] = []
        for least, greatest in zip(self._least[bucket:], self._greatest[bucket:], strict=True):
            for index in sorted((least, greatest)):
                x.append(self._steps[index])
                y.append(self._shown(index))
        return Patch(at=2 * bucket, x=x, y=y)

    def _shown(self, index: int) -> float | None:
        value = self._values[index]
        return value if math.isfinite(value) else None

    def _count(self, index: int) -> None:
        """Adds the value at `index`, the newest one, to its bucket."""
        if index % self._width == 0:
            self._least.append(index)
            self._greatest.append(index)
            return
        self._least[-1] = self._extreme(self._least[-1], index, least=True)
        self._greatest[-1] = self._extreme(self._greatest[-1], index, least=False)

    def _extreme(self, one: int, other: int, *, least: bool) -> int:
        """Returns the index of the smaller (not `least`: greater) of two values; the first if they are equal."""
        a, b = self._values[one], self._values[other]
        if not math.isfinite(b):
            return one
        if not math.isfinite(a):
            return other
        return other if (b < a if least else b > a) else one

    def _double(self) -> None:
        self._width *= 2
        for extremes, least in ((self._least, True), (self._greatest, False)):
            pairs = range(0, len(extremes), 2)
            merged = [
                self._extreme(extremes[i], extremes[i + 1], least=least) if i + 1 < len(extremes) else extremes[i]
                for i in pairs
            ]
            del extremes[:]
            extremes.extend(merged)


# --- spans ------------------------------------------------------------------------------------------------------------
#
# The span of each worker: its start, its end, and the reasons, from events alone.
#
# A span is one worker process: it starts, enters the views at some time, and ends. The first event that ends it counts:
# the event that a worker is lost comes before the cause of death of its process. If no event ends a worker, because all
# processes were killed, its span ends with the last line before the next start of the run.

How = Literal["", "left", "lost", "failed", "end"]


class WorkerSpan(msgspec.Struct, kw_only=True):
    """The span of one worker process, in Unix times. `entered`: None if never in a view. `gone`: None if present.

    `how` it ended: it left gracefully, was lost without notice, could not start or was not admitted, or the run ended.
    `notice`: the time of its preemption notice.
    """

    worker: str
    host: str
    came: float
    entered: float | None = None
    cause: str = ""
    notice: float | None = None
    gone: float | None = None
    how: How = ""
    why: str = ""


class WorkerSpans:
    """The spans of all workers of a run. Call `take` with every event, oldest first.

    Attributes:
        all: the spans, in the order of their starts.
        changes: the indices of changed spans, oldest first; it only grows.
        members: the workers of the current view.
        last_gone: the span of the worker that left or was lost last.
    """

    def __init__(self) -> None:
        self.all: list[WorkerSpan] = []
        self.changes: list[int] = []
        self.members: tuple[str, ...] = ()
        self.last_gone: WorkerSpan | None = None
        self._present: dict[str, int] = {}
        self._last = 0.0
        self._complete = False  # True: the lines show which workers were present at this start of the run

    def take(self, event: Line) -> None:
        time = getattr(event, "time", 0.0)
        match event:
            case events.StartingEvent(worker=worker, host=host):
                self._begin(worker, host, time)
            case events.ReadyEvent(worker=worker, host=host) if worker not in self._present:
                self._begin(worker, host, time)
            case events.ViewEvent(members=members):
                self._view(members, event.cause, time)
            case events.NoticeEvent(worker=worker, reason=reason) if worker in self._present:
                stay = self._changed(worker)
                stay.notice, stay.why = time, reason
            case events.LeftEvent(worker=worker, reason=reason):
                self._end(worker, "left", self._notice(worker) or reason, time)
            case events.LostEvent(worker=worker, reason=reason):
                self._end(worker, "lost", reason, time)
            case (
                events.ExitedEvent(worker=worker, reason=reason) | events.StartFailedEvent(worker=worker, reason=reason)
            ):
                self._end(worker, "failed", reason, time)
            case events.RefusedEvent(worker=worker, reason=reason):
                self._end(worker, "failed", reason, time)
            case events.StateLostEvent():
                self.members, self._complete = (), True
            case events.RunStartedEvent():
                self._cut_off(tuple(self._present))
                self._complete = True
            case events.ResumedEvent() if not self._complete:  # lines of a version that wrote no `run started`
                self._cut_off(tuple(name for name, at in self._present.items() if self.all[at].entered is not None))
            case events.OverEvent():
                self._complete = True
                for worker in tuple(self._present):
                    self._end(worker, "end", describe(event), time)
                self.members = ()
            case _:
                pass
        if not isinstance(event, events.StartingEvent):  # a starting event may be written before a later `run started`
            self.at(time)

    def at(self, time: float) -> None:
        """Records that the run was alive at `time`."""
        self._last = time

    def _cut_off(self, workers: tuple[str, ...]) -> None:
        """Ends the spans of workers at a new start of the run, since no event reported their end."""
        for worker in workers:
            self._end(worker, "lost", "its end was not recorded: the run was cut off", self._last)
        self.members = ()

    def _begin(self, worker: str, host: str, time: float) -> None:
        if worker in self._present:  # of an earlier session
            self._end(worker, "lost", "another worker with its name has started", self._last)
        self._present[worker] = len(self.all)
        self.all.append(WorkerSpan(worker=worker, host=host, came=time))
        self.changes.append(len(self.all) - 1)

    def _view(self, members: tuple[str, ...], cause: str, time: float) -> None:
        for worker in members:
            if worker not in self._present:
                self._begin(worker, "", time)
            if self.all[self._present[worker]].entered is None:
                stay = self._changed(worker)
                stay.entered, stay.cause = time, cause
        self.members = members

    def _notice(self, worker: str) -> str:
        return self.all[self._present[worker]].why if worker in self._present else ""

    def _changed(self, worker: str) -> WorkerSpan:
        self.changes.append(self._present[worker])
        return self.all[self._present[worker]]

    def _end(self, worker: str, how: How, why: str, time: float) -> None:
        if worker in self._present:
            stay = self._changed(worker)
            stay.gone, stay.how, stay.why = time, how, why
            if how in ("left", "lost"):
                self.last_gone = stay
            del self._present[worker]


# --- story ------------------------------------------------------------------------------------------------------------

DRAWN = (
    export_common.LOSS,
    export_common.SPEED,
    export_common.LEARNING_RATE,
    export_common.FACTOR,
    export_common.SAMPLES,
    export_common.SECONDS,
    export_common.WORKERS,
)
LOGGED = 24  # names of `run.log` that have a chart, the first ones
EVENTS = 5_000  # the newest events are stored


class Happened:
    """An event as a sentence. `number` counts all events."""

    def __init__(self, number: int, event: events.Event) -> None:
        self.number, self.time, self.kind = number, event.time, events.name_of(event)
        self.words = describe(event)


class Story(RunReader):
    """The timeline of a run. Call `take` with each line.

    Attributes, in addition to those of `RunReader`:
        series: by name, the numbers of steps (`observe/export_common.py`) and the numbers that the script has logged.
        stays: the spans of the workers. sizes: (Unix time, number of workers) for each view.
        happened: the newest events. count: the number of all events.
        unfinite: (step, loss as text) of losses that are not finite.
        last: the newest step's line. recent: the lines from which the throughput and the remaining time are computed.
        over, finished, numerics: the newest events of these names; None if none counts.
        checkpoint: Unix time, step and path of the newest checkpoint. unpromised: the event after which results are
            not reproducible.
        texts: the newest texts that the script has logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[str, Series] = {name: Series() for name in DRAWN}
        self.stays = WorkerSpans()
        self.sizes: list[tuple[float, int]] = []
        self.happened: deque[Happened] = deque(maxlen=EVENTS)
        self.count = 0
        self.unfinite: list[tuple[int, str]] = []
        self.last: StepLine | None = None
        self.over: events.OverEvent | None = None
        self.finished: events.FinishedEvent | None = None
        self.numerics: events.NumericsEvent | None = None
        self.checkpoint: tuple[float, int, str] | None = None
        self.unpromised: events.BitsNotPromisedEvent | None = None
        self.recent: deque[StepLine] = deque(maxlen=RATE_STEPS)
        self.texts: dict[str, str] = {}

    def _on_again(self, ended: float) -> None:
        self.over = self.finished = None
        self.recent.clear()
        self.sizes.append((ended, 0))

    def _step(self, line: StepLine) -> None:
        self.last = line
        self.stays.at(line.time)
        self.over = None
        self.recent.append(line)
        numbers = export_common.of_step(line)
        for name in DRAWN:
            if name in numbers:
                self.series[name].put(line.step, numbers[name])

    def _logged(self, line: LogLine) -> None:
        numbers, texts = export_common.of_log(line)
        self.texts.update(texts)
        for name, value in numbers.items():
            if name not in self.series and len(self.series) - len(DRAWN) < LOGGED:
                self.series[name] = Series()
            if name in self.series:
                self.series[name].put(line.step, value)

    def _event(self, event: events.Event) -> None:
        self.stays.take(event)
        if not isinstance(event, QUIET):
            self.count += 1
            self.happened.append(Happened(self.count, event))
        match event:
            case events.ViewEvent(members=members):
                self.sizes.append((event.time, len(members)))
            case events.ResumedEvent(step=step):
                self.over = self.finished = None
                self._drop_from(max(step, 0))
            case events.StateLostEvent():  # the next steps show where the run continues
                self.recent.clear()
                self.sizes.append((event.time, 0))
            case events.NotFiniteEvent(step=step, loss=loss):
                self.unfinite.append((step, loss))
            case events.NumericsEvent():
                self.numerics = event
            case events.BitsNotPromisedEvent():
                self.unpromised = self.unpromised or event
            case events.CheckpointEvent():
                self.checkpoint = (event.time, event.step, event.path)
            case events.SavedEvent():
                self.checkpoint = (event.time, self.last.step + 1 if self.last else 0, event.path)
            case events.FinishedEvent():
                self.finished = event
            case events.OverEvent():
                self.over = event
                self.sizes.append((event.time, 0))
            case _:
                pass

    def _drop_from(self, step: int) -> None:
        """Drops `step` and later steps: the run continues from the state of `step`."""
        for series in self.series.values():
            series.cut(step)
        self.recent.clear()
        self.unfinite = [each for each in self.unfinite if each[0] < step]


# --- facts ------------------------------------------------------------------------------------------------------------
#
# The head of the page: the state, numbers and cost of the run. Pure.
#
# An unknown value is None or left out, never 0.


class LastDeparture(msgspec.Struct, frozen=True, kw_only=True):
    """The last worker that left: when (Unix time), how and why."""

    worker: str
    host: str
    time: float
    how: str
    why: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The head of the page. `state`: that of `Status`; if the run is over, finished, stopped, failed or cut off.
    `word`: the reason.

    `samples_per_s` and `left_s` (seconds to the end) are computed from the newest `RATE_STEPS` steps. `size`: workers
    in the view; `wanted`: the target. `slow_links`: the hosts of each slow link, and its figures.
    """

    run: str
    live: bool
    state: str
    word: str
    size: int
    wanted: int | None
    step: int | None
    total: int | None
    epoch: int | None
    left_s: float | None
    loss: float | None
    samples_per_s: float | None
    learning_rate: float | None
    factor: float | None
    batch: int | None
    began: float | None
    ended: float | None
    last_gone: LastDeparture | None
    bits: str
    fingerprint: str
    checkpoint: str
    texts: dict[str, str]
    damaged: int
    slow_links: list[tuple[str, str]] = []


class Class(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    meaning: str
    seconds: float


class CostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The account. For comparison, `static_hours` and `static_dollars`: the cost of a fixed number of workers. That is
    `most`, the largest number that the run had, for all of the time that the run was alive, at the run's own price of
    a worker-hour.
    """

    classes: list[Class]
    goodput: float | None
    worker_hours: float | None
    dollars: float | None
    at_least: float | None
    date: str
    most: int
    static_hours: float | None
    static_dollars: float | None
    waiting: dict[str, float]  # by worker, the part of its time in which it waited for data


def head(run: str, story: Story, status: Status | None, *, live: bool) -> Head:
    """Returns the head of a page. `status`: from the coordinator, None without an answer. `live`: the run is alive."""
    last = story.last
    departed = story.stays.last_gone
    learning = {} if last is None else {"learning_rate": last.learning_rate, "factor": last.factor}
    return Head(
        run=run, live=live, **_state(story, status, live=live),
        size=status.view.size if status else len(story.stays.members),
        wanted=status.wanted if status and live else None,
        step=None if last is None else last.step + 1, total=None if last is None else last.total,
        epoch=None if last is None else last.epoch,
        left_s=left_s(last.total, story.recent) if live and last is not None else None,
        loss=None if last is None else last.loss,
        samples_per_s=status.samples_per_s if status else samples_per_s(story.recent),
        learning_rate=learning.get("learning_rate"), factor=learning.get("factor"),
        batch=None if last is None else last.samples, began=story.began, ended=story.ended,
        last_gone=None if departed is None or departed.gone is None else LastDeparture(
            worker=departed.worker, host=departed.host, time=departed.gone, how=departed.how, why=departed.why),
        bits="" if story.unpromised is None else not_promised(story.unpromised.step),
        fingerprint=story.finished.fingerprint if story.finished and story.finished.equal else "",
        checkpoint=story.checkpoint[2] if story.checkpoint else "", texts=dict(story.texts), damaged=story.damaged,
        slow_links=[
            (f"{slow.link.source} to {slow.link.target}", link_figures(slow))
            for slow in (status.slow_links if status and live else ())
        ],
    )  # fmt: skip


def bill(account: Account, story: Story) -> CostSummary:
    most = max((size for _, size in story.sizes), default=0)
    wall_s = None if story.began is None or story.ended is None else story.ended - story.began - story.away_s
    static = None if wall_s is None or not most or wall_s <= 0 else most * wall_s / HOUR_S
    priced = account.dollars is not None and static is not None and account.worker_hours
    seconds = account.seconds or {}
    return CostSummary(
        classes=[Class(name=n, meaning=MEANING[n], seconds=seconds[n]) for n in CLASSES if seconds.get(n)],
        goodput=account.goodput, worker_hours=account.worker_hours, dollars=account.dollars,
        at_least=account.cost.at_least or None, date=account.cost.date, most=most, static_hours=static,
        static_dollars=(account.dollars or 0) / (account.worker_hours or 1) * (static or 0) if priced else None,
        waiting={
            each.worker: round(each.seconds.get("data", 0.0) / each.total_s, 4)
            for each in account.workers if each.total_s and not each.ended
        },
    )  # fmt: skip


def _state(story: Story, status: Status | None, *, live: bool) -> dict[str, str]:
    if status is not None and live and status.state != "over":
        if status.stalled is not None:
            waited_for = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
            return {"state": "stalled", "word": f"for {status.stalled.seconds:.0f} s{waited_for}"}
        return {"state": status.state, "word": status.reason}
    if story.over is not None:
        failed = "failed" if story.over.code in FAILURES else "finished" if story.finished else "stopped"
        return {"state": failed, "word": f"{story.over.reason} (exit code {story.over.code})"}
    if live:
        return {"state": "no answer", "word": "a run continues without its coordinator"}
    return {"state": "cut off", "word": "nothing records its end: its processes were killed"}


# --- about ------------------------------------------------------------------------------------------------------------
#
# Settings, versions, numerics and hosts of a run, as pairs of texts. Pure.
#
# Of the settings of another version, only those known to this version are shown. Unknown values are left out.

About = list[tuple[str, str]]
HOSTS = 12  # named


def about(settings: Mapping[str, Any], story: Story, version: str) -> About:
    """Returns the pairs. `settings`: content of settings.json, may be empty; `version`: version of farandole."""
    facts = story.numerics.facts if story.numerics else {}
    values: dict[str, Any] = {
        "command": shlex.join(map(str, settings.get("command") or ())),
        "in": settings.get("directory"),
        "commit": settings.get("commit"),
        "code": ", ".join(f"{name} {digest}" for name, digest in settings.get("code") or ()),
        "seed": settings.get("seed"),
        "threads": settings.get("threads"),
        "bits": _bits(settings, story),
        "fingerprint": story.finished.fingerprint if story.finished else None,
        "numeric fingerprint": _fingerprint(facts),
        "hardware": facts.get(DEVICE),
        "torch": facts.get(TORCH),
        "NumPy": facts.get(NUMPY),
        "decoders": ", ".join(f"{n.removeprefix(DECODER)} {v}" for n, v in facts.items() if n.startswith(DECODER)),
        "torch's settings": ", ".join(
            f"{n.removeprefix(SETTING)}: {v}" for n, v in facts.items() if n.startswith(SETTING)
        ),
        "hosts": _hosts(story),
        "checkpoint": story.checkpoint[2] if story.checkpoint else None,
        "began": _at(story.began),
        "last line": _at(story.ended),
        "lines passed over": story.damaged or None,
        "told by": f"farandole {version}",
    }
    return [(name, str(value)) for name, value in values.items() if value not in (None, "")]


def _bits(settings: Mapping[str, Any], story: Story) -> str:
    requested = str(settings.get("bits", ""))
    return f"{requested}; {not_promised(story.unpromised.step)}" if story.unpromised else requested


def _fingerprint(facts: Mapping[str, str]) -> str:
    """Returns one digest of all operations; it is equal if each operation is."""
    operations = sorted((name, value) for name, value in facts.items() if name.startswith(OPERATION))
    if not operations:
        return ""
    return f"{hashlib.sha256(repr(operations).encode()).hexdigest()[:16]}, of {len(operations)} operations"


def _hosts(story: Story) -> str:
    names = sorted({stay.host for stay in story.stays.all if stay.host})
    shown = ", ".join(names[:HOSTS]) + (", ..." if len(names) > HOSTS else "")
    return f"{len(names)}: {shown}" if len(names) > 1 else shown


def _at(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


# --- stream -----------------------------------------------------------------------------------------------------------
#
# The stream of updates for a page: the first `Tick` has everything, each later one only the changes. Pure.
#
# One `UpdateStream` serves one open page. It stores the state of the page, so that nothing is sent twice. A field that
# has not changed is None or empty.

EVENTS_AT_ONCE = 500  # most events in one update
Event = tuple[int, float, str, str]  # number, Unix time, kind, words
Row = tuple[str, str, float | None, int, int]  # state, host, speed relative to the fastest, its shards, all shards


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """An update of a page. `now`: Unix time. `stays`: the changed spans by their index. `sizes`: new pairs of Unix time
    and number of workers. `workers`: the changed rows of the present workers; None: the worker is gone.
    """

    now: float
    head: Head | None
    series: dict[str, Patch]
    stays: dict[str, WorkerSpan]
    sizes: list[tuple[float, int]]
    events: list[Event]
    pauses: list[Pause] | None
    unfinite: list[tuple[int, str]] | None
    workers: dict[str, Row | None]
    bill: CostSummary | None


class UpdateStream:
    """The stream of updates of the run `run`, with the timeline `story`, to one page."""

    def __init__(self, run: str, story: Story, events: int = EVENTS_AT_ONCE) -> None:
        self._run, self._story, self._most = run, story, events
        self._pages: dict[str, PageState] = {}
        self._stays = self._sizes = self._events = 0
        self._head: Head | None = None
        self._unfinite: list[tuple[int, str]] = []
        self._workers: dict[str, Row] = {}

    def tick(self, now: float, status: Status | None = None, paid: CostSummary | None = None, *, live: bool) -> Tick:
        """Returns the next update. `paid`: the cost summary if it has changed."""
        story = self._story
        changed = sorted(set(story.stays.changes[self._stays :]))
        self._stays = len(story.stays.changes)
        sizes, self._sizes = story.sizes[self._sizes :], len(story.sizes)
        return Tick(
            now=now,
            head=self._new_head(head(self._run, story, status, live=live)),
            series=self._patches(),
            stays={str(number): story.stays.all[number] for number in changed},
            sizes=sizes,
            events=(events := self._new_events()),
            pauses=story.pauses.result() if events else None,
            unfinite=self._new_unfinite(),
            workers=self._rows(status, live=live),
            bill=paid,
        )

    def _patches(self) -> dict[str, Patch]:
        patches: dict[str, Patch] = {}
        for name, series in self._story.series.items():
            if (patch := series.patch(self._pages.setdefault(name, PageState()))) is not None:
                patches[name] = patch
        return patches

    def _new_head(self, now: Head) -> Head | None:
        if now == self._head:
            return None
        self._head = now
        return now

    def _new_events(self) -> list[Event]:
        new: list[Happened] = []
        for each in reversed(self._story.happened):
            if each.number <= self._events or len(new) == self._most:
                break
            new.append(each)
        self._events = self._story.count
        return [(each.number, each.time, each.kind, each.words) for each in reversed(new)]

    def _new_unfinite(self) -> list[tuple[int, str]] | None:
        if self._story.unfinite == self._unfinite:
            return None
        self._unfinite = list(self._story.unfinite)
        return self._unfinite

    def _rows(self, status: Status | None, *, live: bool) -> dict[str, Row | None]:
        """Returns the changed rows. Without a status they stay as they are while the run is live."""
        if status is None and live:
            return {}
        rows: dict[str, Row] = {
            w.id: (w.state, w.host, None if w.speed is None else round(w.speed, 2), w.shards, w.of)
            for w in (status.workers if status else ())
        }
        changed: dict[str, Row | None] = {id: row for id, row in rows.items() if self._workers.get(id) != row}
        changed |= dict.fromkeys(self._workers.keys() - rows.keys())
        self._workers = rows
        return changed


def first(run: str, story: Story, now: float, *, account: CostSummary, live: bool) -> Tick:
    """Returns one complete update, for a page that gets no further ones."""
    return UpdateStream(run, story, events=len(story.happened)).tick(now, paid=account, live=live)
