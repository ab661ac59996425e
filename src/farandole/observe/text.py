"""An event in plain words, one line of text. Pure.

Each event has its words: where one has none, the type checker says that `_describe` may come to its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farandole.control.status import AccountStatus, Status, left_s
from farandole.platform.output import one_line
from farandole.protocol import events, numeric_facts
from farandole.protocol.coordinator.account import Account
from farandole.protocol.metrics import Line, LogLine, StepLine, time_of

# --- words ------------------------------------------------------------------------------------------------------------

NAMED = 4  # workers
SHOWN = 160  # characters of a reason; all of it is in metrics.jsonl and the journal


def describe(line: events.Event | LogLine) -> str:
    """What happened, without the time; long reasons are shortened.

    Names and reasons come from others: what is not to be seen is not shown.
    """
    return one_line(_logged(line) if isinstance(line, LogLine) else _describe(line))


def _describe(event: events.Event) -> str:
    long = {name: _short(getattr(event, name)) for name in ("cause", "reason") if hasattr(event, name)}
    event = msgspec.structs.replace(event, **long)
    match event:
        case events.ViewEvent(view=view, members=members, cause=cause, step=step):
            outcome = f", that step's exchange: {event.outcome}" if event.outcome else ""
            if not members:
                return f"{cause} -> everyone leaves after step {step}"
            return f"{cause} -> view {view} of {_count(len(members), 'worker')} at step {step}{outcome}"
        case events.SharesEvent(shares=dealt, reason=reason):
            least = sorted(dealt, key=dealt.__getitem__)[:NAMED]
            parts = ", ".join(f"{100 * dealt[worker] / sum(dealt.values()):.0f} % to {worker}" for worker in least)
            return f"{reason}: shards are dealt anew, {parts}{' ...' if len(dealt) > NAMED else ''}"
        case events.ProposedEvent(view=view, members=members, cause=cause):
            return f"{cause}: preparing view {view} of {_count(len(members), 'worker')}"
        case events.StartingEvent(worker=worker, host=host):
            return f"{worker} on {host} is starting"
        case events.ReadyEvent(worker=worker, host=host):
            reach = f", but can't write checkpoints: {_short(event.unreached)}" if event.unreached else ""
            return f"{worker} on {host} is ready{reach}"
        case events.WaitsEvent(worker=worker, host=host):
            return f"{worker} on {host} is there, and waits to be compared with the first of the run's own workers"
        case events.LostEvent(worker=worker, reason=reason):
            return f"{worker} is lost: {reason}"
        case events.UnfedEvent(worker=worker, host=host, reason=reason):
            return f"{worker} on {host} CAN'T GET THE DATA: {reason}"
        case events.DiedEvent(worker=worker, reason=reason):
            return f"{worker} was {reason}" if reason.startswith("killed") else f"{worker} {reason}"
        case events.ExpelledEvent(worker=worker, reason=reason):
            return f"{worker} has to go: {reason}"
        case events.LeftEvent(worker=worker, reason=reason):
            return f"{worker}: {reason}"
        case events.NoticeEvent(worker=worker, reason=reason):
            return f"{worker} has notice: {reason}"
        case events.OtherCodeEvent(worker=worker, what=what):
            return f"{worker} HAS OTHER CODE than the run and is let in, THE BITS MAY DIFFER: {_short(', '.join(what))}"
        case events.NumericsEvent(worker=worker, facts=facts):
            named = [facts[name] for name in (numeric_facts.DEVICE, numeric_facts.TORCH) if name in facts]
            return f"the bits are those of {', '.join(named[:1] + [f'torch {v}' for v in named[1:]])} on {worker}"
        case events.OtherVersionsEvent(worker=worker, what=what):
            return f"{worker} has other libraries and computes the run's bits: {_short('; '.join(what))}"
        case events.UnknownOperatorEvent(operator=operator):
            return f"{operator} IS NOT KNOWN TO BE PORTABLE: other CPUs may compute other bits"
        case events.SettingChangedEvent(worker=worker, step=step, setting=setting, before=before, now=now):
            return f"{setting}: {before} before, {now} from step {step} on, as the script on {worker} has set it"
        case events.BitsNotPromisedEvent(worker=worker, step=step, what=what):
            return f"THE BITS ARE {not_promised(step).upper()}: {worker} is let in, {_short('; '.join(what))}"
        case events.RunStartedEvent(version=version):
            return f"the run starts, with farandole {version}"
        case events.CodeEditedEvent(files=files):
            return f"the code is not what it was when the run was on before: {_short(', '.join(files))}"
        case events.RefusedEvent(worker=worker, reason=reason):
            return f"{worker} is refused: {reason}"
        case events.ExitedEvent(worker=worker, reason=reason):
            return f"{worker} {reason} before it had asked in; see its log"
        case events.StartFailedEvent(worker=worker, host=host, reason=reason):
            return f"{worker} could not be started on {host}: {reason}; it is tried again"
        case events.NoCapacityEvent(pool=pool, reason=reason):
            return f"pool {pool} has no capacity: {reason}; it is asked again"
        case events.HostEvent(pool=pool, host=host, state=state, reason=reason):
            return f"{f'host {host} of pool {pool}' if host else f'pool {pool}'}: {state}{reason and f' ({reason})'}"
        case events.PricedEvent(pool=pool, host=host, dollars=dollars, day=day):
            price = "at a price that is unknown" if dollars is None else f"at {number(dollars)} dollars an hour"
            return f"host {host} of pool {pool} is paid for {price}{day and f' (prices of {day})'}"
        case events.AdviceEvent(pool=pool, host=host, reason=reason):
            return f"{host} of pool {pool} may go: {reason}; another host is asked for"
        case events.MalformedEvent(source=source, reason=reason):
            return f"{source} broke the protocol and was closed: {reason}"
        case events.OutOfReachEvent(workers=workers, reason=reason):
            return f"no contact with {', '.join(workers) or 'anybody'}; {reason}"
        case events.CoordinatorBackEvent(workers=workers):
            return f"the coordinator is back and waits for {_count(len(workers), 'worker')}"
        case events.StrangerEvent(source=source, reason=reason):
            return f"a stranger at {source}: {reason}"
        case events.StrangerInGroupEvent(worker=worker, peer=peer, address=address, again_s=again_s):
            who = "STRANGERS CAME BEFORE ALL OTHERS" if worker == peer else f"A STRANGER CAME IN PLACE OF {peer}"
            return f"{who} to {worker}, at {address}: new connections are made in {number(again_s)} s"
        case events.StrangersEvent(reason=reason, more=more):
            return f"{more} more of: {reason}"
        case events.TimeSpentEvent(workers=workers, ended=ended):
            gone = f", {', '.join(ended)} for good" if ended else ""
            return f"the time of {_count(len(workers), 'worker')} is written down{gone}"
        case events.MetricsDamagedEvent(lines=lines):
            return f"metrics.jsonl is damaged: {_count(lines, 'line')} passed over"
        case events.LinesLostEvent(worker=worker, lines=lines, reason=reason):
            return f"AT LEAST {_count(lines, 'line')} OF METRICS LOST{f' of {worker}' if worker else ''}: {reason}"
        case events.NotToldEvent(reason=reason):
            return f"NOT TOLD: {reason}; its output has the traceback"
        case events.TicketIssuedEvent(ticket=ticket):
            return f"ticket {ticket} is issued"
        case events.TicketRevokedEvent(ticket=ticket):
            return f"ticket {ticket} is revoked"
        case events.TicketsDamagedEvent(reason=reason):
            return f"THE ISSUED TICKETS ARE DAMAGED: {reason}"
        case events.JournalDamagedEvent(reason=reason):
            return f"THE JOURNAL IS DAMAGED: {reason}"
        case events.NotRecordedEvent(reason=reason):
            return f"NOT RECORDED: the run's folder can't be written ({reason}); the training goes on"
        case events.NotShippedEvent(reason=reason):
            return f"the journal can't be written beside the checkpoints ({reason}); another machine could not go on"
        case events.RecordedAgainEvent(missing=missing):
            return f"the run's folder can be written again; its journal lacks {_count(missing, 'event')}"
        case events.LedgerIncompleteEvent(worker=worker, reason=reason):
            return f"THE LEDGER OF {worker} IS INCOMPLETE: {reason}; the training goes on"
        case events.ScaleEvent(wanted=wanted, before=before):
            return f"{_count(wanted, 'worker')} wanted, {before} before"
        case events.NoReplacementsEvent(wanted=wanted, reason=reason):
            return f"{reason}; {_count(wanted, 'worker')} wanted from now on"
        case events.StalledEvent(workers=workers, reason=reason):
            return f"STALLED: {reason}, {_hung(workers)}"
        case events.CutShortEvent(workers=workers, reason=reason):
            return f"the stop no longer waits: {reason}, {_hung(workers)}"
        case events.StoppingEvent(reason=reason):
            return f"stopping: {reason}"
        case events.ComputesWrongEvent(worker=worker, host=host, reason=reason):
            return f"{worker} on {host} COMPUTES WRONG, and leaves; no worker is started on {host} again: {reason}"
        case events.DriftingEvent(workers=workers, step=step, times=times):
            often = f" ({times:,} times so far)" if times > 1 else ""
            return f"the replicas drift apart at step {step}{often}, as --bits any allows: {', '.join(workers)}"
        case events.UndecidedEvent(workers=workers, reason=reason):
            return f"ONE OF {_count(len(workers), 'worker')} COMPUTES WRONG: {reason}"
        case events.ReplicasDifferEvent(reason=reason):
            return f"THE REPLICAS DIFFER: {reason}"
        case events.FailedEvent(worker=worker, traceback=text) if told_by_us(event):
            return f"{worker} can't go on: {_short(text)}"
        case events.FailedEvent(worker=worker, traceback=text):
            return f"the script failed on {worker}: {_last_line(text)}"
        case events.CallsDifferEvent(reason=reason):
            return f"THE SCRIPTS GO DIFFERENT WAYS: {reason}"
        case events.NotFiniteEvent(step=step, loss=loss):
            return f"THE LOSS OF STEP {step} IS {loss.upper()}; of the checkpoints, the newest finite one is kept"
        case events.SavedEvent(path=path, finite=False):
            return f"checkpoint saved, of a state that is NOT FINITE: {path}"
        case events.SavedEvent(path=path, whole=False):
            return f"saved, but as no checkpoint to go on from: {path}"
        case events.SavedEvent(path=path):
            return f"checkpoint saved: {path}"
        case events.SavedElsewhereEvent(host=host, path=path):
            return f"THE LAST CHECKPOINT IS NOT IN THE RUN'S STORE, but on {host}: {path}"
        case events.SaverEvent(worker=worker, before=before, at_once=at_once):
            return (
                f"{worker} writes the checkpoints in place of {before}, {'at once' if at_once else 'when one is due'}"
            )
        case events.NoSaverEvent(reason=reason):
            return f"NO CHECKPOINTS ARE WRITTEN: {reason}"
        case events.NoLeaderEvent(reason=reason):
            return f"the run can't begin: {reason}"
        case events.ShortEvent(worker=worker, reason=reason):
            return f"{worker} can't begin the run: {reason}"
        case events.NotSavedEvent(reason=reason):
            return f"no checkpoint: {reason}"
        case events.CheckpointEvent(step=step, path=path, finite=False):
            return f"checkpoint of step {step}, of a state that is NOT FINITE: {path}"
        case events.CheckpointEvent(step=step, path=path, copy_ms=copy, seconds=seconds):
            return f"checkpoint of step {step}: {path} ({number(copy)} ms of training, {number(seconds)} s behind it)"
        case events.CheckpointFailedEvent(step=step, reason=reason):
            return f"NO CHECKPOINT of step {step}: {reason}; training goes on"
        case events.CheckpointDamagedEvent(reason=reason):
            return f"CHECKPOINT PASSED OVER: {reason}"
        case events.ResumedEvent(path=""):
            return "no checkpoint is whole: training starts at its beginning"
        case events.ResumedEvent(step=step, path=path, differences=differences):
            others = f"; THE BITS MAY DIFFER: {', '.join(differences)}" if differences else ""
            if not event.finite:
                last = event.last_finite or "none"
                others += f"; ITS STATE IS NOT FINITE: the last that is, for --resume and another --folder, is {last}"
            return f"resumed at step {step} from {path}{others}"
        case events.NothingLeftEvent(step=step, path=path):
            return f"nothing is left to train after {step} steps: {path} is at the end of what the script asks for"
        case events.HungEvent(worker=worker, reason=reason):
            return f"{worker} HANGS: {reason}"
        case events.LoaderReplacedEvent(worker=worker, reason=reason):
            return f"{worker}: {reason}; others were started in its place"
        case events.StateLostEvent(reason=reason):
            return f"state lost: {reason}"
        case events.FinishedEvent(equal=equal):
            return "finished: all workers hold the same state" if equal else "finished: THE WORKERS' STATES DIFFER"
        case events.OverEvent(code=code, reason=reason):
            return f"over: {reason} (exit code {code})"


def not_promised(step: int) -> str:
    """Since when: after `step`, -1 for the beginning."""
    return f"not promised after step {step}" if step >= 0 else "not promised from the beginning on"


def told_by_us(failed: events.FailedEvent) -> bool:
    """Whether what a worker failed by is an error of farandole's own, which comes without a traceback."""
    return "Traceback" not in failed.traceback


