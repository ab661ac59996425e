"""The agent of a host: starts the host's workers as its pool orders, and tells what has become of them.

It reaches the run as its workers do, with the run's ticket, so nobody has to reach the host. It outlives connections,
coordinators and the pool's process: its workers train on meanwhile. It ends when its pool says so, when its ticket is
not good any more, or when it has been without a coordinator and without workers for longer than the orphan limit. No
worker outlives it (see `local.py`). What is due is decided in `duty.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from farandole.control.client import Subscription, subscribe, unpacked
from farandole.control.ticket import Ticket, load, newest
from farandole.errors import CoordinatorUnreachable, FarandoleError, HostNotPrepared, UsageError
from farandole.membership import hosts
from farandole.membership import messages as m
from farandole.platform.files import open_regular, opener
from farandole.platform.process import up_to
from farandole.pool.agents.duty import Duty
from farandole.pool.agents.post import LOGS, TICKET, Post, environ
from farandole.pool.local import LocalPool, join_command
from farandole.pool.notices.watch import watch
from farandole.pool.preparation import prepare, set_up
from farandole.settings import Settings

_log = logging.getLogger(__name__)

AGAIN_S, LONGEST_S = 0.2, 2.0  # between two tries to reach the coordinator
FIRST_S = 10.0  # without one, and without any order so far, an agent ends
BEAT_S = 1.0  # it says that it is there, and is answered
SILENT_S = 10.0  # without an answer the connection is given up: the coordinator's machine may be gone
FOLLOW_S = 0.1  # how often the workers' logs are looked at


class Agent:
    """`await serve()` in the main thread. `tell`: called once, when the coordinator was first reached."""

    def __init__(self, post: Post, tell: Callable[[str], None]) -> None:
        self._post, self._tell = post, tell
        self._folder, self._host = post.folder, post.host
        self._ticket: Ticket | None = None
        self._duty = Duty(secrets.token_hex(8))
        self._workers: LocalPool | None = None
        self._listening: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._sent: dict[str, int] = {}  # bytes of each log
        self._answered = 0.0  # when the coordinator last said something
        self._over = False

    async def serve(self) -> str:
        """Until it is over; then nothing of it is left. Returns why the host could not be prepared, "" if it was.

        Raises:
            CoordinatorUnreachable: nobody was there from the start.
            UsageError: the ticket is none.
        """
        loop, pause_s = asyncio.get_running_loop(), AGAIN_S
        reached = loop.time()
        watching = asyncio.ensure_future(watch(self._post.notices, Settings.read().metadata, self._noticed))
        try:
            while not self._over:
                try:
                    await self._converse()
                    reached, pause_s = loop.time(), AGAIN_S
                except CoordinatorUnreachable:
                    if self._duty.order is None and self._duty.state == "preparing" and pause_s == AGAIN_S:
                        raise
                orphan_s = self._duty.order.job.orphan_s if self._duty.order else FIRST_S
                if not self._duty.running and loop.time() - reached > orphan_s:
                    _log.warning("no coordinator for %g s: the agent ends", orphan_s)
                    break
                if not self._over:
                    await up_to(pause_s, self._changed)
                    pause_s = min(2 * pause_s, LONGEST_S)
        finally:
            (self._folder / TICKET).unlink(missing_ok=True)  # nobody here needs it any more
            for task in (self._preparing, self._listening, watching):
                if task:
                    task.cancel()
            if self._workers:
                self._workers.kill_all()
        return self._duty.reason if self._duty.state == "failed" else ""

    async def _converse(self) -> None:
        """One connection, to its end."""
        path = str(self._folder / TICKET)
        ticket = self._ticket = newest(self._ticket, path) if self._ticket else load(path, opener)
        hello = m.Hello(
            kind="agent", host=self._host, pid=os.getpid(), pool=self._post.pool, session=secrets.token_hex(8)
        )
        loop = asyncio.get_running_loop()
        async with subscribe(ticket, hello) as subscription:
            self._answered = loop.time()
            talking = asyncio.ensure_future(self._talk(subscription, ticket))
            try:
                while not talking.done() and loop.time() - self._answered < SILENT_S:
                    await asyncio.wait({talking}, timeout=BEAT_S)
                if talking.done():
                    talking.result()
            finally:
                talking.cancel()

    async def _talk(self, subscription: Subscription, ticket: Ticket) -> None:
        await subscription.send(self._duty.report())
        self._tell("joined")
        loop, said = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(subscription.receive())
        try:
            while not self._over:
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({receiving, changed}, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                await self._follow(subscription)
                if receiving.done():
                    message = receiving.result()
                    if message is None:
                        return
                    self._answered = loop.time()
                    self._heard(message, ticket)
                    receiving = asyncio.ensure_future(subscription.receive())
                if self._changed.is_set() or loop.time() - said > BEAT_S:
                    self._changed.clear()
                    self._act()
                    await subscription.send(self._duty.report())
                    said = loop.time()
        finally:
            receiving.cancel()

    def _heard(self, message: m.Message, ticket: Ticket) -> None:
        match message:
            case hosts.Order() if self._duty.ordered(message):
                self._sent.update(message.logs)
                self._over = message.end
                if self._preparing is None:
                    self._preparing = asyncio.ensure_future(self._prepare(message.job, ticket))
                self._changed.set()
            case m.Refused(reason=reason):
                _log.warning("the agent ends: %s", reason)
                self._over = True
            case _:
                pass

    # --- what the host does --------------------------------------------------------------------------------

    async def _prepare(self, job: hosts.Job, ticket: Ticket) -> None:
        """Once: fetch, set up, then have a pool of this host. A coordinator that is away meanwhile is waited for."""
        command, pause_s = None, AGAIN_S
        while command is None:
            try:
                command = await asyncio.to_thread(self._prepared, job, load(str(self._folder / TICKET), opener))
            except CoordinatorUnreachable:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)
            except (FarandoleError, OSError) as error:
                self._duty.state, self._duty.reason = "failed", str(error)
                self._changed.set()
                return
        self._workers = self._local_pool(job, ticket, command)
        self._listening = asyncio.ensure_future(self._listen(self._workers))
        self._duty.state = "ready"
        self._changed.set()

    def _prepared(self, job: hosts.Job, ticket: Ticket) -> list[str]:
        """The workers' command. The process is in the job's folder from then on."""
        folder = unpacked(ticket, job.pack) if job.pack else Path(job.folder)
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(f"the run's folder {folder} is not on {self._host} ({error.strerror})") from None
        if job.pack and (python := set_up(job.setup, folder, host=self._host)):
            self._begin_anew_with(python)
        if not Path(job.script).is_file():
            raise UsageError(f"the script {job.script} is not in {folder} on {self._host}")
        if job.prepare:
            try:
                prepare(job.prepare, run=ticket.secret, host=self._host)
            except HostNotPrepared as error:
                raise UsageError(str(error)) from None
        return join_command(self._folder / TICKET, job.script, job.arguments)

    def _begin_anew_with(self, python: Path) -> None:
        """What the setup has installed is for the workers, who are forked from this process's interpreter."""
        words = self._post.command(self._folder / TICKET)
        os.execv(python, [str(python), *words, "--wait"])

    def _local_pool(self, job: hosts.Job, ticket: Ticket, command: list[str]) -> LocalPool:
        environment = {**environ(ticket), "FARANDOLE_HOST": self._host, "FARANDOLE_PACK": job.pack}
        if self._post.interface:
            environment["FARANDOLE_INTERFACE"] = self._post.interface
        return LocalPool(
            command,
            logs=self._folder / LOGS,
            threads=job.threads,
            environ=environment,
            name=self._post.pool,
            tell=_log.warning,
        )

    def _noticed(self, notified: hosts.Notified | None) -> None:
        """The pool hears of it, and says what becomes of the workers."""
        self._duty.notified = notified
        self._changed.set()

    async def _listen(self, workers: LocalPool) -> None:
        while True:
            for event in await workers.events():
                self._duty.heard(event)
            self._changed.set()

    def _act(self) -> None:
        due = self._duty.due()
        for worker in due.stop:
            assert self._workers is not None
            self._workers.stop(worker)
        for worker in due.start:
            assert self._workers is not None
            self._workers.start(worker, self._host)

    async def _follow(self, subscription: Subscription) -> None:
        """What the workers have printed since."""
        for worker, sent in tuple(self._sent.items()):
            with contextlib.suppress(OSError), open_regular(self._folder / LOGS / f"{worker}.log") as log:
                log.seek(sent)
                while content := log.read(hosts.CHUNK_BYTES):
                    await subscription.send(hosts.Output(worker=worker, offset=sent, content=content))
                    sent += len(content)
                self._sent[worker] = sent
