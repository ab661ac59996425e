"""What `farandole run` does after its checks: coordinator process, local pool, display, signals, one exit code.

Invariant: when `supervise` returns or raises, the coordinator and all workers have ended. When this process is
killed instead, the kernel ends them (see `platform/process.py`).

    first Ctrl-C or SIGTERM   asks the coordinator to stop: all leave after the same step, the state is saved
    second                    kills everything at once
    SIGHUP                    the same as the first SIGTERM, unless it is ignored (nohup); never counts as a second
    the coordinator ends      or does not answer: another one is started (see `coordinators.py`)
    the run's folder is gone  it is said; the training goes on, without a record
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from farandole.checkpoint.owner import Owner, claim, this_run
from farandole.cli.coordinators import Coordinators
from farandole.cli.exporters import Exporters
from farandole.cli.folders import lives, make_folder
from farandole.cli.pools import Pools
from farandole.cli.takeover import Left
from farandole.control.client import Api
from farandole.control.run_folder import LOGS, SETTINGS
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, FarandoleError
from farandole.membership.events import Failed, Over, Starting, View
from farandole.membership.messages import Roster
from farandole.membership.metrics import Line, StepLine
from farandole.membership.preference import PoolTerms
from farandole.membership.records import RunSettings
from farandole.observe.display import Display, open_display
from farandole.observe.live import WATCH_S, keep_figures, show_lines, show_output, sum_up
from farandole.observe.words import told_by_us
from farandole.observe.written import Written
from farandole.platform.files import make, write_atomically
from farandole.platform.output import say, tell
from farandole.platform.process import up_to

END_S = 8.0  # for it to end once the run is over, and for its last lines to arrive
FOLDER_S = 1.0  # how often the run's folder is looked for
LOADING_S, LONGEST_WAIT_S = 1.0, 60.0  # without a worker, until that is said, and said again


class Supervisor:
    """One run of one script. Use once, from the main thread.

    Attributes:
        silence_s: a coordinator that has not answered for so long is ended, and another one started.
    """

    silence_s = 15.0

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], display: Display, prepare: str = "",
        fresh: bool = False, specs: Sequence[PoolTerms] = (), left: Left | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._folder = Path(settings.folder)
        self._script = script
        self._arguments = arguments
        self._prepare = prepare
        self._fresh = fresh or bool(prepare)  # what prepares a host may install what would have been loaded
        self._specs = specs
        self._left = left
        self._display = display
        self._written = Written(self._folder, settings.prices, settings.checkpoints.url)
        self._failures: dict[str, Failed] = {}  # by worker, each one's first
        self._over: Over | None = None
        self._ticket: Ticket | None = None
        self._signals = 0
        self._connected = False
        self._earlier = 0
        self._forced: asyncio.Event = asyncio.Event()
        self._connecting = asyncio.Event()  # a worker has
        self._code = 0  # 128 + the first signal
        self._asking: set[asyncio.Task[None]] = set()

    def supervise(self) -> int:
        """Returns the run's exit code.

        Raises:
            FarandoleError: the coordinator did not start, or died.
            UsageError: the run's address can't be listened at.
        """
        with self._display:
            roster = asyncio.run(self._supervise())
        if roster is None:
            if self._code:
                say("farandole: killed")
            return self._code
        ended = [w for w in self._failures if roster.reason == f"the script failed on {w}"]  # others were replaced
        failure = self._failures[ended[0]] if ended else None
        if failure and told_by_us(failure):
            say(f"farandole: error on {failure.worker}: {failure.traceback}")
        elif failure:
            say(f"farandole: {roster.reason}:")
            say(failure.traceback)
        elif roster.over not in (0, self._code):
            say(f"farandole: error: {roster.reason}")
        return roster.over

    async def _supervise(self) -> Roster | None:
        """The last roster, None when a second signal cut the run short."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        settings = msgspec.json.encode(self._settings) + b"\n"
        try:
            write_atomically(self._folder / SETTINGS, settings)
            make(self._folder / LOGS)
        except OSError as error:
            raise FarandoleError(f"the run's folder {self._folder} can't be written: {error.strerror}") from None
        self._earlier = len(list((self._folder / LOGS).glob("*.log")))  # of the run's earlier workers, if resumed
        show, again = self._display.show, self._left is not None
        self._coordinators = Coordinators(self._folder, self._settings.listen, show, again=again)
        pools = Pools(
            self._settings, self._script, self._arguments, self._specs, prepare=self._prepare, fresh=self._fresh,
            show=show, left=self._left,
        )  # fmt: skip
        exporters = Exporters(self._folder, self._settings.exports, show)
        try:
            self._ticket = await self._coordinators.ticket(self._forced)
            if self._ticket:
                exporters.begin(self._ticket.address)
            roster = await self._accompany(pools, self._ticket) if self._ticket else None
            if roster is not None:
                await pools.close()  # agents hear it over the coordinator
                await self._coordinators.ended(END_S)
            if self._ticket:
                await sum_up(self._written, self._display, self._over)
            return roster
        finally:
            await pools.close()
            self._coordinators.close()
            await exporters.close(self._forced)

    # --- parts ---------------------------------------------------------------------------------------------

    async def _enough(self) -> None:
        """Returns when everything is to be killed at once."""
        await self._forced.wait()

    async def _mind_folder(self) -> None:
        """Say so once when the run's folder is gone."""
        while self._folder.is_dir():
            await asyncio.sleep(FOLDER_S)
        self._display.show(
            f"THE RUN'S FOLDER IS GONE: {self._folder}; the training goes on without a record, and a coordinator that "
            f"dies can't be started again; Ctrl-C stops the run, with a checkpoint"
        )

    async def _explain_silence(self) -> None:
        """Say what the first worker does until it connects, after `LOADING_S` and now and then again."""
        began, wait_s = time.monotonic(), LOADING_S
        while True:
            await up_to(wait_s, self._connecting)
            if self._connecting.is_set():
                return
            spent_s = time.monotonic() - began
            self._display.show(
                f"waiting for the first worker for {spent_s:.0f} s: its process is started and loads torch; what it "
                f"prints is in {self._folder / LOGS}"
            )
            wait_s = min(5 * wait_s, LONGEST_WAIT_S)

    async def _limit(self, pools: Pools, ticket: Ticket) -> None:
        """Stop the run when it has lasted, or cost, as much as it may."""
        spending = self._settings.spending
        while not (reason := spending.over(time.time(), pools.dollars())):
            await asyncio.sleep(FOLDER_S)
        self._display.show(f"stopping after this step: {reason}")
        await _stop(Api(ticket), reason, 0)

    async def _accompany(self, pools: Pools, ticket: Ticket) -> Roster | None:
        keeping = asyncio.create_task(pools.keep(ticket, self._seen, self._earlier))
        watching = asyncio.create_task(show_lines(ticket, self._display, self._noted))
        ended = asyncio.Event()
        relaying = asyncio.create_task(show_output(self._folder, self._display, ended))
        forced = asyncio.create_task(self._enough())
        tending = asyncio.create_task(self._coordinators.tend())
        watchdog = asyncio.create_task(self._coordinators.keep_watch(ticket, self.silence_s))
        minding = asyncio.create_task(self._mind_folder())
        summing = asyncio.create_task(keep_figures(self._written, self._display))
        limiting = asyncio.create_task(self._limit(pools, ticket))
        loading = asyncio.create_task(self._explain_silence())
        try:
            await asyncio.wait({keeping, forced, tending}, return_when=asyncio.FIRST_COMPLETED)
            for ended_first in (tending, forced):
                if ended_first.done():
                    ended_first.result()  # may raise
            if not keeping.done():
                return None
            tending.cancel()
            await asyncio.wait({watching}, timeout=END_S)
            return keeping.result()
        finally:
            tasks: list[asyncio.Task[Any]] = [
                keeping,
                watching,
                forced,
                tending,
                watchdog,
                minding,
                limiting,
                summing,
                loading,
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ended.set()
            await relaying

    def _seen(self, roster: Roster) -> None:
        self._display.wanted = roster.wanted or self._display.wanted  # 0 once the end is near
        if self._signals and not self._connected:
            self._ask_to_stop()  # not earlier: the pool would not hear that the run is over
        self._connected = True
        if roster.over >= 0:
            self._coordinators.over()

    def _noted(self, line: Line) -> None:
        if isinstance(line, Starting | View | StepLine):
            self._connecting.set()
        if isinstance(line, Failed):
            self._failures.setdefault(line.worker, line)
        elif isinstance(line, Over):
            self._over = line

    # --- signals -------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGHUP and self._signals:
            return  # who closes a terminal may hear it twice, from the kernel and from the shell
        self._signals += 1
        self._code = self._code or 128 + signum
        if self._signals > 1:
            self._forced.set()
            return
        self._display.show("stopping after this step; once more to kill everything at once")
        if self._connected:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        assert self._ticket is not None
        reason = f"farandole run got {signal.Signals(self._code - 128).name}"
        self._asking.add(asyncio.create_task(_stop(Api(self._ticket), reason, self._code)))


async def _stop(api: Api, reason: str, code: int) -> None:
    """Cancelled with everything else when the run is over."""
    while True:
        try:
            await asyncio.to_thread(api.stop, reason, code)
            return
        except CoordinatorUnreachable:
            await asyncio.sleep(WATCH_S)


def _not_alive(owner: Owner, folder: Path) -> bool:
    del owner, folder
    return False


def go_on(was: Left, prepare: str, fresh: bool, *, taken_over: bool = False) -> int:
    """Go on where a `farandole run` was that was killed, with the settings of then. Returns the run's exit code.

    `taken_over`: by the user's word the machine of then is lost or cut off, so the place of its checkpoints is this
    run's, even if that machine is seen to be alive.
    """
    settings = was.settings
    with contextlib.suppress(FileNotFoundError):  # on another machine
        os.chdir(settings.directory)
    script, *arguments = settings.command
    make_folder(Path(settings.folder), script, again=True)
    if settings.checkpoints.url and settings.checkpoints.identity:
        claim(
            settings.checkpoints.url,
            this_run(settings.checkpoints.identity, Path(settings.folder), inside=False),
            alive=_not_alive if taken_over else lives,
        )
    tell(f"run folder: {settings.folder}")
    tell(was.said)
    display = open_display(sys.stdout)
    display.wanted = settings.wanted or 0
    return Supervisor(settings, script, arguments, display, prepare, fresh, settings.pools, was).supervise()