def clock(line: Line) -> str:
    """The line's local time of day; now for one of `run.log`."""
    return time.strftime("%H:%M:%S", time.localtime(time_of(line) or None))


def number(value: Any) -> str:
    """A metric, short."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _logged(line: LogLine) -> str:
    return f"step {line.step}: {', '.join(f'{name} {number(value)}' for name, value in line.fields.items())}"


def _hung(workers: tuple[str, ...]) -> str:
    if not workers:
        return "and everyone waits for others"
    return f"waiting for {', '.join(workers)}, whose stacks are in logs/{workers[0]}.log{' ...' * (len(workers) > 1)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _short(text: Any) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


# --- gauges -----------------------------------------------------------------------------------------------------------
#
# The lines of figures that `farandole top` and the live display of `farandole run` share: values in, words or
# something that rich prints out. What is not known is not shown.

BAR = 40  # characters


def progress(step: int, total: int | None, epoch: int, steps: Sequence[StepLine]) -> Table:
    """A bar, where the end is known, and how far it is; `steps` are the newest."""
    row = Table.grid(padding=(0, 2))
    left = left_s(total, steps)
    words = f"step {step_words(step, total)}, epoch {epoch}{'' if left is None else f', {in_words(left)} left'}"
    bar = [ProgressBar(total=total, completed=step, width=BAR)] if total else []
    row.add_row(*bar, Text(words))
    return row


def training(last: StepLine | None, loss: float | None, samples_per_s: float | None) -> str:
    """`loss`: where there is no `last` step's line."""
    loss = last.loss if last else loss
    rate = last.learning_rate if last else None
    parts = [
        "" if loss is None else f"loss {number(loss)}",
        "" if rate is None else f"learning rate {number(rate)}{factor_words(last)}",
        "" if last is None else f"batch {last.samples}",
        "" if samples_per_s is None else f"{rate_words(samples_per_s)} samples/s",
    ]
    return "  ".join(part for part in parts if part)


