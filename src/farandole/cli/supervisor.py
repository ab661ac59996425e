"""What `farandole run` does after its checks: coordinator process, local pool, display, signals, one exit code.

Invariant: when `supervise` returns or raises, the coordinator and all workers have ended. When this process is
killed instead, the kernel ends them (see `platform/process.py`).

    first Ctrl-C or SIGTERM   asks the coordinator to stop: all leave after the same step, the state is saved
    second                    kills everything at once
    SIGHUP                    the same as the first SIGTERM, unless it is ignored (nohup); never counts as a second
    the coordinator ends      or does not answer: another one is started (see `supervisor.py`)
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from farandole.checkpoint.owner import Owner, claim, this_run
from farandole.cli.exporters import Exporters
from farandole.cli.folders import lives, make_folder
from farandole.cli.takeover import Left
from farandole.control.api import Api
from farandole.control.run_folder import CODE, COORDINATOR_LOG, LOGS, RECORD, SETTINGS, TICKET
from farandole.control.ticket import Ticket, load
from farandole.coordinator import journal
from farandole.coordinator.listener import bind, parse, port_of
from farandole.coordinator.process import CoordinatorRecord
from farandole.errors import CoordinatorUnreachable, FarandoleError, UsageError
from farandole.observe.live import (
    WATCH_S,
    Display,
    Written,
    keep_figures,
    open_display,
    show_lines,
    show_output,
    sum_up,
)
from farandole.observe.text import told_by_us
from farandole.platform import cpu
from farandole.platform.files import append, decoded, make, write_atomically
from farandole.platform.output import say, tell
from farandole.platform.process import up_to
from farandole.pool.base import PoolContext, RemotePool
from farandole.pool.local import OWN, LocalPool, join_command
from farandole.pool.reconciler import serve_pool
from farandole.pool.spec import kind_of
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import FailedEvent, OverEvent, StartingEvent, ViewEvent
from farandole.protocol.messages import Roster
from farandole.protocol.metrics import Line, StepLine
from farandole.protocol.settings import PoolTerms

if TYPE_CHECKING:
    pass


# --- watchdog ---------------------------------------------------------------------------------------------------------
#
# Whether the coordinator's process is alive: not only there, but answering.
#
# A process may be frozen for good (SIGSTOP, a debugger, a mount that hangs) without having died. So it is asked for a
# sign of life every second. It counts as frozen when several tries in a row are without an answer and `limit_s` have
# passed in them, by the time that *this* process has run: who was suspended together with it, or stopped by Ctrl-Z, has
# not waited. One that is starting has `START_S`.

START_S = 30.0  # for a coordinator to listen
ASK_S = 1.0  # between two tries
ANSWER_S = 2.0  # for an answer
LEAST = 3  # tries


class SilenceClock:
    """How long nothing was heard, as counted by who listens. Pure; times in seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.heard_once = False
        self._missed = 0
        self._silent_s = 0.0

    def heard(self) -> None:
        self.heard_once = True
        self._missed, self._silent_s = 0, 0.0

    def missed(self, took_s: float) -> bool:
        """A try that took so long was without an answer. Whether that is enough."""
        self._missed += 1
        self._silent_s += min(took_s, ASK_S + ANSWER_S)
        limit_s = self.limit_s if self.heard_once else max(START_S, self.limit_s)
        return self._missed >= LEAST and self._silent_s >= limit_s


async def until_silent(ticket: Ticket, limit_s: float) -> None:
    """Returns when the coordinator of `ticket` is frozen."""
    loop, api, silence = asyncio.get_running_loop(), Api(ticket, timeout_s=ANSWER_S), SilenceClock(limit_s)
    while True:
        began = loop.time()
        await asyncio.sleep(ASK_S)
        try:
            await asyncio.to_thread(api.alive)
            silence.heard()
        except (CoordinatorUnreachable, UsageError):
            if silence.missed(loop.time() - began):
                return


# --- coordinators -----------------------------------------------------------------------------------------------------
#
# The coordinator as `farandole run` has it: one process after the other, at one socket that is bound here.
#
#     it dies            it is started again; `FAST_DEATHS` in a row end the run
#     it does not answer for `silence_s`: it is killed, and so started again (see `supervisor.py`)
#
# What passes from one to the next is the run's folder, the memory for the state (`coordinator/journal.py`) and the
# socket (`coordinator/listener.py`).

