"""A pool's fork server: workers are asked of it one after the other, and have begun when it answers.

Invariant: each start that is asked for becomes one process, forked or begun afresh; or none, if it was called off
before its turn. The server loads torch while the coordinator starts. One that ends, or says nothing for `PATIENCE_S`,
is replaced by another as soon as a worker is wanted. One that has never forked anything is not: then, as where a forked
process would not be what a new one is, each worker starts an interpreter of its own, and that is said once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from farandole.platform.process import Command, Forked, ForkServer, Lifeline, take_spare

SERVER = "farandole.worker.fork_server"
SLOW = "each worker starts an interpreter of its own, which takes seconds"
PATIENCE_S = 60.0  # loading torch takes 3 s, forking a tenth


@dataclass(frozen=True, kw_only=True)
class Start:
    """A worker to be started, with its whole environment and its log file."""

    worker: str
    environ: Mapping[str, str]
    log: BinaryIO


class Forks:
    """Needs a running event loop. `words` follow the interpreter in the workers' command; `loaded`: modules.

    began: called with each start, its process, and the lifeline that this hangs on. afresh: called with a start for
    which nothing can be forked. tell: a line for whoever watches the run.
    """

    def __init__(
        self, words: Sequence[str], loaded: Sequence[str], environ: Mapping[str, str], *,
        began: Callable[[Start, Forked, Lifeline], None], afresh: Callable[[Start], None], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._words = list(words)
        self._loaded = list(loaded)
        self._environ = environ
        self._loop = asyncio.get_running_loop()
        self._began, self._afresh, self._tell = began, afresh, tell
        self._waiting: deque[Start] = deque()
        self._asked: tuple[Start, Lifeline] | None = None  # and not answered
        self._server: ForkServer | None = None
        self._fit = self._proven = self._over = False
        self._patience: asyncio.TimerHandle | None = None
        self._begin()

    @property
    def asking(self) -> bool:
        """There may be a process that nobody has named yet."""
        return self._asked is not None

    def start(self, start: Start) -> None:
        """Returns at once."""
        if self._over:
            self._afresh(start)
            return
        self._waiting.append(start)
        if self._server is None:
            self._begin()
        self._ask()

    def call_off(self, worker: str) -> Start | None:
        """The start of a worker whose turn has not come; None where it has."""
        for start in self._waiting:
            if start.worker == worker:
                self._waiting.remove(start)
                return start
        return None

    def close(self) -> None:
        """End the server, and what nobody has named yet. The last thing that a pool does; more than once is once."""
        self._over = True
        self._end_server()
        asked, self._asked = self._asked, None
        if asked:
            asked[0].log.close()
            asked[1].abandon()
        while self._waiting:
            self._waiting.popleft().log.close()

    def _begin(self) -> None:
        self._fit = self._proven = False
        try:
            self._server = take_spare(self._environ) or ForkServer.start(SERVER, self._loaded, self._environ)
        except OSError as error:
            self._give_up(f"the fork server can't be started ({error.strerror})")
            return
        self._loop.add_reader(self._server.fileno(), self._heard)
        self._wait()

    def _ask(self) -> None:
        if self._server is None or not self._fit or self._asked or not self._waiting:
            return
        try:
            lifeline = Lifeline()
        except OSError:  # no descriptors: who begins afresh is told why
            self._afresh(self._waiting.popleft())
            return
        start = self._waiting.popleft()
        self._asked = start, lifeline
        command = Command(words=self._words, environ=start.environ, folder=str(Path.cwd()))
        with Path(os.devnull).open("rb") as nothing:
            streams = nothing.fileno(), start.log.fileno(), start.log.fileno()
            try:
                self._server.ask(command, streams, self._asked[1])
            except OSError:
                self._lost()
                return
        self._wait()

    def _wait(self) -> None:
        self._patience = self._loop.call_later(PATIENCE_S, self._lost)

    def _heard(self) -> None:
        assert self._server is not None
        assert self._patience is not None
        self._patience.cancel()
        word = self._server.receive()
        if word is None:
            self._lost()
        elif not self._fit:
            if word["unfit"]:
                self._give_up(word["unfit"])
                return
            self._fit = True
        elif self._asked:
            (start, lifeline), self._asked = self._asked, None
            if "pid" in word:
                self._proven = True
                lifeline.handed_over()
                self._began(start, Forked(word["pid"]), lifeline)
            else:
                lifeline.abandon()
                self._afresh(start)
        self._ask()

    def _lost(self) -> None:
        """What it was asked for and has not answered is asked of the next one: see `platform/process.py`."""
        self._end_server()
        if self._asked:
            (start, lifeline), self._asked = self._asked, None
            lifeline.abandon()
            self._waiting.appendleft(start)
        if not self._proven:
            self._give_up("the fork server has died")
        elif self._waiting:
            self._tell("the fork server has died; another one is started")
            self._begin()

    def _give_up(self, reason: str) -> None:
        self._over = True
        self._end_server()
        self._tell(f"{SLOW}: {reason}")
        while self._waiting:
            self._afresh(self._waiting.popleft())

    def _end_server(self) -> None:
        if self._patience:
            self._patience.cancel()
        if self._server:
            self._loop.remove_reader(self._server.fileno())
            self._server.close()
            self._server = None
