"""Commands that show a run: `farandole status`, `top`, `account`, `report`, `dashboard` and `trace`."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import RUNS, Live, RunOption, live, past_of, place_of
from farandole.control.run_folder import METRICS, is_locked
from farandole.control.status import Status
from farandole.errors import CoordinatorUnreachable, FarandoleError, UsageError
from farandole.observe.past import Past, departures
from farandole.platform import files
from farandole.platform.output import escaped, say, tell
from farandole.platform.process import up_to
from farandole.run_options import RUN_OPTIONS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from farandole.control.api import Api
    from farandole.control.status import Status
    from farandole.control.ticket import Ticket
    from farandole.observe.dashboard import DashboardServer
    from farandole.observe.trace import TraceTable
    from farandole.protocol.messages import Spans, Traced


# --- status -----------------------------------------------------------------------------------------------------------


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    run: RunOption = None,
) -> None:
    """Show a run's progress, workers and departures, or its outcome."""
    answer = _ask(run)
    if as_json:
        import msgspec

        tell(escaped(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()))
        return
    from rich.console import Console

    from farandole.observe.tables import past_table, status_table

    if isinstance(answer, Past):
        Console().print(past_table(answer), soft_wrap=True)  # do not break paths and fingerprints
        tell("\n".join(_details(place_of(run))))
    else:
        Console().print(status_table(answer))
    if gone := _departures(place_of(run)):
        tell("\n".join(["", "departures", *gone]))
    if isinstance(answer, Past):
        tell("\nmore: `farandole report`, `farandole account`")


def _departures(folder: Path) -> list[str]:
    try:
        with open(folder / METRICS, "rb", opener=files.opener) as file:
            return departures(file)
    except OSError:  # it was deleted while the run trains
        return []


def _details(folder: Path) -> list[str]:
    """Returns what else is known of a run that is over: times, losses, and the changes of its workers."""
    from farandole.observe.live import Written
    from farandole.observe.report import prices_in, settings_of
    from farandole.observe.summary import details

    written = Written(folder, prices_in(settings_of(folder)))
    while written.read_on():
        pass
    return details(written.course, written.account())


def _ask(run: RunOption) -> Status | Past:
    try:
        with live(run) as api:
            return api.status()
    except CoordinatorUnreachable:
        answer = past_of(folder := place_of(run))
        if answer is None:
            raise
        import msgspec

        from farandole.checkpoint.store import incomplete_here, step_of
        from farandole.observe.report import checkpoints_in, settings_of

        newest, place = step_of(answer.checkpoint), checkpoints_in(folder, settings_of(folder))
        moved = Path(place, Path(answer.checkpoint).name)  # a copied folder records where the original was
        return msgspec.structs.replace(
            answer,
            checkpoint=str(moved) if newest is not None and moved.is_file() else answer.checkpoint,
            incomplete=incomplete_here(place, after=-1 if newest is None else newest),
            again=0 if newest is None else max(0, answer.steps - newest),
        )


# --- top --------------------------------------------------------------------------------------------------------------
#
# `farandole top`: shows live runs on a terminal, on their own machine or, with a copy of the ticket, on another one.

EVERY_S = 1.0


def top(
    run: RunOption = None,
    ticket: Annotated[
        str | None,
        typer.Option("--ticket", metavar="FILE", help="Ticket of a run on another machine; - for standard input."),
    ] = None,
) -> None:
    """Watch a run, or several: progress, workers, events and cost.

    If several runs are alive, show one line for each. If the output is not a terminal, print once, without events.
    """
    if run is not None and ticket is not None:
        raise UsageError("top: --run and --ticket can't be combined; give one of them")
    alive = [] if run is not None or ticket is not None else _alive()
    if len(alive) > 1:
        asyncio.run(_list(alive))
        return
    from farandole.control import ticket as tickets
    from farandole.control.run_folder import TICKET
    from farandole.platform import files

    if ticket is not None:
        asyncio.run(_one(tickets.load(ticket), None))
        return
    watched = live(run or (alive[0] if alive else None))
    with watched:
        asyncio.run(_one(tickets.load(str(watched.folder / TICKET), files.opener), watched.folder))


def _alive() -> list[Path]:
    """Returns the folders of this user's live runs under runs/."""
    from farandole.platform import files

    folders: list[Path] = []
    for folder in sorted(RUNS.glob("*")):
        with suppress(OSError):
            if not files.foreign(folder.stat()) and is_locked(folder):
                folders.append(folder)
    return folders


