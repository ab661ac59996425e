"""The supervisor of `farandole run`: coordinator process, pools, display, signals and exit code.

Invariant: when `supervise` returns or raises, the coordinator and all workers have ended. When this process is
killed instead, the kernel ends them (see `platform/process.py`).

    first Ctrl-C or SIGTERM   asks the coordinator to stop: all workers leave after the same step, the state is saved
    second                    kills all processes at once
    SIGHUP                    the same as the first SIGTERM, unless it is ignored (nohup); never counts as a second
    the coordinator ends      or does not answer: a new one is started (section "coordinators")
    the run's folder is gone  a message says so; training continues without a record
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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from farandole.checkpoint.owner import Owner, claim, this_run
from farandole.cli.deadline import begin_without, meet_deadline, target_of
from farandole.cli.exporters import Exporters
from farandole.cli.folders import lives, make_folder
from farandole.cli.takeover import Takeover
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
from farandole.observe.text import is_own_error
from farandole.platform import cpu
from farandole.platform.files import append, decoded, make, write_atomically
from farandole.platform.output import say, tell
from farandole.platform.process import up_to
from farandole.pool.base import PoolContext, RemotePool
from farandole.pool.local import OWN, LocalPool, join_command
from farandole.pool.reconciler import serve_pool
from farandole.pool.spec import kind_of
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import FailedEvent, HostEvent, OverEvent, StartingEvent, ViewEvent
from farandole.protocol.messages import Roster
from farandole.protocol.metrics import Line, StepLine
from farandole.protocol.settings import PoolTerms

if TYPE_CHECKING:
    pass


# --- watchdog ---------------------------------------------------------------------------------------------------------
#
# Checks that the coordinator's process answers, not only that it exists.
#
# A process may be frozen forever (SIGSTOP, a debugger, a mount that hangs) without being dead. So this process probes
# the coordinator every second. The coordinator counts as frozen when several probes in a row fail and they took
# `limit_s` in total. Only time in which *this* process ran counts: if both were suspended, or this one was stopped by
# Ctrl-Z, that time is not counted. A coordinator that is starting has `START_S`.

START_S = 30.0  # until a new coordinator listens
ASK_S = 1.0  # between two probes
ANSWER_S = 2.0  # timeout of a probe
LEAST = 3  # failed probes


class SilenceClock:
    """Measures how long probes have failed, in the running time of the prober. Pure; times in seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.answered_once = False
        self._missed = 0
        self._silent_s = 0.0

    def record_answer(self) -> None:
        self.answered_once = True
        self._missed, self._silent_s = 0, 0.0

    def missed(self, took_s: float) -> bool:
        """Records a failed probe that took `took_s`. Returns True if the coordinator counts as frozen."""
        self._missed += 1
        self._silent_s += min(took_s, ASK_S + ANSWER_S)
        limit_s = self.limit_s if self.answered_once else max(START_S, self.limit_s)
        return self._missed >= LEAST and self._silent_s >= limit_s


async def until_silent(ticket: Ticket, limit_s: float) -> None:
    """Returns when the coordinator of `ticket` counts as frozen."""
    loop, api, silence = asyncio.get_running_loop(), Api(ticket, timeout_s=ANSWER_S), SilenceClock(limit_s)
    while True:
        began = loop.time()
        await asyncio.sleep(ASK_S)
        try:
            await asyncio.to_thread(api.alive)
            silence.record_answer()
        except (CoordinatorUnreachable, UsageError):
            if silence.missed(loop.time() - began):
                return


# --- coordinators -----------------------------------------------------------------------------------------------------
#
# The coordinator processes of `farandole run`, one after the other. They share one socket that is bound here.
#
#     it dies            a new one is started; more than `FAST_DEATHS` fast deaths in a row end the run
#     it does not answer for `silence_s`: it is killed, and a new one is started (section "watchdog")
#
# A coordinator passes to the next one: the run's folder, the memory for the state (`coordinator/journal.py`) and the
# socket (`coordinator/listener.py`).

POLL_S = 0.02
OVER_S = 10.0
FAST_S, FAST_DEATHS = 5.0, 5  # after 5 deaths in a row, within 5 s or before they serve, the next ends the run
LAST_WORDS = 500  # characters of its output that an error shows


