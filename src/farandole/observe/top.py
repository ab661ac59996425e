"""The pictures of `farandole top`: a run as it stands, and several in a line each. Values in, something that rich
prints out; what is not known is not shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farandole.control.status import Status
from farandole.membership.metrics import StepLine
from farandole.observe.account import Account
from farandole.observe.display import Display
from farandole.observe.table import workers_table
from farandole.observe.words import not_promised, number
from farandole.platform.plain import one_line

EVENTS = 12  # shown
BAR = 40  # characters


class Recent(Display):
    """The newest of what a run has said."""

    def __init__(self) -> None:
        super().__init__()
        self.events: deque[str] = deque(maxlen=EVENTS)

    @property
    def steps(self) -> Sequence[StepLine]:
        return tuple(self._steps)

    def _put(self, text: str) -> None:
        self.events.append(text)

    def progress(self, line: StepLine) -> None:
        del line

    def close(self) -> None:
        return


def picture(status: Status, recent: Recent, account: Account | None, word: str = "") -> Group:
    """One run. `word`: what is to be said of the picture itself."""
    head = Table.grid(padding=(0, 2))
    head.add_row(_text(status.run, "bold"), _text(_state(status)), _text(_view(status)))
    parts: list[Text | Table] = [head, _progress(status, recent.steps)]
    parts += [Text(line) for line in (_training(status, recent.steps), _cost(account)) if line]
    if word:
        parts.append(_text(word, "bold"))
    if status.workers:
        parts += [Text(), workers_table(status)]
    if recent.events:
        parts += [Text(), *(Text(one_line(event), no_wrap=True, overflow="ellipsis") for event in recent.events)]
    return Group(*parts)


def list_picture(runs: Mapping[str, Status | None]) -> Table:
    """Several runs, by the names of their folders; None: it does not answer just now."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "step", "epoch", "workers", "samples/s", "loss"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right")
    for name, status in runs.items():
        if status is None:
            table.add_row(_text(name), "no answer")
            continue
        rate = "" if status.samples_per_s is None else f"{status.samples_per_s:.0f}"
        loss = "" if status.loss is None else number(status.loss)
        workers = f"{status.view.size} of {status.wanted}"
        table.add_row(_text(name), _text(_state(status)), _step(status), str(status.epoch), workers, rate, loss)
    return table


def left_s(status: Status, steps: Sequence[StepLine]) -> float | None:
    """Seconds to the end, at the pace of these steps; None where nothing says it."""
    if status.total is None or len(steps) < 2:
        return None
    return (steps[-1].time - steps[0].time) / (len(steps) - 1) * max(0, status.total - steps[-1].step - 1)


def in_words(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3 h 20 min, 2 d 5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def _state(status: Status) -> str:
    if status.stalled is not None:
        who = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
        return f"stalled for {status.stalled.seconds:.0f} s{who}"
    return f"{status.state}: {status.reason}" if status.reason else status.state


def _view(status: Status) -> str:
    coming = sum(worker.state in ("starting", "ready") for worker in status.workers)
    going = sum(worker.state == "leaving" for worker in status.workers)
    parts = [
        f"{status.view.size} of {status.wanted} workers",
        f"{coming} coming" if coming else "",
        f"{going} going" if going else "",
        "" if status.unpromised is None else f"bits {not_promised(status.unpromised)}",
    ]
    return ", ".join(part for part in parts if part)


def _progress(status: Status, steps: Sequence[StepLine]) -> Table:
    row = Table.grid(padding=(0, 2))
    left = left_s(status, steps)
    words = f"step {_step(status)}, epoch {status.epoch}{'' if left is None else f', {in_words(left)} left'}"
    bar = [ProgressBar(total=status.total, completed=status.step, width=BAR)] if status.total else []
    row.add_row(*bar, Text(words))
    return row


def _step(status: Status) -> str:
    return str(status.step) if status.total is None else f"{status.step} of {status.total}"


def _training(status: Status, steps: Sequence[StepLine]) -> str:
    last = steps[-1] if steps else None
    loss = last.loss if last else status.loss
    rate = last.learning_rate if last else None
    factor = f" x {number(last.factor)}" if last and last.factor not in (None, 1.0) else ""
    parts = [
        "" if loss is None else f"loss {number(loss)}",
        "" if rate is None else f"learning rate {number(rate)}{factor}",
        "" if last is None else f"batch {last.samples}",
        "" if status.samples_per_s is None else f"{status.samples_per_s:.0f} samples/s",
    ]
    return "  ".join(part for part in parts if part)


def _cost(account: Account | None) -> str:
    if account is None or account.goodput is None or account.worker_hours is None:
        return ""
    dollars = "dollars unknown" if account.dollars is None else f"{account.dollars:.4g} dollars"
    return f"goodput {100 * account.goodput:.1f} %  {account.worker_hours:.4g} worker-hours  {dollars}"


def _text(value: str, style: str = "") -> Text:
    """Shown as it is, whoever has said it."""
    return Text(one_line(value), style=style)