async def _list(folders: list[Path]) -> None:
    """Shows one line for each run until all are over."""
    from farandole.observe.live import list_picture

    async def look() -> RenderableType | None:
        alive = [folder for folder in folders if is_locked(folder)]
        answers = await asyncio.gather(*(asyncio.to_thread(_status, folder) for folder in alive))
        return list_picture(dict(zip((folder.name for folder in alive), answers, strict=True))) if alive else None

    await _show(look)


def _status(folder: Path) -> Status | None:
    with suppress(FarandoleError):
        return live(folder).api.status()
    return None


async def _one(ticket: Ticket, folder: Path | None) -> None:
    """Shows one run until it is over, or until Ctrl-C. `folder`: the run's folder; None if it is on another machine."""
    from farandole.control.api import Api
    from farandole.observe.live import Recent, picture, show_lines

    api, recent = Api(ticket), Recent()
    status, answered = await asyncio.to_thread(api.status), time.monotonic()
    over, killed = asyncio.Event(), False
    watching = (
        asyncio.create_task(show_lines(ticket, recent, lambda _: None, lambda: folder is None or is_locked(folder)))
        if sys.stdout.isatty()
        else None
    )
    if watching is not None:
        watching.add_done_callback(lambda _: over.set())

    async def look() -> RenderableType | None:
        nonlocal status, answered, killed
        if over.is_set():
            return None
        note = ""
        try:
            status, answered = await asyncio.to_thread(api.status), time.monotonic()
        except CoordinatorUnreachable:
            killed = folder is not None and not is_locked(folder)
            if killed:
                return None
            note = f"no answer for {time.monotonic() - answered:.0f} s; a run continues without its coordinator"
        return picture(status, recent, note)

    await _show(look)
    if watching is None:
        return
    ended = watching.done() and watching.exception() is None
    watching.cancel()
    await asyncio.wait({watching})
    past = past_of(folder) if killed and folder is not None else None
    if killed and not ended and (past is None or past.code is None):
        raise CoordinatorUnreachable(
            f"run {ticket.run} was killed: no `farandole run` holds its folder, and no coordinator answers"
        )
    tell(recent.events[-1] if ended and recent.events else f"run {ticket.run} {'is over' if killed else 'continues'}")


async def _show(look: Callable[[], Awaitable[RenderableType | None]]) -> None:
    """Shows the value of `look` periodically until it is None. Shows it once if the output is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    shown = await look()
    if not console.is_terminal:
        if shown is not None:
            console.print(shown)
        return
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    with Live(shown or "", console=console, screen=True, auto_refresh=False) as screen:
        while shown is not None and not interrupted.is_set():
            await up_to(EVERY_S, interrupted)
            shown = await look()
            if shown is not None:
                screen.update(shown, refresh=True)


# --- account ----------------------------------------------------------------------------------------------------------
#
# `farandole account`: shows how a run's workers spent their time, the goodput, and the cost.

WIDE = 200  # width in columns if the output is not a terminal


def account(
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="File with the prices of hosts and pools.", show_default="the run's own"
        ),
    ] = None,
    traffic_price: Annotated[
        float | None,
        typer.Option(
            RUN_OPTIONS["traffic_price"].flag,
            metavar=RUN_OPTIONS["traffic_price"].metavar,
            help="Dollars for each GB between hosts.",
            show_default="the run's own",
        ),
    ] = None,
    workers: Annotated[bool, typer.Option("--workers", help="Add a line for each worker.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    run: RunOption = None,
) -> None:
    """Show where the time of a run's workers went, and its cost."""
    import msgspec

    from farandole.cli.options import read
    from farandole.observe.report import prices_in, settings_of
    from farandole.protocol.coordinator.account import account as account_of

    folder = place_of(run)
    own = prices_in(settings_of(folder))
    settled = read(prices) if prices else own
    if settled.traffic_price is None:
        settled = settled.with_traffic_price(own.traffic_price)
    settled = settled.with_traffic_price(traffic_price)
    try:
        with open(folder / METRICS, "rb", opener=files.opener) as file:
            result = account_of(folder.resolve().name, (line for line in file if line.endswith(b"\n")), settled)
    except FileNotFoundError:
        raise UsageError(f"{folder}: it has no {METRICS} yet, so the time of its workers is unknown") from None
    if as_json:
        tell(escaped(msgspec.json.format(msgspec.json.encode(result), indent=2).decode()))
        return
    from rich.console import Console

    from farandole.observe.summary import account_table

    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(account_table(result, workers=workers))