POLL_S = 0.02
OVER_S = 10.0
FAST_S, FAST_DEATHS = 5.0, 5  # one that dies sooner than this, so often in a row, is not started again
LAST_WORDS = 500  # characters of its output


class Coordinators:
    """Starts the first; `again`: after one of another process. `over` it when the run is, and `close` it in any case:
    then none is alive.

    Raises:
        UsageError: the run's address can't be listened at.
        FarandoleError: the run's folder is gone.
    """

    def __init__(self, folder: Path, listen: str, show: Callable[[str], None], *, again: bool = False) -> None:
        self._folder = folder
        self._show = show
        self._over = False
        self._told_over = asyncio.Event()
        host, port = parse(listen)
        self._listener = bind(host, port or (port_of(folder) if again else 0))
        self._books = journal.allocate_state_memory()
        self._process = self._start(*(["--again"] if again else []))

    async def ticket(self, given_up: asyncio.Event) -> Ticket | None:
        """The run's, once the first one serves; None if that is given up.

        Raises:
            FarandoleError: it did not start.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        record, first = self._folder / RECORD, self._process
        while not (record.exists() and _pid(record) == first.pid):
            if given_up.is_set():
                return None
            if first.poll() is not None or loop.time() > deadline:
                why = f"it ended: {_code(first)}" if first.poll() is not None else f"{START_S:g} s passed"
                raise FarandoleError(
                    f"the coordinator did not start ({why}){self._last_words()}; "
                    f"its output is in {self._folder / COORDINATOR_LOG}"
                )
            await asyncio.sleep(POLL_S)
        return load(str(self._folder / TICKET))

    async def tend(self) -> None:
        """Start another one whenever one dies. Returns never.

        Raises:
            FarandoleError: they die again and again.
        """
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            since = loop.time()
            await self.ended(math.inf)
            if self._process.poll() == 0:  # as where the run is over, and the word of that may still be on its way here
                await up_to(OVER_S, self._told_over)
            if self._over:
                await asyncio.Future()  # as it should: the pool is clearing up
            deaths = deaths + 1 if loop.time() - since < FAST_S else 1
            why = _code(self._process)
            if deaths > FAST_DEATHS:
                raise FarandoleError(
                    f"the coordinator died {deaths} times in a row ({why}), and the run with it"
                    f"{self._last_words()}; its output is in {self._folder / COORDINATOR_LOG}"
                )
            self._show(f"the coordinator has died ({why}); starting it again, the training goes on")
            await asyncio.sleep(POLL_S * 2**deaths)
            if not self._over:
                self._process = self._start("--again")

    async def keep_watch(self, ticket: Ticket, silence_s: float) -> None:
        """End each one that is frozen: `tend` starts another. Returns never."""
        while True:
            watched = self._process
            await until_silent(ticket, silence_s)
            if self._process is watched and watched.poll() is None and not self._over:
                self._show(f"the coordinator has not answered for {silence_s:g} s and is ended")
                watched.kill()

    async def ended(self, timeout_s: float) -> None:
        """Wait for the end of the one that is there, so long at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._process.poll() is None and loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    def over(self) -> None:
        """The run is: no coordinator follows, and nobody waits for one."""
        self._over = True
        self._told_over.set()
        self._listener.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.close()
        os.close(self._books)

    def _start(self, *again: str) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name != "FARANDOLE_WORKER"}  # see `Strays`
        with self._log() as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "farandole.coordinator.process", str(self._folder),
                    "--die-with", str(os.getpid()), "--state", str(self._books),
                    "--listener", str(self._listener.fileno()), *again,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environ,
                pass_fds=(self._books, self._listener.fileno()),
            )  # fmt: skip

    def _log(self) -> BinaryIO:
        try:
            return append(self._folder / COORDINATOR_LOG)
        except OSError as error:
            if not self._folder.is_dir():
                raise FarandoleError(f"{self._folder} is gone, and no coordinator can be started without it") from None
            self._show(f"{self._folder / COORDINATOR_LOG} can't be written: {error.strerror}")
            return Path(os.devnull).open("ab")

    def _last_words(self) -> str:
        """Of its output, the newest line, with a colon before it; "" without any."""
        try:
            lines = (self._folder / COORDINATOR_LOG).read_text(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {last.removeprefix('farandole: error: ')[:LAST_WORDS]}" if last else ""


def _pid(record: Path) -> int:
    return decoded(record.read_bytes(), CoordinatorRecord).pid


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return "it does not answer"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# --- pools ------------------------------------------------------------------------------------------------------------
#
# The pools of `farandole run`: made as they were asked for, each kept by a service of its own, ended together.
#
# Invariant: when `close` has returned, nothing of a local pool is left, and the agents of far hosts that could be
# reached have ended with all that they had started.


def check(
    specs: Sequence[PoolTerms], listen: str, show: Callable[[str], None], *, sized: bool = True, priced: bool = False
) -> None:
    """Before anything is made. `show`: what is to be said of them. `sized`: it is known how many workers are wanted;
    `priced`: it is to be known what they cost.

    Raises:
        UsageError: a pool can't be as it was asked for.
    """
    for kind in [spec.kind for spec in specs if not kind_of(spec.kind).sized and spec.size is None and not sized]:
        raise UsageError(f"--pool {kind} without a size, and no --workers: say how many, as --pool {kind},size=2")
    for spec in specs:
        kind_of(spec.kind).check(spec, listen, show, priced=priced)


class Pools:
    """`keep` them once the run's ticket is there; `close` them in any case. Needs a running event loop."""

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], specs: Sequence[PoolTerms], *,
        prepare: str, fresh: bool, show: Callable[[str], None], left: Left | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._script, self._arguments = settings, script, arguments
        self._specs = specs or (PoolTerms(kind="local", name=OWN),)
        self._prepare, self._show, self._left = prepare, show, left
        self._folder = Path(settings.folder)
        self._local = [self._local_pool(spec, fresh) if spec.kind == "local" else None for spec in self._specs]
        self._far: list[RemotePool] = []

    async def keep(self, ticket: Ticket, seen: Callable[[Roster], None], count: int) -> Roster:
        """Until the run is over and all have ended. Returns the first pool's last roster. Raises as `service.keep`."""
        both = zip(self._specs, self._local, strict=True)
        pools = [local or await self._far_pool(spec, ticket) for spec, local in both]
        first, *others = pools

        def heard(roster: Roster) -> None:
            seen(roster)
            for far in self._far if roster.over >= 0 else ():
                far.over()

        tasks = [asyncio.create_task(serve_pool(pool, ticket, None, count, self._ended(pool.name))) for pool in others]
        try:
            roster = await serve_pool(first, ticket, heard, count, self._ended(first.name))
            await asyncio.gather(*tasks)
            return roster
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, pool: str) -> list[str]:
        """Its workers that have ended with an earlier process of it."""
        return [worker.id for worker in self._left.local if worker.pool == pool] if self._left else []

    def dollars(self) -> float:
        """What has been paid for so far, as far as prices are known."""
        return sum(far.dollars() for far in self._far)

    async def close(self) -> None:
        for local in self._local:
            if local:
                local.kill_all()
        await asyncio.gather(*(far.close() for far in self._far))

    def _local_pool(self, spec: PoolTerms, fresh: bool) -> LocalPool:
        s = self._settings
        return LocalPool(
            join_command(self._folder / TICKET, self._script, self._arguments, self._prepare),
            logs=self._folder / LOGS,
            threads=s.threads,
            environ={
                **os.environ,
                **cpu.of(s.bits),
                "FARANDOLE_CODE": str(self._folder / CODE),
                "FARANDOLE_PACK": s.job.pack if s.job else "",
            },
            tell=self._show,
            name=spec.name,
            fresh=fresh,
        )

    async def _far_pool(self, spec: PoolTerms, ticket: Ticket) -> RemotePool:
        job, spending = self._settings.job, self._settings.spending
        assert job is not None, "a run with pools of other hosts packs its code"
        context = PoolContext(
            name=spec.name, run=self._settings.tag, ticket=ticket, job=job, logs=self._folder / LOGS,
            until=math.inf if spending.until is None else spending.until, keep_failed_s=spending.keep_failed_s,
        )  # fmt: skip
        pool = await kind_of(spec.kind).open(spec, context)
        self._far.append(pool)
        for worker in self._left.far if self._left else ():
            if worker.pool == spec.name:
                pool.remember(worker.id, worker.host)
        return pool


# --- supervise --------------------------------------------------------------------------------------------------------

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
        self._failures: dict[str, FailedEvent] = {}  # by worker, each one's first
        self._over: OverEvent | None = None
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
        if isinstance(line, StartingEvent | ViewEvent | StepLine):
            self._connecting.set()
        if isinstance(line, FailedEvent):
            self._failures.setdefault(line.worker, line)
        elif isinstance(line, OverEvent):
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
