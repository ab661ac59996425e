"""Text for people: one line for each event, lines of figures, rows of progress, and limits on worker output. Pure.

Each event has a sentence in `_describe`. If one has none, the type checker reports that `_describe` may end without a
return.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farandole.control.run_folder import COORDINATOR_LOG
from farandole.control.status import AccountStatus, Status, left_s
from farandole.platform.output import one_line
from farandole.protocol import events, numeric_facts
from farandole.protocol.cost import GB, Traffic
from farandole.protocol.link_speed import SlowLink
from farandole.protocol.metrics import Line, LogLine, StepLine

if TYPE_CHECKING:
    from farandole.protocol.coordinator.account import Account

# --- events -----------------------------------------------------------------------------------------------------------

NAMED = 4  # a sentence names at most this many workers
SHOWN = 160  # characters of a reason that are shown; metrics.jsonl and the journal hold all of it


def describe(line: events.Event | LogLine) -> str:
    """Returns the sentence for an event, without the time. Long reasons are shortened.

    Names and reasons come from other processes, so invisible characters are not printed.
    """
    return one_line(_logged(line) if isinstance(line, LogLine) else _describe(line))


def _describe(event: events.Event) -> str:
    long = {name: _short(getattr(event, name)) for name in ("cause", "reason") if hasattr(event, name)}
    event = msgspec.structs.replace(event, **long)
    match event:
        case events.ViewEvent(view=view, members=members, cause=cause, step=step):
            outcome = f", that step's exchange: {event.outcome}" if event.outcome else ""
            if not members:
                return f"{cause} -> all workers leave after step {step}"
            return f"{cause} -> view {view} of {_count(len(members), 'worker')} at step {step}{outcome}"
        case events.SharesEvent(shares=dealt, reason=reason):
            least = sorted(dealt, key=dealt.__getitem__)[:NAMED]
            parts = ", ".join(f"{100 * dealt[worker] / sum(dealt.values()):.0f} % to {worker}" for worker in least)
            return f"{reason}: new shares of micro-batches, {parts}{' ...' if len(dealt) > NAMED else ''}"
        case events.ProposedEvent(view=view, members=members, cause=cause):
            return f"{cause}: preparing view {view} of {_count(len(members), 'worker')}"
        case events.StartingEvent(worker=worker, host=host):
            return f"{worker} on {host} is starting"
        case events.ReadyEvent(worker=worker, host=host):
            reach = f", but can't write checkpoints: {_short(event.unreached)}" if event.unreached else ""
            return f"{worker} on {host} is ready{reach}"
        case events.WaitsEvent(worker=worker, host=host):
            return (
                f"{worker} on {host} is connected, and waits for the admission check against the run's first own worker"
            )
        case events.LostEvent(worker=worker, reason=reason):
            return f"{worker} is lost: {reason}"
        case events.UnfedEvent(worker=worker, host=host, reason=reason):
            return f"{worker} on {host} HAS NO ACCESS TO THE DATA: {reason}"
        case events.DiedEvent(worker=worker, reason=reason):
            return f"{worker} was {reason}" if reason.startswith("killed") else f"{worker} {reason}"
        case events.ExpelledEvent(worker=worker, reason=reason):
            return f"{worker} is removed: {reason}"
        case events.LeftEvent(worker=worker, reason=reason):
            return f"{worker}: {reason}"
        case events.NoticeEvent(worker=worker, reason=reason):
            return f"{worker} is asked to leave: {reason}"
        case events.OtherCodeEvent(worker=worker, what=what):
            return f"{worker} is admitted although ITS CODE DIFFERS, RESULTS MAY DIFFER: {_short(', '.join(what))}"
        case events.NumericsEvent(worker=worker, facts=facts):
            named = [facts[name] for name in (numeric_facts.DEVICE, numeric_facts.TORCH) if name in facts]
            return (
                f"the run's results are those of {', '.join(named[:1] + [f'torch {v}' for v in named[1:]])} on {worker}"
            )
        case events.OtherVersionsEvent(worker=worker, what=what):
            return f"{worker} has other libraries, with bit-identical results: {_short('; '.join(what))}"
        case events.UnknownOperatorEvent(operator=operator):
            return f"{operator} IS NOT KNOWN TO BE PORTABLE: results may differ on other CPUs"
        case events.SettingChangedEvent(worker=worker, step=step, setting=setting, before=before, now=now):
            return f"{setting} changes from {before} to {now} at step {step}: the script on {worker} set it"
        case events.BitsNotPromisedEvent(worker=worker, step=step, what=what):
            return f"RESULTS {not_promised(step).upper()}: admitted {worker} ({_short('; '.join(what))})"
        case events.RunStartedEvent(version=version):
            return f"the run starts, with farandole {version}"
        case events.CodeEditedEvent(files=files):
            return f"the code was edited since the run last ran: {_short(', '.join(files))}"
        case events.RefusedEvent(worker=worker, reason=reason):
            return f"{worker} is refused: {reason}"
        case events.ExitedEvent(worker=worker, reason=reason):
            return f"{worker} {reason} before it asked to join; see its log"
        case events.StartFailedEvent(worker=worker, host=host, reason=reason):
            return f"{worker} could not be started on {host}: {reason}; farandole retries"
        case events.NoCapacityEvent(pool=pool, reason=reason):
            return f"pool {pool} has no capacity: {reason}; farandole retries"
        case events.HostEvent(pool=pool, host=host, state=state, reason=reason):
            return f"{f'host {host} of pool {pool}' if host else f'pool {pool}'}: {state}{reason and f' ({reason})'}"
        case events.PricedEvent(pool=pool, host=host, dollars=dollars, day=day):
            price = "an unknown price" if dollars is None else f"{number(dollars)} dollars an hour"
            return f"host {host} of pool {pool} costs {price}{day and f' (prices of {day})'}"
        case events.AdviceEvent(pool=pool, host=host, reason=reason):
            return f"{host} of pool {pool} has a rebalance recommendation: {reason}; a replacement is requested"
        case events.MalformedEvent(source=source, reason=reason):
            return f"{source} broke the protocol and was closed: {reason}"
        case events.OutOfReachEvent(workers=workers, reason=reason):
            return f"no contact with {', '.join(workers) or 'any worker'}; {reason}"
        case events.CoordinatorBackEvent(workers=workers):
            return f"the coordinator is back and waits for {_count(len(workers), 'worker')}"
        case events.StrangerEvent(source=source, reason=reason):
            return f"unauthenticated connection from {source}: {reason}"
        case events.StrangerInGroupEvent(worker=worker, peer=peer, address=address, again_s=again_s):
            source = "BEFORE ALL PEERS" if worker == peer else f"IN PLACE OF {peer}"
            return f"UNAUTHENTICATED CONNECTION TO {worker} {source}, at {address}: retry in {number(again_s)} s"
        case events.StrangersEvent(reason=reason, more=more):
            return f"{more} more of: {reason}"
        case events.TimeSpentEvent(workers=workers, ended=ended):
            final = f"; final for {', '.join(ended)}" if ended else ""
            return f"recorded the time of {_count(len(workers), 'worker')}{final}"
        case events.MetricsDamagedEvent(lines=lines):
            return f"metrics.jsonl is damaged: {_count(lines, 'line')} skipped"
        case events.LinesLostEvent(worker=worker, lines=lines, reason=reason):
            return f"AT LEAST {_count(lines, 'line')} OF METRICS LOST{f' of {worker}' if worker else ''}: {reason}"
        case events.ValuesDifferEvent(worker=worker, step=step, name=name, value=value, written=written):
            return (
                f"RUN.LOG({name}=...) DIFFERS BETWEEN WORKERS: after step {step} {worker} has {value}, metrics.jsonl "
                f"has {written} of rank 0; step.mean({name}=...) or step.sum({name}=...) gives that of the whole batch"
            )
        case events.NotToldEvent(reason=reason):
            return f"could not publish: {reason} (traceback in {COORDINATOR_LOG})"
        case events.TicketIssuedEvent(ticket=ticket):
            return f"ticket {ticket} is issued"
        case events.TicketRevokedEvent(ticket=ticket):
            return f"ticket {ticket} is revoked"
        case events.TicketsDamagedEvent(reason=reason):
            return f"THE ISSUED TICKETS ARE DAMAGED: {reason}"
        case events.JournalDamagedEvent(reason=reason):
            return f"THE JOURNAL IS DAMAGED: {reason}"
        case events.NotRecordedEvent(reason=reason):
            return f"NOT RECORDED: the run's folder can't be written ({reason}); training continues"
        case events.NotShippedEvent(reason=reason):
            return f"the journal can't be written beside the checkpoints ({reason}); no other machine could take over"
        case events.RecordedAgainEvent(missing=missing):
            return f"the run's folder can be written again; its journal lacks {_count(missing, 'event')}"
        case events.LedgerIncompleteEvent(worker=worker, reason=reason):
            return f"THE LEDGER OF {worker} IS INCOMPLETE: {reason}; training continues"
        case events.ScaleEvent(wanted=wanted, before=before):
            return f"the target is {_count(wanted, 'worker')}, {before} before"
        case events.NoReplacementsEvent(wanted=wanted, reason=reason):
            return f"{reason}; the target is now {_count(wanted, 'worker')}"
        case events.StalledEvent(workers=workers, reason=reason):
            return f"STALLED: {reason}, {_hung(workers)}"
        case events.CutShortEvent(workers=workers, reason=reason):
            return f"the stop no longer waits: {reason}, {_hung(workers)}"
        case events.StoppingEvent(reason=reason):
            return f"stopping: {reason}"
        case events.ComputesWrongEvent(worker=worker, host=host, reason=reason):
            return f"{worker} on {host} COMPUTES WRONG RESULTS; no worker is started on {host} again: {reason}"
        case events.DriftingEvent(workers=workers, step=step, times=times):
            often = f" ({times:,} times so far)" if times > 1 else ""
            return f"the replicas differ at step {step}{often}, as --bits any allows: {', '.join(workers)}"
        case events.UndecidedEvent(workers=workers, reason=reason):
            return f"ONE OF {_count(len(workers), 'worker')} COMPUTES WRONG RESULTS: {reason}"
        case events.ReplicasDifferEvent(reason=reason):
            return f"THE REPLICAS DIFFER: {reason}"
        case events.FailedEvent(worker=worker, traceback=text) if is_own_error(event):
            return f"{worker} can't continue: {_short(text)}"
        case events.FailedEvent(worker=worker, traceback=text):
            return f"the script failed on {worker}: {_last_line(text)}"
        case events.CallsDifferEvent(reason=reason):
            return f"THE SCRIPTS MAKE DIFFERENT CALLS: {reason}"
        case events.NotFiniteEvent(step=step, loss=loss):
            return f"THE LOSS OF STEP {step} IS {loss.upper()}; the newest checkpoint with a finite state is kept"
        case events.SavedEvent(path=path, finite=False):
            return f"checkpoint saved, its state is NOT FINITE: {path}"
        case events.SavedEvent(path=path, whole=False):
            return f"partial state saved, from which no run can resume: {path}"
        case events.SavedEvent(path=path):
            return f"checkpoint saved: {path}"
        case events.SavedElsewhereEvent(host=host, path=path):
            return f"THE LAST CHECKPOINT IS NOT IN THE RUN'S STORE; it is on {host}: {path}"
        case events.SaverEvent(worker=worker, before=before, at_once=at_once):
            return (
                f"{worker} writes the checkpoints instead of {before}, {'now' if at_once else 'from the next one on'}"
            )
        case events.NoSaverEvent(reason=reason):
            return f"NO CHECKPOINTS ARE WRITTEN: {reason}"
        case events.NoLeaderEvent(reason=reason):
            return f"the run can't start: {reason}"
        case events.ShortEvent(worker=worker, reason=reason):
            return f"{worker} can't start the run: {reason}"
        case events.NotSavedEvent(reason=reason):
            return f"no checkpoint saved: {reason}"
        case events.CheckpointEvent(step=step, path=path, finite=False):
            return f"checkpoint of step {step}, its state is NOT FINITE: {path}"
        case events.CheckpointEvent(step=step, path=path, copy_ms=copy, seconds=seconds):
            times = f"{number(copy)} ms of training time, {number(seconds)} s in the background"
            return f"checkpoint of step {step}: {path} ({times})"
        case events.CheckpointFailedEvent(step=step, reason=reason):
            return f"NO CHECKPOINT of step {step}: {reason}; training continues"
        case events.CheckpointDamagedEvent(reason=reason):
            return f"CHECKPOINT SKIPPED: {reason}"
        case events.ResumedEvent(path=""):
            return "no checkpoint is complete: training starts from step 0"
        case events.ResumedEvent(step=step, path=path, differences=differences):
            others = f"; RESULTS MAY DIFFER: {', '.join(differences)}" if differences else ""
            if not event.finite:
                last = event.last_finite or "none"
                others += f"; ITS STATE IS NOT FINITE; the last finite one (use --resume with a new --folder): {last}"
            return f"resumed at step {step} from {path}{others}"
        case events.NothingLeftEvent(step=step, path=path):
            return f"no training is left after {step} steps: {path} is at the end that the script sets"
        case events.HungEvent(worker=worker, reason=reason):
            return f"{worker} HANGS: {reason}"
        case events.LoaderReplacedEvent(worker=worker, reason=reason):
            return f"{worker}: {reason}; a new one was started"
        case events.StateLostEvent(reason=reason):
            return f"state lost: {reason}"
        case events.FinishedEvent(equal=equal):
            return f"all scripts have ended, {'with the same state' if equal else 'WITH DIFFERENT STATES'}"
        case events.OverEvent(code=code, reason=reason):
            return f"over: {reason} (exit code {code})"


def not_promised(step: int) -> str:
    """Returns from which step results are not reproducible: after `step`; -1 means from the start."""
    return f"not reproducible {f'after step {step}' if step >= 0 else 'from the start'}"


def is_own_error(failed: events.FailedEvent) -> bool:
    """Returns True if the worker failed with an error of farandole itself; these come without a traceback."""
    return "Traceback" not in failed.traceback


def time_text(seconds: float) -> str:
    """Returns the local time of day, for seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def number(value: Any) -> str:
    """Returns the value of a metric as text; floats have five significant digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _logged(line: LogLine) -> str:
    return f"step {line.step}: {', '.join(f'{name} {number(value)}' for name, value in line.fields.items())}"


def _hung(workers: tuple[str, ...]) -> str:
    if not workers:
        return "and every worker waits for others"
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
# Lines of figures that `farandole top` and the live display of `farandole run` share. They take values and return
# text or a rich renderable. Unknown values are not shown.

COLUMNS = 80  # of a terminal: tables fit into so many
BAR = 40  # width in characters; less where the words need the room
BAR_STYLE = "cyan"  # not rich's own, which is red: red stands for failures


def progress(step: int, total: int | None, epoch: int, steps: Sequence[StepLine]) -> Table:
    """Returns the progress in words, after a bar if the number of steps is known.

    `step` is the number of steps done; `steps` are the newest ones.
    """
    row = Table.grid(padding=(0, 2))
    if total:
        row.add_column(max_width=BAR)
    row.add_column(no_wrap=True)
    remaining_s = left_s(total, steps)
    remaining = "" if remaining_s is None else f", {in_words(remaining_s)} left"
    words = f"step {step_words(step, total)}, epoch {epoch}{remaining}"
    bar = [ProgressBar(total, step, complete_style=BAR_STYLE, finished_style=BAR_STYLE)] if total else []
    row.add_row(*bar, Text(words))
    return row


def training(last: StepLine | None, loss: float | None, samples_per_s: float | None) -> str:
    """Returns loss, learning rate, batch size and speed. `loss` is used if there is no line of the `last` step."""
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
    """Returns samples per second as a whole number, or with three significant digits below 100."""
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def factor_words(last: StepLine | None) -> str:
    """Returns the factor of the learning-rate rule, or an empty text if it is 1."""
    return f" x {number(last.factor)}" if last and last.factor not in (None, 1.0) else ""


def workers(size: int, wanted: int | None, coming: Sequence[str], going: Sequence[str]) -> str:
    parts = [
        f"{size} of {wanted} workers" if wanted else f"{size} workers",
        f"{_named(coming)} joining" if coming else "",
        f"{_named(going)} leaving" if going else "",
    ]
    return one_line(", ".join(part for part in parts if part))


SHOWN_LOSS = 0.001  # part of the bytes


def cost(account: Account | AccountStatus | None) -> str:
    if account is None or account.goodput is None or account.worker_hours is None:
        return ""
    dollars = "" if account.dollars is None else f"  {account.dollars:.4g} dollars"
    return f"goodput {100 * account.goodput:.1f} %  {account.worker_hours:.4g} worker-hours{dollars}"


def traffic_words(traffic: Traffic) -> str:
    """Returns the bytes between hosts and their cost as text, or why they are unknown; "" if there are none."""
    if traffic.sent_bytes is None:
        least = f": at least {_gb(traffic.at_least_bytes)} between hosts" if traffic.at_least_bytes else ""
        who = f"; that of {', '.join(traffic.unknown)} is unknown" if traffic.unknown else ""
        return f"unknown{least}{who}" if least else "unknown"
    if not traffic.sent_bytes:
        return "0 GB between hosts"
    parts = [f"{_gb(traffic.sent_bytes)} between hosts"]
    if traffic.between_zones_bytes is not None:
        parts.append(f"{_gb(traffic.between_zones_bytes)} of it between zones")
    if traffic.exchange_bytes_per_step is not None:
        parts.append(f"{traffic.exchange_bytes_per_step / 1e6:.4g} MB a step")
    if traffic.state_bytes:
        parts.append(f"{_gb(traffic.state_bytes)} of it the state for joiners")
    paid = f"{traffic.dollars:.4g} dollars" if traffic.dollars is not None else "dollars unknown: give --traffic-price"
    return f"{', '.join(parts)}; {paid}"


def _gb(size: int) -> str:
    return f"{size / GB:.4g} GB"


def slow_link(slow: SlowLink) -> str:
    """Returns the hosts of a slow link and its figures, as text."""
    return f"{slow.link.source} to {slow.link.target}: {link_figures(slow)}"


def link_figures(slow: SlowLink) -> str:
    """Returns the figures of a slow link beside the median of the others, as text."""
    link = slow.link
    rate, others = rate_mb(link.bytes_per_s or 0.0), rate_mb(slow.others_bytes_per_s)
    parts = [f"{rate}, median of the others {others}"]
    if slow.is_lossy or link.resent >= SHOWN_LOSS:
        lost, usual = 100 * link.resent, 100 * slow.others_resent
        parts.append(f"{lost:.2g} % of its bytes sent again, of the others {usual:.2g} %")
    if link.rtt_ms is not None:
        parts.append(f"round trip {link.rtt_ms:.3g} ms")
    parts.append(f"{link.target} waited {100 * link.waited:.0f} % of its time for {link.source}")
    return "; ".join(parts)


def rate_mb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def in_words(seconds: float) -> str:
    """Returns a duration for people: 40 s, 12 min, 3 h 20 min, 2 d 5 h."""
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
# Progress as a plain-text table: a header, and periodic rows. Other lines may come between them. Pure.

HEADER_ROWS = 25  # the header is repeated after this many rows,
AWAY_LINES, AWAY_ROWS = 50, 5  # or after 50 other lines, which scrolled it away, if 5 rows came since the header
TITLES = ("Time", "Steps", "Epoch", "Workers", "Speed", "Loss", "LR")
WIDTHS = (8, 9, 5, 7, 8, 10, 10)  # minimum, in characters


class ProgressRows:
    """`rows` returns the row of a step, after a header if one is due. Call `passed` for other lines that are printed.

    Rows fit into `COLUMNS`: the gaps are narrower if numbers need more room than they usually do.
    Column "Steps" has the number of steps done: in the last row, all of them.
    """

    def __init__(self) -> None:
        self._widths = [0] * len(TITLES)
        self._rows = self._others = 0  # since the header

    def passed(self, lines: int) -> None:
        self._others += lines

    def rows(self, line: StepLine, at: str, wanted: int, samples_per_s: float | None) -> list[str]:
        """Returns the row of step `line` at time `at`, after a header if one is due."""
        cells = (
            at,
            str(line.step + 1) if line.total is None else f"{line.step + 1}/{line.total}",
            str(line.epoch),
            f"{line.workers}/{wanted}" if wanted else str(line.workers),
            "" if samples_per_s is None else f"{rate_words(samples_per_s)}/s",
            "" if line.loss is None else number(line.loss),
            "" if line.learning_rate is None else f"{number(line.learning_rate)}{factor_words(line)}",
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
        return [*header, _aligned(cells, widths).rstrip()]


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= COLUMNS else " "
    return gap.join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


# --- flow -------------------------------------------------------------------------------------------------------------
#
# Limits how much of a worker's output, or of its `run.log` lines, is shown: all, until nobody could read it. Pure.
#
#     normal      every line: bursts of `BURST` lines, `LINES_A_S` lines/s on average, shared by the workers that print
#     flood       every `SAY_S` seconds, the count of lines that are only in the worker's log file, then the newest
#                 `NEWEST` lines; back to normal when the rate is low enough
#
# Omitted output is counted in lines, or in bytes if it came too fast to be read. It is not stored: memory is bounded
# by `NEWEST` lines.

BURST = 1000.0
LINES_A_S = 400.0
SAY_S = 2.0
NEWEST = 10


class Flow:
    """Rate limit for the lines of one `source`; the `place` holds all of them."""

    def __init__(self, source: str, place: str = "its log") -> None:
        self._source, self._place = source, place
        self._level = BURST  # lines that may still be shown
        self._at: float | None = None
        self._since: float | None = None  # start of the flood, or time of its last report
        self._lines = self._bytes = 0  # omitted since `_since`
        self._newest: deque[bytes] = deque(maxlen=NEWEST)

    def take(
        self, lines: Sequence[bytes], now: float, *, part: float = 1.0, passed: int = 0, unread: int = 0
    ) -> tuple[Sequence[bytes], str, Sequence[bytes]]:
        """Returns what to show now: lines, a report of omitted output ("": none), and lines that follow it.

        `part` is this worker's part of the limits. Before `lines`, `passed` lines and `unread` bytes came and were not
        stored.
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
        normal = self._lines <= LINES_A_S * SAY_S * part and not self._bytes
        report, newest = self._report()
        self._since, self._level = (None if normal else now), 0.0
        return shown, report, newest

    def end(self) -> tuple[str, Sequence[bytes]]:
        """Returns the last report and lines; no more output will come."""
        return self._report()

    def _report(self) -> tuple[str, Sequence[bytes]]:
        newest, lines, size = tuple(self._newest), self._lines - len(self._newest), self._bytes
        self._newest.clear()
        self._lines = self._bytes = 0
        if not lines and not size:
            return "", newest
        counted = f"{lines:,} line{'' if lines == 1 else 's'}"
        much = f"{size / 1e6:,.0f} MB" if not lines else f"{counted} and {size / 1e6:,.0f} MB" if size else counted
        return f"... {much} of {self._source} are only in {self._place}", newest