def rate_words(samples_per_s: float) -> str:
    """Whole samples a second, and three digits where that would be less."""
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def factor_words(last: StepLine | None) -> str:
    """The rule's, where it changes something."""
    return f" x {number(last.factor)}" if last and last.factor not in (None, 1.0) else ""


def workers(size: int, wanted: int | None, coming: Sequence[str], going: Sequence[str]) -> str:
    parts = [
        f"{size} of {wanted} workers" if wanted else f"{size} workers",
        f"{_named(coming)} coming" if coming else "",
        f"{_named(going)} going" if going else "",
    ]
    return one_line(", ".join(part for part in parts if part))


def cost(account: Account | AccountStatus | None) -> str:
    if account is None or account.goodput is None or account.worker_hours is None:
        return ""
    dollars = "" if account.dollars is None else f"  {account.dollars:.4g} dollars"
    return f"goodput {100 * account.goodput:.1f} %  {account.worker_hours:.4g} worker-hours{dollars}"


def in_words(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3 h 20 min, 2 d 5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def step_words(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step} of {total}"


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])} and {more} more" if more > 0 else ", ".join(names)


# --- rows -------------------------------------------------------------------------------------------------------------
#
# The progress as a table of plain text: a header, and a row now and then; other lines come between. Pure.

HEADER_ROWS = 25  # after so many it is repeated,
AWAY_LINES, AWAY_ROWS = 50, 5  # or after so many lines of others, which have scrolled it away
TITLES = ("Time", "Step", "Epoch", "Workers", "Speed", "Loss", "LR")
WIDTHS = (8, 9, 5, 7, 8, 10, 10)  # characters, at least


