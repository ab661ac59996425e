"""`farandole trace`: a live run's next steps, as a trace that ui.perfetto.dev opens."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import Live, RunOption, live
from farandole.control.run_folder import held
from farandole.errors import CoordinatorUnreachable, UsageError
from farandole.platform import files
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from farandole.control.client import Api
    from farandole.membership.messages import Spans
    from farandole.membership.spans import Traced
    from farandole.observe.trace import Trace

TRACE = "trace.json"
EVERY_S = 0.2  # a run that ends answers no longer than a second
PATIENCE_S = 15.0  # without an answer of the coordinator, which may be on its way back
LAST_S = 10.0  # for what there is so far, once nobody waits any longer
STANDS_S = 10.0  # between two words about what is waited for
SHOWN = 3  # peers


def trace(
    steps: Annotated[int, typer.Option("--steps", help="How many steps, 1 to 1000.")] = 20,
    run: RunOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the trace.",
            show_default="trace.json in the run's folder",
        ),
    ] = None,
) -> None:
    """Record what each worker of a live run does in its next steps; open the file at ui.perfetto.dev.

    Ctrl-C ends the recording and writes the file.
    """
    from farandole.membership.spans import MOST_STEPS
    from farandole.observe.trace import trace as trace_of

    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps {steps}: a trace is of 1 to {MOST_STEPS} steps")
    watched = live(run)
    output = output or watched.folder / TRACE
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    with watched as api:
        asking = _Asking(watched, steps, api.trace(steps))
        hosts = {worker.id: worker.host for worker in api.status().workers}
    say(f"the next {steps} steps of {', '.join(asking.traced.asked)}; Ctrl-C writes what is there")
    enough = threading.Event()  # and no exception, which may come where it is lost: in what the collector calls
    signal.signal(signal.SIGINT, lambda _number, _frame: enough.set())
    asking.wait(enough)
    if enough.is_set():
        asking.end()
    missing = asking.missing()
    found = trace_of(asking.in_order(), hosts, steps)
    if not found.steps or not found.events:
        raise CoordinatorUnreachable(f"nothing to write: no worker has told of a step ({missing or 'none was taken'})")
    try:
        files.write(output, found.json())
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None
    _describe(found, missing)
    tell(f"trace: {output.resolve()}; open it at https://ui.perfetto.dev, which keeps it in the browser")


class _Asking:
    """A trace of which the answers come one by one. `traced`: how far it was when that was last known."""

    def __init__(self, watched: Live, steps: int, traced: Traced) -> None:
        self._api: Api = watched.api
        self._folder = watched.folder
        self._steps = steps
        self._why = ""  # it has ended early
        self.traced = traced
        self.answers: dict[str, Spans] = {}

    def wait(self, enough: threading.Event) -> None:
        """Until all that are there have answered, or there is nobody any more to do so, or it is `enough`."""
        heard = told = time.monotonic()
        while self.traced.owed and not enough.wait(EVERY_S):
            try:
                if not self._look():
                    return
                heard = time.monotonic()
                if heard - told > STANDS_S:
                    told = heard
                    say(self._word())
            except CoordinatorUnreachable as error:
                if not held(self._folder) or time.monotonic() - heard > PATIENCE_S:
                    self._why = self._gone(error)
                    return

    def end(self) -> None:
        """Nobody waits any longer: what have they so far?"""
        until = time.monotonic() + LAST_S
        try:
            self._api.end_trace()
            while self._look() and self.traced.owed and time.monotonic() < until:
                time.sleep(EVERY_S)
        except CoordinatorUnreachable as error:
            self._why = self._gone(error)

    def _gone(self, error: Exception) -> str:
        return f"out of reach ({error})" if held(self._folder) else "the run is over"

    def in_order(self) -> dict[str, Spans]:
        """What has come, by rank."""
        return {worker: self.answers[worker] for worker in self.traced.asked if worker in self.answers}

    def missing(self) -> str:
        """Who is not in it, and why; "" where all are."""
        accounted = {*self.answers, *self.traced.gone, *self.traced.owed}
        lost = [worker for worker in self.traced.asked if worker not in accounted]
        words = {
            "gone meanwhile": self.traced.gone,
            "has not answered": self.traced.owed,
            "its answer could not be fetched any more": lost,
        }
        there = [f"{', '.join(who)}: {why}" for why, who in words.items() if who]
        return "; ".join([*there, *([self._why] if self._why else [])])

    def _look(self) -> bool:
        """Fetch what is new. False: it is not our trace any more."""
        new = self._api.traced()
        if new.number != self.traced.number:
            self._why = "the coordinator does not know of it any more: another was asked for, or it is a new one"
            return False
        self.traced = new
        for worker in new.answered:
            if worker not in self.answers:
                self.answers[worker] = self._api.spans(worker)
        return True

    def _word(self) -> str:
        """What is waited for."""
        status = self._api.status()
        stalled = f"; no step for {status.stalled.seconds:.0f} s" if status.stalled else ""
        waits = (
            f", it seems for {', '.join(status.stalled.workers)}" if status.stalled and status.stalled.workers else ""
        )
        return f"waiting for {', '.join(self.traced.owed)} (step {status.step}, {status.state}{stalled}{waits})"


def _describe(found: Trace, missing: str) -> None:
    tell(f"steps {found.steps.start} to {found.steps.stop - 1}, {found.length_us / 1e6:.3f} s")
    for worker, waited in found.waited_us.items():
        tell(f"  {worker} waited {_seconds(sum(waited.values()))}{_most(waited)}")
    for worker in found.full:
        say(f"note: {worker} had more to tell than fits; ask for fewer steps")
    if found.lacking:
        say(f"note: {', '.join(found.lacking)}: not all of these steps, or not to their end")
    if missing:
        say(f"note: not in it: {missing}")


def _most(waited: Mapping[str, int]) -> str:
    most = sorted(waited.items(), key=lambda each: -each[1])[:SHOWN]
    return f": {', '.join(f'{_seconds(us)} for {peer}' for peer, us in most)}" if most else ""


def _seconds(us: int) -> str:
    return f"{us / 1e6:.3f} s"