class Coordinators:
    """Starts coordinators, the first one at construction. `again`: another process had one for this run before.

    Call `over` when the run is over. Call `close` in any case; after it no coordinator is alive.

    Raises:
        UsageError: the run's address can't be used for listening.
        FarandoleError: the run's folder is gone.
    """

    def __init__(self, folder: Path, listen: str, show: Callable[[str], None], *, is_restart: bool = False) -> None:
        self._folder = folder
        self._show = show
        self._over = False
        self._over_event = asyncio.Event()
        host, port = parse(listen)
        self._listener = bind(host, port or (port_of(folder) if is_restart else 0))
        self._state = journal.allocate_state_memory()
        self._process = self._start(*(["--again"] if is_restart else []))

    async def ticket(self, given_up: asyncio.Event) -> Ticket | None:
        """Returns the run's ticket once the first coordinator serves, or None if `given_up` is set before.

        Raises:
            FarandoleError: the coordinator did not start.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        first = self._process
        while not self._has_served():
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
        """Starts a new coordinator whenever one dies. Never returns.

        Raises:
            FarandoleError: they keep dying.
        """
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            since = loop.time()
            await self.ended(math.inf)
            if self._process.poll() == 0:  # the run may be over, and this news may arrive later
                await up_to(OVER_S, self._over_event)
            if self._over:
                await asyncio.Future()  # expected: the pool cleans up meanwhile
            deaths = 1 if self._has_served() and loop.time() - since >= FAST_S else deaths + 1
            why = _code(self._process)
            if deaths > FAST_DEATHS:
                raise FarandoleError(
                    f"the coordinator died {deaths} times in a row ({why}); the run ends"
                    f"{self._last_words()}; its output is in {self._folder / COORDINATOR_LOG}"
                )
            if self._process.poll() == 0:
                self._show(
                    "the coordinator has ended, but no word came whether the run is over; starting it again to ask"
                )
            else:
                self._show(f"the coordinator died ({why}); restarting it, training continues")
            await asyncio.sleep(POLL_S * 2**deaths)
            if not self._over:
                self._process = self._start("--again")

    async def keep_watch(self, ticket: Ticket, silence_s: float) -> None:
        """Kills each coordinator that is frozen, so that `tend` starts a new one. Never returns."""
        while True:
            watched = self._process
            await until_silent(ticket, silence_s)
            if self._process is watched and watched.poll() is None and not self._over:
                self._show(f"the coordinator has not answered for {silence_s:g} s and is killed")
                watched.kill()

    def _has_served(self) -> bool:
        """Returns True if the present coordinator has written its record, which it does once it serves."""
        record = self._folder / RECORD
        return record.exists() and _pid(record) == self._process.pid

    async def ended(self, timeout_s: float) -> None:
        """Waits until the present coordinator has ended, at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._process.poll() is None and loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    def over(self) -> None:
        """Records that the run is over: no further coordinator is started or waited for."""
        self._over = True
        self._over_event.set()
        self._listener.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.close()
        os.close(self._state)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name != "FARANDOLE_WORKER"}  # see `Strays`
        with self._log() as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "farandole.coordinator.process", str(self._folder),
                    "--die-with", str(os.getpid()), "--state", str(self._state),
                    "--listener", str(self._listener.fileno()), *options,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environ,
                pass_fds=(self._state, self._listener.fileno()),
            )  # fmt: skip

    def _log(self) -> BinaryIO:
        try:
            return append(self._folder / COORDINATOR_LOG)
        except OSError as error:
            if not self._folder.is_dir():
                raise FarandoleError(f"{self._folder} is gone; no coordinator can be started without it") from None
            self._show(f"{self._folder / COORDINATOR_LOG} can't be written: {error.strerror}")
            return Path(os.devnull).open("ab")

    def _last_words(self) -> str:
        """Returns ": " and the last line of the coordinator's output; "" if there is no output."""
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
# The pools of `farandole run`: created from `--pool`, each with a reconciler of its own, closed together.
#
# Invariant: when `close` has returned, no process of a local pool is left, and the agents of remote hosts that could
# be reached have ended with all processes that they started.


UNPRICED = ("local", "ssh")  # kinds of pools whose cost farandole does not know