class ProgressRows:
    """`of` a step its row, with a header before it where one is due; tell it of the lines of others, as they pass."""

    def __init__(self) -> None:
        self._widths = [0] * len(TITLES)
        self._rows = self._others = 0  # since the header

    def passed(self, lines: int) -> None:
        self._others += lines

    def of(self, line: StepLine, wanted: int, samples_per_s: float | None) -> list[str]:
        cells = (
            clock(line),
            str(line.step) if line.total is None else f"{line.step}/{line.total}",
            str(line.epoch),
            f"{line.workers}/{wanted}" if wanted else str(line.workers),
            "" if samples_per_s is None else f"{rate_words(samples_per_s)}/s",
            "" if line.loss is None else number(line.loss),
            "" if line.learning_rate is None else number(line.learning_rate),
        )
        longest = 2 * len(str(line.total)) + 1 if line.total else 0
        least = (WIDTHS[0], max(WIDTHS[1], longest), *WIDTHS[2:])
        widths = [max(w) for w in zip(self._widths, least, map(len, cells), strict=True)]
        away = self._others >= AWAY_LINES and self._rows >= AWAY_ROWS
        header = [_aligned(TITLES, widths)] if widths != self._widths or self._rows >= HEADER_ROWS or away else []
        if header:
            self._rows = self._others = 0
        self._widths = widths
        self._rows += 1
        return [*header, f"{_aligned(cells, widths)}{factor_words(line)}".rstrip()]


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