# --- report -----------------------------------------------------------------------------------------------------------
#
# `farandole report`: writes a run as one self-contained page, and its pictures.

REPORT = "report.html"


def report(
    run: Annotated[Path | None, typer.Argument(help="The run's folder.", show_default="the newest in runs/")] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="FOLDER", help="Another run to show beside it; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page.",
            show_default="report.html in the run's folder",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FOLDER", help="Write the pictures to this folder too; needs Chromium."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="File with the prices of hosts and pools.", show_default="each run's own"
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run, or a comparison of several."""
    from farandole.cli.options import read
    from farandole.observe.report import draw, run_content
    from farandole.observe.report import report as page_of

    settled = read(prices) if prices else None
    folders = [place_of(run), *map(place_of, against or ())]
    runs = [run_content(folder, time.time(), settled, live=is_locked(folder)) for folder in folders]
    output = output or folders[0] / REPORT
    try:
        files.write(output, page_of(runs).encode())
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None
    tell(f"report: {output.resolve()}")
    if png is not None:
        for path in draw(output.resolve(), png, runs):
            tell(f"picture: {path}")


# --- dashboard --------------------------------------------------------------------------------------------------------
#
# `farandole dashboard`: shows a run in the browser, live or over.


def dashboard(
    run: RunOption = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1.", show_default="any")] = 0,
) -> None:
    """Show a run in the browser, with buttons to change it."""
    asyncio.run(_serve(place_of(run), port))


async def _serve(folder: Path, port: int) -> None:
    from farandole.observe.dashboard import DashboardServer, RunWatch

    def api() -> Api | None:
        with suppress(CoordinatorUnreachable):
            return live(folder).api
        return None

    watch = RunWatch(folder, api, lambda: is_locked(folder))
    server = DashboardServer(watch, api)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    address = await server.start(port)
    following = asyncio.create_task(watch.follow())
    following.add_done_callback(lambda _: ended.set())
    tell(f"dashboard of {watch.name}: {server.link()}")
    own = address.rpartition(":")[2]
    tell(f"the link works once; from another machine: ssh -L {own}:127.0.0.1:{own} THIS-MACHINE, and the same link")
    if sys.stdin.isatty():
        tell("Enter: another link; Ctrl-C: close the dashboard (the run continues)")
        loop.add_reader(sys.stdin, _another, server)
    try:
        await ended.wait()
        if following.done():
            following.result()
    finally:
        following.cancel()
        await server.close()


def _another(server: DashboardServer) -> None:
    if sys.stdin.readline():
        tell(server.link())
    else:
        asyncio.get_running_loop().remove_reader(sys.stdin)


# --- trace ------------------------------------------------------------------------------------------------------------
#
# `farandole trace`: records the next steps of a live run as a trace for ui.perfetto.dev.

TRACE = "trace.json"
TRACE_EVERY_S = 0.2  # a run that ends answers for one second at most
PATIENCE_S = 15.0  # time without an answer of the coordinator, which may be restarting
LAST_S = 10.0  # time to collect partial answers after Ctrl-C
STANDS_S = 10.0  # between two messages about the workers that have not answered
SHOWN = 3  # peers that a line names


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
    """Record what each worker does in the next steps of a run.

    Open the file at ui.perfetto.dev. Ctrl-C ends the recording and writes the file.
    """
    from farandole.observe.trace import trace as trace_of
    from farandole.protocol.messages import MOST_STEPS

    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps {steps}: a trace has 1 to {MOST_STEPS} steps")
    watched = live(run)
    output = output or watched.folder / TRACE
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {output.parent} does not exist")
    with watched as api:
        asking = _Asking(watched, steps, api.trace(steps))
        hosts = {worker.id: worker.host for worker in api.status().workers}
    say(f"recording the next {steps} steps of {', '.join(asking.traced.asked)}; Ctrl-C writes the steps so far")
    enough = threading.Event()  # no KeyboardInterrupt: it would be lost if raised in a call of the garbage collector
    signal.signal(signal.SIGINT, lambda _number, _frame: enough.set())
    asking.wait(enough)
    if enough.is_set():
        asking.end()
    missing = asking.missing()
    table = trace_of(asking.in_order(), hosts, steps)
    if not table.steps or not table.events:
        raise CoordinatorUnreachable(f"nothing to write: no worker reported a step ({missing or 'no step was taken'})")
    try:
        files.write(output, table.json())
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None
    _describe(table, missing)
    tell(f"trace: {output.resolve()}; open it at https://ui.perfetto.dev; the file stays in your browser")


class _Asking:
    """A trace request whose answers arrive one by one. `traced`: its last known state."""

    def __init__(self, watched: Live, steps: int, traced: Traced) -> None:
        self._api: Api = watched.api
        self._folder = watched.folder
        self._steps = steps
        self._why = ""  # why it has ended early
        self.traced = traced
        self.answers: dict[str, Spans] = {}

    def wait(self, enough: threading.Event) -> None:
        """Returns when all present workers have answered, the run is gone, or `enough` is set."""
        answered = reported = time.monotonic()
        while self.traced.owed and not enough.wait(TRACE_EVERY_S):
            try:
                if not self._look():
                    return
                answered = time.monotonic()
                if answered - reported > STANDS_S:
                    reported = answered
                    say(self._waiting_for())
            except CoordinatorUnreachable as error:
                if not is_locked(self._folder) or time.monotonic() - answered > PATIENCE_S:
                    self._why = self._unreachable(error)
                    return

    def end(self) -> None:
        """Ends the recording early, and collects partial answers."""
        until = time.monotonic() + LAST_S
        try:
            self._api.end_trace()
            while self._look() and self.traced.owed and time.monotonic() < until:
                time.sleep(TRACE_EVERY_S)
        except CoordinatorUnreachable as error:
            self._why = self._unreachable(error)

    def _unreachable(self, error: Exception) -> str:
        return f"out of reach ({error})" if is_locked(self._folder) else "the run is over"

    def in_order(self) -> dict[str, Spans]:
        """Returns the answers so far, in rank order."""
        return {worker: self.answers[worker] for worker in self.traced.asked if worker in self.answers}

    def missing(self) -> str:
        """Returns the workers that are not in the trace, and why; "" if all are."""
        accounted = {*self.answers, *self.traced.gone, *self.traced.owed}
        unfetched = [worker for worker in self.traced.asked if worker not in accounted]
        words = {
            "has left meanwhile": self.traced.gone,
            "has not answered": self.traced.owed,
            "its answer could not be fetched": unfetched,
        }
        reasons = [f"{', '.join(workers)}: {why}" for why, workers in words.items() if workers]
        return "; ".join([*reasons, *([self._why] if self._why else [])])

    def _look(self) -> bool:
        """Fetches new answers. Returns False if the coordinator no longer holds this trace."""
        new = self._api.traced()
        if new.number != self.traced.number:
            self._why = (
                "the coordinator no longer has this trace: another one was requested, or the coordinator restarted"
            )
            return False
        self.traced = new
        for worker in new.answered:
            if worker not in self.answers:
                self.answers[worker] = self._api.spans(worker)
        return True

    def _waiting_for(self) -> str:
        """Returns a message about the workers that have not answered, and the state of the run."""
        status = self._api.status()
        stalled = f"; no step for {status.stalled.seconds:.0f} s" if status.stalled else ""
        waits = (
            f", it seems for {', '.join(status.stalled.workers)}" if status.stalled and status.stalled.workers else ""
        )
        return f"waiting for {', '.join(self.traced.owed)} (step {status.step}, {status.state}{stalled}{waits})"


def _describe(table: TraceTable, missing: str) -> None:
    tell(f"steps {table.steps.start} to {table.steps.stop - 1}, {table.length_us / 1e6:.3f} s")
    for worker, waited in table.waited_us.items():
        tell(f"  {worker} waited {_seconds(sum(waited.values()))}{_most(waited)}")
    for worker in table.full:
        say(f"note: {worker} had more data than fits; request fewer steps")
    if table.lacking:
        say(f"note: {', '.join(table.lacking)}: some of these steps are missing or incomplete")
    if missing:
        say(f"note: not in the trace: {missing}")


def _most(waited: Mapping[str, int]) -> str:
    most = sorted(waited.items(), key=lambda each: -each[1])[:SHOWN]
    return f": {', '.join(f'{_seconds(us)} for {peer}' for peer, us in most)}" if most else ""


def _seconds(us: int) -> str:
    return f"{us / 1e6:.3f} s"