def check(
    specs: Sequence[PoolTerms], listen: str, show: Callable[[str], None], *, sized: bool = True, priced: bool = False
) -> None:
    """Checks the pools before anything is created.

    `show` prints a note about a pool. `sized`: the target number of workers is given. `priced`: the prices must be
    known.

    Raises:
        UsageError: a pool can't be created as requested.
    """
    for kind in [s.kind for s in specs if s.size is None and not sized and not kind_of(s.kind).is_sized(s)]:
        raise UsageError(
            f"--pool {kind} has no size, and there is no --workers: give a number, as --pool {kind},size=2"
        )
    if priced and all(spec.kind in UNPRICED for spec in specs):
        raise UsageError("--max-cost: it counts the instances of an ec2 pool, and there is none; use --max-hours")
    for spec in specs:
        kind_of(spec.kind).check(spec, listen, show, priced=priced)


class Pools:
    """The pools of one run. Call `keep` once the ticket exists, and `close` in any case. Needs a running event loop."""

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], specs: Sequence[PoolTerms], *,
        prepare: str, fresh: bool, show: Callable[[str], None], takeover: Takeover | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._script, self._arguments = settings, script, arguments
        self._specs = specs or (PoolTerms(kind="local", name=OWN),)
        self._prepare, self._show, self._takeover = prepare, show, takeover
        self._folder = Path(settings.folder)
        self._local = [self._local_pool(spec, fresh) if spec.kind == "local" else None for spec in self._specs]
        self._far: list[RemotePool] = []

    async def keep(self, ticket: Ticket, on_first_roster: Callable[[Roster], None], count: int) -> Roster:
        """Serves the pools until the run is over and all workers have ended.

        Returns the last roster of the first pool. Raises as `keep` in `pool/reconciler.py`.
        """
        both = zip(self._specs, self._local, strict=True)
        pools = [local or await self._far_pool(spec, ticket) for spec, local in both]
        first, *others = pools

        def on_roster(roster: Roster) -> None:
            on_first_roster(roster)
            for far in self._far if roster.over >= 0 else ():
                far.over()

        tasks = [asyncio.create_task(serve_pool(pool, ticket, None, count, self._ended(pool.name))) for pool in others]
        try:
            roster = await serve_pool(first, ticket, on_roster, count, self._ended(first.name))
            await asyncio.gather(*tasks)
            return roster
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, pool: str) -> list[str]:
        """Returns the ids of the pool's workers that ended with an earlier process of `farandole run`."""
        return [worker.id for worker in self._takeover.local if worker.pool == pool] if self._takeover else []

    def dollars(self) -> float:
        """Returns the cost so far, in dollars, of all instances whose price is known."""
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
                **cpu.environment_of(s.bits),
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
            wanted=self._settings.wanted,
        )  # fmt: skip
        pool = await kind_of(spec.kind).open(spec, context)
        self._far.append(pool)
        for worker in self._takeover.far if self._takeover else ():
            if worker.pool == spec.name:
                pool.remember(worker.id, worker.host)
        return pool


# --- supervise --------------------------------------------------------------------------------------------------------

END_S = 8.0  # for the coordinator to end once the run is over, and for its last lines to arrive
FOLDER_S = 1.0  # between two checks that the run's folder exists
LOADING_S, LONGEST_WAIT_S = 5.0, 60.0  # first and longest time between messages while no worker has connected


