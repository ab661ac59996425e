"""The pictures of `farandole top`: a run as it stands, and several in a line each. Values in, something that rich
prints out; what is not known is not shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from farandole.control.status import Status
from farandole.membership.metrics import StepLine
from farandole.observe import gauges
from farandole.observe.display import Display
from farandole.observe.table import workers_table
from farandole.observe.words import not_promised, number
from farandole.platform.output import one_line

EVENTS = 12  # shown


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


def picture(status: Status, recent: Recent, word: str = "") -> Group:
    """One run. `word`: what is to be said of the picture itself."""
    head = Table.grid(padding=(0, 2))
    head.add_row(_text(status.run, "bold"), _text(_state(status)), _text(_view(status)))
    parts: list[Text | Table] = [head, gauges.progress(status.step, status.total, status.epoch, recent.steps)]
    last = recent.steps[-1] if recent.steps else None
    lines = gauges.training(last, status.loss, status.samples_per_s), gauges.cost(status.account)
    parts += [Text(line) for line in lines if line]
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
        rate = "" if status.samples_per_s is None else gauges.rate_words(status.samples_per_s)
        loss = "" if status.loss is None else number(status.loss)
        workers = f"{status.view.size} of {status.wanted}"
        table.add_row(
            _text(name),
            _text(_state(status)),
            gauges.step_words(status.step, status.total),
            str(status.epoch),
            workers,
            rate,
            loss,
        )
    return table


def _state(status: Status) -> str:
    if status.stalled is not None:
        who = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
        return f"stalled for {status.stalled.seconds:.0f} s{who}"
    return f"{status.state}: {status.reason}" if status.reason else status.state


def _view(status: Status) -> str:
    coming = [worker.id for worker in status.workers if worker.state in ("starting", "ready")]
    going = [worker.id for worker in status.workers if worker.state == "leaving"]
    parts = [
        gauges.workers(status.view.size, status.wanted, coming, going),
        "" if status.unpromised is None else f"bits {not_promised(status.unpromised)}",
    ]
    return ", ".join(part for part in parts if part)


def _text(value: str, style: str = "") -> Text:
    """Shown as it is, whoever has said it."""
    return Text(one_line(value), style=style)
