"""What `farandole run` does after its checks: coordinator process, local pool, display, signals, one exit code.

Invariant: when `supervise` returns or raises, the coordinator and all workers have ended. When this process is
killed instead, the kernel ends them (see `control/parent.py`).

    first Ctrl-C or SIGTERM   asks the coordinator to stop: all leave after the same step, the state is saved
    second                    kills everything at once
    SIGHUP                    the same as the first SIGTERM, unless it is ignored (nohup); never counts as a second
    the coordinator dies      it is started again, at the same socket, bound here; `FAST_DEATHS` in a row end the run
    it does not answer        for `silence_s`: it is killed, and so started again (see `vigil.py`)
    the run's folder is gone  it is said; the training goes on, without a record
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from farandole.cli.vigil import START_S, until_silent
from farandole.control import safekeeping
from farandole.control.api import Api
from farandole.control.endpoint import parse
from farandole.control.files import write_atomically
from farandole.control.listener import bind
from farandole.control.paths import ASIDE, CODE, COORDINATOR_LOG, LOGS, RECORD, SETTINGS, TICKET
from farandole.control.process import CoordinatorRecord
from farandole.control.subscription import subscribe
from farandole.control.ticket import Ticket, load
from farandole.errors import CoordinatorUnreachable, FarandoleError
from farandole.membership.messages import Hello, Note, Roster
from farandole.membership.records import RunSettings
from farandole.observe.display import Display
from farandole.observe.follow import Follower
from farandole.observe.words import told_by_us
from farandole.output import say
from farandole.pool.base import keep
from farandole.pool.local import LocalPool, join_command
from farandole.private import append, make

END_S = 8.0  # for it to end once the run is over, and for its last lines to arrive
POLL_S = 0.02
FAST_S, FAST_DEATHS = 5.0, 5  # a coordinator that dies sooner than this, so often in a row, is not started again
WATCH_S = 0.2  # between two tries to reach a coordinator that has gone
FOLDER_S = 1.0  # how often the run's folder is looked for
LAST_WORDS = 500  # characters of the coordinator's
RELAY_S = 0.1  # how often the workers' log files are looked at


class Supervisor:
    """One run of one script. Use once, from the main thread.

    Attributes:
        silence_s: a coordinator that has not answered for so long is ended, and another one started.
    """

    silence_s = 15.0

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], display: Display, prepare: str = ""
    ) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._script = script
        self._arguments = arguments
        self._prepare = prepare
        self._display = display
        self._failures: dict[str, dict[str, Any]] = {}  # by worker, each one's first
        self._ticket: Ticket | None = None
        self._signals = 0
        self._connected = self._over = False
        self._earlier = 0
        self._forced: asyncio.Event = asyncio.Event()
        self._code = 0  # 128 + the first signal
        self._asking: set[asyncio.Task[None]] = set()
        self._books = -1

    def supervise(self) -> int:
        """Returns the run's exit code.

        Raises:
            FarandoleError: the coordinator did not start, or died.
            UsageError: the run's address can't be listened at.
        """
        with self._display:
            roster = asyncio.run(self._supervise())
        if roster is None:
            say("farandole: killed")
            return self._code
        ended = [w for w in self._failures if roster.reason == f"the script failed on {w}"]  # others were replaced
        failure = self._failures[ended[0]] if ended else {}
        if failure and told_by_us(failure):
            say(f"farandole: error on {failure['worker']}: {failure['traceback']}")
        elif failure:
            say(f"farandole: {roster.reason}:")
            say(failure["traceback"])
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
        self._books = safekeeping.allot()
        self._listener = bind(*parse(self._settings.listen))
        self._coordinator = self._start_coordinator()
        pool = LocalPool(
            join_command(self._folder / TICKET, self._script, self._arguments, self._prepare),
            logs=self._folder / LOGS,
            threads=self._settings.threads,
            environ={**os.environ, "FARANDOLE_CODE": str(self._folder / CODE)},
            tell=self._display.show,
        )
        try:
            self._ticket = await self._listening(self._coordinator)
            roster = await self._accompany(pool, self._ticket) if self._ticket else None
            if roster is not None:
                await _ended(self._coordinator, END_S)
            return roster
        finally:
            pool.kill_all()
            self._coordinator.kill()
            self._coordinator.wait()
            self._listener.close()
            os.close(self._books)

    # --- parts ---------------------------------------------------------------------------------------------

    def _start_coordinator(self, *again: str) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name != "FARANDOLE_WORKER"}  # see `Strays`
        with self._coordinator_log() as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "farandole.control.process", str(self._folder),
                    "--die-with", str(os.getpid()), "--books", str(self._books),
                    "--listener", str(self._listener.fileno()), *again,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environ,
                pass_fds=(self._books, self._listener.fileno()),
            )  # fmt: skip

    def _coordinator_log(self) -> BinaryIO:
        try:
            return append(self._folder / COORDINATOR_LOG)
        except OSError as error:
            if not self._folder.is_dir():
                raise FarandoleError(f"{self._folder} is gone, and no coordinator can be started without it") from None
            self._display.show(f"{self._folder / COORDINATOR_LOG} can't be written: {error.strerror}")
            return Path(os.devnull).open("ab")

    def _last_words(self) -> str:
        """Of the coordinator's output, the newest line, with a colon before it; "" without any."""
        try:
            lines = (self._folder / COORDINATOR_LOG).read_text(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {last.removeprefix('farandole: error: ')[:LAST_WORDS]}" if last else ""

    async def _listening(self, coordinator: subprocess.Popen[bytes]) -> Ticket | None:
        """The run's ticket, once the coordinator serves; None after a second signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        record = self._folder / RECORD
        while not (record.exists() and _pid(record) == coordinator.pid):
            if self._forced.is_set():
                return None
            if coordinator.poll() is not None or loop.time() > deadline:
                why = f"it ended: {_code(coordinator)}" if coordinator.poll() is not None else f"{START_S:g} s passed"
                raise FarandoleError(
                    f"the coordinator did not start ({why}){self._last_words()}; "
                    f"its output is in {self._folder / COORDINATOR_LOG}"
                )
            await asyncio.sleep(POLL_S)
        return load(str(self._folder / TICKET))

    async def _tend(self) -> None:
        """Start the coordinator again whenever it dies. Returns never.

        Raises:
            FarandoleError: it dies again and again.
        """
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            since = loop.time()
            await _ended(self._coordinator, math.inf)
            if self._over:
                await asyncio.Future()  # as it should: the pool is clearing up
            deaths = deaths + 1 if loop.time() - since < FAST_S else 1
            why = _code(self._coordinator)
            if deaths > FAST_DEATHS:
                raise FarandoleError(
                    f"the coordinator died {deaths} times in a row ({why}), and the run with it"
                    f"{self._last_words()}; its output is in {self._folder / COORDINATOR_LOG}"
                )
            self._display.show(f"the coordinator has died ({why}); starting it again, the training goes on")
            await asyncio.sleep(POLL_S * 2**deaths)
            self._coordinator = self._start_coordinator("--again")

    async def _keep_vigil(self, ticket: Ticket) -> None:
        """End the coordinator whenever it is frozen: `_tend` starts another one. Returns never."""
        while True:
            coordinator = self._coordinator
            await until_silent(ticket, self.silence_s)
            if self._coordinator is coordinator and coordinator.poll() is None and not self._over:
                self._display.show(f"the coordinator has not answered for {self.silence_s:g} s and is ended")
                coordinator.kill()

    async def _mind_folder(self) -> None:
        """Say so once when the run's folder is gone."""
        while self._folder.is_dir():
            await asyncio.sleep(FOLDER_S)
        self._display.show(
            f"THE RUN'S FOLDER IS GONE: {self._folder}; the training goes on without a record, and a coordinator that "
            f"dies can't be started again; Ctrl-C stops the run, with a checkpoint"
        )

    async def _accompany(self, pool: LocalPool, ticket: Ticket) -> Roster | None:
        keeping = asyncio.create_task(keep(pool, ticket, self._seen, self._earlier))
        watching = asyncio.create_task(self._watch(ticket))
        ended = asyncio.Event()
        relaying = asyncio.create_task(self._relay(ended))
        forced = asyncio.create_task(self._forced.wait())
        tending = asyncio.create_task(self._tend())
        watching_over = [asyncio.create_task(self._keep_vigil(ticket)), asyncio.create_task(self._mind_folder())]
        try:
            await asyncio.wait({keeping, forced, tending}, return_when=asyncio.FIRST_COMPLETED)
            if tending.done():
                tending.result()  # raises
            if not keeping.done():
                return None
            tending.cancel()
            await asyncio.wait({watching}, timeout=END_S)
            return keeping.result()
        finally:
            tasks = (keeping, watching, forced, tending, *watching_over)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ended.set()
            await relaying

    def _seen(self, roster: Roster) -> None:
        self._display.wanted = roster.wanted or self._display.wanted  # 0 once the end is near
        if self._signals and not self._connected:
            self._ask_to_stop()  # not earlier: the pool would not hear that the run is over
        self._connected, self._over = True, roster.over >= 0
        if self._over:
            self._listener.close()  # no coordinator follows, and nobody waits for one

    async def _watch(self, ticket: Ticket) -> None:
        """Events and steps, from one coordinator after the other to the display; what was shown before is left out."""
        newest = 0.0
        while True:
            with contextlib.suppress(CoordinatorUnreachable):
                async with subscribe(ticket, Hello(kind="observer", pid=os.getpid())) as subscription:
                    again = newest > 0
                    while (message := await subscription.receive()) is not None:
                        line: dict[str, Any] = dict(message.line) if isinstance(message, Note) else {}
                        if not line or (again and line.get("time", 0.0) <= newest):
                            continue
                        again = False
                        newest = max(newest, line.get("time", 0.0))
                        self._show(line)
                        if line.get("event") == "over":
                            return
            await asyncio.sleep(WATCH_S)

    def _show(self, line: dict[str, Any]) -> None:
        self._display.line(line)
        if line.get("event") == "failed":
            self._failures.setdefault(line["worker"], line)

    async def _relay(self, ended: asyncio.Event) -> None:
        """The workers' output, from their log files to the display; the rest of it once they have `ended`."""
        with Follower(self._folder / LOGS) as follower:
            while not ended.is_set():
                for worker, text in follower.lines():
                    if not text.startswith(ASIDE):
                        self._display.output(worker, text)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), RELAY_S)
            for worker, text in follower.flush():
                if not text.startswith(ASIDE):
                    self._display.output(worker, text)

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


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while process.poll() is None and loop.time() < deadline:
        await asyncio.sleep(POLL_S)


def _pid(record: Path) -> int:
    return msgspec.json.decode(record.read_bytes(), type=CoordinatorRecord).pid


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "it does not answer"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