class Supervisor:
    """One run of one script. Use an instance once, from the main thread.

    `flags`: the options of the command, which a script that fails may have got by mistake.

    Attributes:
        silence_s: after this long without an answer, a coordinator is killed and a new one is started.
    """

    silence_s = 15.0

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], display: Display, prepare: str = "",
        fresh: bool = False, specs: Sequence[PoolTerms] = (), takeover: Takeover | None = None,
        flags: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._settings = settings
        self._flags = flags
        self._folder = Path(settings.folder)
        self._script = script
        self._arguments = arguments
        self._prepare = prepare
        self._fresh = fresh or bool(prepare)  # --prepare may install the modules that would have been loaded
        self._specs = specs
        self._takeover = takeover
        self._display = display
        self._written = Written(self._folder, settings.prices, settings.checkpoints.url)
        self._failures: dict[str, FailedEvent] = {}  # the first failure of each worker
        self._over: OverEvent | None = None
        self._ticket: Ticket | None = None
        self._signals = 0
        self._connected = False
        self._earlier = 0
        self._forced: asyncio.Event = asyncio.Event()
        self._connecting = asyncio.Event()  # set when a worker has connected
        self._has_host = not specs or any(spec.kind == "local" for spec in specs)  # True: a worker can have started
        self._code = 0  # 128 + the first signal
        self._asking: set[asyncio.Task[None]] = set()
        self._target = target_of(settings)

    def supervise(self) -> int:
        """Returns the run's exit code.

        Raises:
            FarandoleError: the coordinator did not start, or died.
            UsageError: the run's address can't be used for listening.
        """
        with self._display:
            roster = asyncio.run(self._supervise())
        return self._ended(roster)

    def _ended(self, roster: Roster | None) -> int:
        """Says why the run has failed, if it has. Returns its exit code."""
        if roster is None:
            if self._code:
                say("farandole: killed")
            return self._code
        ended = [
            w for w in self._failures if roster.reason == f"the script failed on {w}"
        ]  # other failed workers were replaced
        failure = self._failures[ended[0]] if ended else None
        if failure and is_own_error(failure):
            say(f"farandole: error on {failure.worker}: {failure.traceback}")
        elif failure:
            say(f"farandole: {roster.reason}:")
            say(failure.traceback)
            if (log := self._folder / LOGS / f"{failure.worker}.log").exists():
                say(f"farandole: the whole traceback is in {log}")
        elif roster.over not in (0, self._code):
            say(f"farandole: error: {roster.reason}")
        own = (word for word in self._arguments if word.startswith("--") and word.partition("=")[0] in self._flags)
        if failure and (after := [*own]):
            say(
                f"farandole: {', '.join(after)} came after the script's name, so the script got it; options of "
                f"`farandole run` come before the script"
            )
        return roster.over

    async def _supervise(self) -> Roster | None:
        """Returns the last roster, or None if a second signal cut the run short."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        settings = msgspec.json.encode(self._settings) + b"\n"
        try:
            write_atomically(self._folder / SETTINGS, settings)
            make(self._folder / LOGS)
        except OSError as error:
            raise FarandoleError(f"the run's folder {self._folder} can't be written: {error.strerror}") from None
        self._earlier = len(
            list((self._folder / LOGS).glob("*.log"))
        )  # logs of the run's earlier workers, if it is resumed
        show, is_restart = self._display.show, self._takeover is not None
        self._coordinators = Coordinators(self._folder, self._settings.listen, show, is_restart=is_restart)
        pools = Pools(
            self._settings, self._script, self._arguments, self._specs, prepare=self._prepare, fresh=self._fresh,
            show=show, takeover=self._takeover,
        )  # fmt: skip
        exporters = Exporters(self._folder, self._settings.exports, show)
        try:
            self._ticket = await self._coordinators.ticket(self._forced)
            if self._ticket:
                exporters.begin(self._ticket.address)
            roster = await self._accompany(pools, self._ticket) if self._ticket else None
            if roster is not None:
                await pools.close()  # the coordinator notifies the agents
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
        """Returns when all processes must be killed at once."""
        await self._forced.wait()

    async def _mind_folder(self) -> None:
        """Reports once that the run's folder is gone."""
        while self._folder.is_dir():
            await asyncio.sleep(FOLDER_S)
        self._display.show(
            f"THE RUN'S FOLDER IS GONE: {self._folder}; training continues without a record, and a coordinator that "
            f"dies can't be restarted; Ctrl-C stops the run, with a checkpoint"
        )

    async def _explain_silence(self) -> None:
        """Reports what the first worker does until it connects: after `LOADING_S`, then at growing intervals."""
        began, wait_s = time.monotonic(), LOADING_S
        while True:
            await up_to(wait_s, self._connecting)
            if self._connecting.is_set():
                return
            spent_s = time.monotonic() - began
            reason = f"its process has started and loads torch; its output is in {self._folder / LOGS}"
            if not self._has_host:
                reason = f"no host of pool {' or '.join(spec.name for spec in self._specs)} has joined yet"
            self._display.show(f"waiting for the first worker for {spent_s:.0f} s: {reason}")
            wait_s = min(5 * wait_s, LONGEST_WAIT_S)

    async def _limit(self, pools: Pools, ticket: Ticket) -> None:
        """Stops the run when it reaches its limit of time or cost."""
        spending = self._settings.spending
        while not (reason := spending.over(time.time(), pools.dollars())):
            await asyncio.sleep(FOLDER_S)
        self._display.show(f"stopping after this step: {reason}")
        await _stop(Api(ticket), reason, 0)

    async def _on_demand(self, ticket: Ticket) -> None:
        """Keeps the target of the last pool as the deadline requires. Returns at once if there is no deadline."""
        if self._target:
            current = None if self._takeover else 0
            pool = self._settings.pools[-1].name
            await meet_deadline(pool, Api(ticket), self._target, self._display.show, current)

    async def _accompany(self, pools: Pools, ticket: Ticket) -> Roster | None:
        if self._target and not self._takeover:
            await begin_without(self._settings.pools[-1].name, Api(ticket))
        keeping = asyncio.create_task(pools.keep(ticket, self._on_roster, self._earlier))
        watching = asyncio.create_task(show_lines(ticket, self._display, self._noted))
        ended = asyncio.Event()
        relaying = asyncio.create_task(show_output(self._folder, self._display, ended))
        forced = asyncio.create_task(self._enough())
        tending = asyncio.create_task(self._coordinators.tend())
        watchdog = asyncio.create_task(self._coordinators.keep_watch(ticket, self.silence_s))
        minding = asyncio.create_task(self._mind_folder())
        summing = asyncio.create_task(keep_figures(self._written, self._display))
        limiting = asyncio.create_task(self._limit(pools, ticket))
        deciding = asyncio.create_task(self._on_demand(ticket))
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
                deciding,
                summing,
                loading,
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ended.set()
            await relaying

    def _on_roster(self, roster: Roster) -> None:
        self._display.wanted = roster.wanted or self._display.wanted  # 0 near the end of the run
        if self._signals and not self._connected:
            self._ask_to_stop()  # not earlier: the pool would not be notified that the run is over
        self._connected = True
        if roster.over >= 0:
            self._coordinators.over()

    def _noted(self, line: Line) -> None:
        if isinstance(line, StartingEvent | ViewEvent | StepLine):
            self._connecting.set()
        if isinstance(line, FailedEvent):
            self._failures.setdefault(line.worker, line)
        elif isinstance(line, HostEvent):
            self._has_host |= line.state == "joined"
        elif isinstance(line, OverEvent):
            self._over = line
        if self._target:
            self._target.take(line)

    # --- signals -------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGHUP and self._signals:
            return  # closing a terminal may send it twice, from the kernel and from the shell
        self._signals += 1
        self._code = self._code or 128 + signum
        if self._signals > 1:
            self._forced.set()
            return
        self._display.show("stopping after this step; press Ctrl-C again to kill all processes at once")
        if self._connected:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        assert self._ticket is not None
        reason = f"farandole run got {signal.Signals(self._code - 128).name}"
        self._asking.add(asyncio.create_task(_stop(Api(self._ticket), reason, self._code)))