# --- same output ------------------------------------------------------------------------------------------------------
#
# Selects one of the copies of a line that several workers print, since all run the same script. Pure.
#
# A line is shown as often as the worker that has printed it most often. So whoever is first shows it, however far the
# others are behind, and a worker that joins later does not repeat it. Two lines that differ only in the time of day are
# the same line, because loggers write it. If a worker repeats a line that was not shown for `FORGET_S`, the counts
# begin anew: the workers that have printed it most often may have left.

FORGET_S = 30.0
REMEMBERED = 1000  # lines
_TIME_OF_DAY = re.compile(r"\d{1,2}:\d\d(:\d\d)?([.,]\d+)?")


class SameOutput:
    """The lines that workers have printed. Call `is_new` with each line, in order."""

    def __init__(self) -> None:
        self._printed: dict[str, _Printed] = {}  # the line that was shown least recently is first

    def is_new(self, worker: str, text: str, now: float) -> bool:
        """Returns True if the line is to be shown: no other worker has printed it as often. `now` is in seconds."""
        key = _TIME_OF_DAY.sub("", text)
        printed = self._printed.get(key) or _Printed({})
        if worker in printed.counts and now > printed.shown_at + FORGET_S:
            printed = _Printed({})
        most = max(printed.counts.values(), default=0)
        count = printed.counts[worker] = printed.counts.get(worker, 0) + 1
        if count > most:
            printed.shown_at = now
            self._printed.pop(key, None)
            self._printed[key] = printed
            if len(self._printed) > REMEMBERED:
                del self._printed[next(iter(self._printed))]
        return count > most


