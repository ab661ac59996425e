"""The coordinator as `farandole run` has it: one process after the other, at one socket that is bound here.

    it dies            it is started again; `FAST_DEATHS` in a row end the run
    it does not answer for `silence_s`: it is killed, and so started again (see `watchdog.py`)

What passes from one to the next is the run's folder, the memory for the books (`coordinator/journal.py`) and the
socket (`coordinator/listener.py`).
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from farandole.cli.watchdog import START_S, until_silent
from farandole.control.run_folder import COORDINATOR_LOG, RECORD, TICKET
from farandole.control.ticket import Ticket, load
from farandole.coordinator import journal
from farandole.coordinator.listener import bind, parse, port_of
from farandole.coordinator.process import CoordinatorRecord
from farandole.errors import FarandoleError
from farandole.platform.files import append, decoded
from farandole.platform.process import up_to

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
        self._books = journal.allot()
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
                    "--die-with", str(os.getpid()), "--books", str(self._books),
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