async def _stop(api: Api, reason: str, code: int) -> None:
    """Asks the coordinator to stop until it answers. It is cancelled with all other tasks when the run is over."""
    while True:
        try:
            await asyncio.to_thread(api.stop, reason, code)
            return
        except CoordinatorUnreachable:
            await asyncio.sleep(WATCH_S)


def _not_alive(owner: Owner, folder: Path) -> bool:
    del owner, folder
    return False


def go_on(was: Takeover, prepare: str, fresh: bool, *, taken_over: bool = False) -> int:
    """Continues a run whose `farandole run` was killed, with its settings. Returns the run's exit code.

    `taken_over`: the user states that the former machine is lost or cut off. So this run takes the checkpoint folder or
    URL, even if that machine seems to be alive.
    """
    settings = was.settings
    with contextlib.suppress(FileNotFoundError):  # on another machine
        os.chdir(settings.directory)
    script, *arguments = settings.command
    make_folder(Path(settings.folder), script, run_is_alive=True)
    if settings.checkpoints.url and settings.checkpoints.identity:
        claim(
            settings.checkpoints.url,
            this_run(settings.checkpoints.identity, Path(settings.folder), inside=False),
            alive=_not_alive if taken_over else lives,
        )
    tell(f"run folder: {settings.folder}")
    tell(was.summary)
    display = open_display(sys.stdout)
    display.wanted = settings.wanted or 0
    return Supervisor(settings, script, arguments, display, prepare, fresh, settings.pools, was).supervise()