@dataclass
class _Printed:
    counts: dict[str, int]  # how often each worker has printed it
    shown_at: float = 0.0


# --- presence ---------------------------------------------------------------------------------------------------------
#
# The workers that train, join or leave now, from events. Pure.
#
# `observe/story.py` holds all workers that ever took part; this holds only the present ones.


class Presence:
    """The workers that are present. Call `take` with every line, oldest first.

    Attributes:
        members: members of the current view.
        known: True once a status or an event has named the members.
    """

    def __init__(self, status: Status | None = None) -> None:
        """`status` is the initial state if the lines start in the middle of a run."""
        current = status.workers if status else ()
        ranked = sorted((worker for worker in current if worker.rank is not None), key=lambda worker: worker.rank or 0)
        self.members: tuple[str, ...] = tuple(worker.id for worker in ranked)
        self.is_known = status is not None
        self._coming = dict.fromkeys(worker.id for worker in current if worker.state in ("starting", "ready"))
        self._going = dict.fromkeys(worker.id for worker in current if worker.state == "leaving")
        self._without: tuple[str, ...] = ()  # members that are not in the proposed view

    @property
    def coming(self) -> list[str]:
        return [worker for worker in self._coming if worker not in self.members]

    @property
    def going(self) -> list[str]:
        """The members that leave. Workers that leave before they became members are not counted."""
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
        self.members, self._without, self.is_known = members, (), True