# --- flow -------------------------------------------------------------------------------------------------------------
#
# How much of what a worker prints, or logs by `run.log`, is shown: all, until it is more than anybody reads. Pure.
#
#     as usual    every line, `BURST` at once and `LINES_A_S` for ever; of several workers that print, each has its part
#     a flood     every `SAY_S` the newest `NEWEST` lines, and before them how many are only in the worker's log file,
#                 until so little has come that it is as usual again
#
# What is left out is counted in lines, or, where it came too fast to be read, in bytes. Nothing is kept of it: memory
# is that of `NEWEST` lines.

BURST = 1000.0
LINES_A_S = 400.0
SAY_S = 2.0
NEWEST = 10


class Flow:
    """Of the lines of one `source`, all of which are in the `place`."""

    def __init__(self, source: str, place: str = "its log") -> None:
        self._source, self._place = source, place
        self._level = BURST  # lines that may still be shown
        self._at: float | None = None
        self._since: float | None = None  # the flood's, or when it was last told of
        self._lines = self._bytes = 0  # since then
        self._newest: deque[bytes] = deque(maxlen=NEWEST)

    def take(
        self, lines: Sequence[bytes], now: float, *, part: float = 1.0, passed: int = 0, unread: int = 0
    ) -> tuple[Sequence[bytes], str, Sequence[bytes]]:
        """What is to be shown now: lines, a word of ours ("": none), and lines after it.

        `part`: of what all workers may. Before `lines` came others, which nobody has kept: `passed` lines, and `unread`
        bytes.
        """
        self._level = min(
            BURST * part, self._level + LINES_A_S * part * (now - (now if self._at is None else self._at))
        )
        self._at = now
        shown: Sequence[bytes] = ()
        if self._since is None:
            room = 0 if passed or unread else int(self._level)
            shown, lines = lines[:room], lines[room:]
            self._level -= len(shown)
            if not lines and not passed and not unread:
                return shown, "", ()
            self._since = now
        self._lines += passed + len(lines)
        self._bytes += unread
        if passed or unread:
            self._newest.clear()
        self._newest.extend(lines)
        if now < self._since + SAY_S:
            return shown, "", ()
        usual = self._lines <= LINES_A_S * SAY_S * part and not self._bytes
        word, newest = self._told()
        self._since, self._level = (None if usual else now), 0.0
        return shown, word, newest

    def end(self) -> tuple[str, Sequence[bytes]]:
        """Nothing more will come."""
        return self._told()

    def _told(self) -> tuple[str, Sequence[bytes]]:
        newest, lines, size = tuple(self._newest), self._lines - len(self._newest), self._bytes
        self._newest.clear()
        self._lines = self._bytes = 0
        if not lines and not size:
            return "", newest
        counted = f"{lines:,} line{'' if lines == 1 else 's'}"
        much = f"{size / 1e6:,.0f} MB" if not lines else f"{counted} and {size / 1e6:,.0f} MB" if size else counted
        return f"... {much} of {self._source} are only in {self._place}", newest


# --- presence ---------------------------------------------------------------------------------------------------------
#
# Who trains, who is coming and who is going, as far as events tell it. Pure.
#
# `story/stays.py` has everybody who ever was there; this has who is there now, and forgets the others.


class Presence:
    """`take` every line, oldest first.

    Attributes:
        members: of the view in force.
        known: whether anything has said who they are.
    """

    def __init__(self, status: Status | None = None) -> None:
        """`status`: where somebody looks on from the middle."""
        there = status.workers if status else ()
        ranked = sorted((worker for worker in there if worker.rank is not None), key=lambda worker: worker.rank or 0)
        self.members: tuple[str, ...] = tuple(worker.id for worker in ranked)
        self.known = status is not None
        self._coming = dict.fromkeys(worker.id for worker in there if worker.state in ("starting", "ready"))
        self._going = dict.fromkeys(worker.id for worker in there if worker.state == "leaving")
        self._without: tuple[str, ...] = ()  # members of whom there is none in the view that is proposed

    @property
    def coming(self) -> list[str]:
        return [worker for worker in self._coming if worker not in self.members]

    @property
    def going(self) -> list[str]:
        """Members only: who leaves before it was one is nobody's."""
        return [worker for worker in self.members if worker in self._going or worker in self._without]

    def take(self, line: Line) -> None:
        match line:
            case (
                events.StartingEvent(worker=worker)
                | events.WaitsEvent(worker=worker)
                | events.ReadyEvent(worker=worker)
            ):
                self._coming[worker] = None
            case events.NoticeEvent(worker=worker) | events.ExpelledEvent(worker=worker):
                self._going[worker] = None
            case events.ProposedEvent(members=members):
                self._without = tuple(worker for worker in self.members if worker not in members)
            case events.ViewEvent(members=members):
                self._train(members)
                for worker in members:
                    self._coming.pop(worker, None)
            case (
                events.LostEvent(worker=worker) | events.LeftEvent(worker=worker) | events.ExitedEvent(worker=worker)
                | events.RefusedEvent(worker=worker) | events.StartFailedEvent(worker=worker) |
                events.FailedEvent(worker=worker)
            ):  # fmt: skip
                self._coming.pop(worker, None)
                self._going.pop(worker, None)
            case events.StateLostEvent():
                self._train(())
            case events.OverEvent() | events.RunStartedEvent():
                self._train(())
                self._coming.clear()
                self._going.clear()
            case _:
                pass

    def _train(self, members: tuple[str, ...]) -> None:
        self.members, self._without, self.known = members, (), True
