"""The control connection of a worker to its coordinator, which lasts as long as the run and the worker's lease.

The pure `protocol/worker/session.py` decides which messages are sent, when, and the timeouts; this module has the
socket and the threads. One thread runs an event loop. It has three tasks while connected (receive, send, heartbeat),
and one that always runs: watch for stalled peers and for the end of the lease. When the connection breaks, or is silent
for too long, it reconnects, with backoff and without a limit of attempts; training continues meanwhile.

Every call of the session holds `condition`, and so does every call of the member from the training side. Their messages
are queued in that order (`tell`). So the coordinator receives a worker's actions in the order in which they happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import final

import aiohttp

from farandole.collective.arena import Arena, Ordinary
from farandole.collective.codec import CODECS
from farandole.control.client import dial
from farandole.control.ticket import Ticket, newest
from farandole.errors import CheckpointsGone, CoordinatorUnreachable, FarandoleError, ProtocolError, Refused
from farandole.platform.extras import require_zstd
from farandole.platform.process import age_s, beside
from farandole.protocol import messages as m
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.session import Session
from farandole.protocol.worker.state_machine import Action, CompareDigests, Connect, Exit, Save, WorkerStateMachine
from farandole.settings import Settings
from farandole.worker.context import NoTraining, Training, WorkerContext
from farandole.worker.groups import Groups
from farandole.worker.hung import leave_aside, save_aside, write_stacks
from farandole.worker.process_exit import exit_after_grace

_log = logging.getLogger(__name__)
_RANDOM = random.SystemRandom()  # Python's own generator is the script's: a draw here would change its results

CLOSE_S = 2.0  # limit for sending the last messages

Socket = aiohttp.ClientWebSocketResponse[bool]


@final
class Connected(WorkerContext):
    """A worker with a coordinator.

    `sent` and `received` count messages by kind; tests use them to show that no step waits for the coordinator. `leave`
    ends the process even if its training thread is busy.

    Raises:
        CoordinatorUnreachable: no process answers at the ticket's address, or one that does not have the ticket's key.
        Refused: the run does not admit this worker.
    """

    def __init__(self, ticket: Ticket, settings: Settings, *, leave: Callable[..., None] = exit_after_grace) -> None:
        hello = m.Hello(
            kind="worker", worker=settings.worker, host=settings.host, pid=os.getpid(), pool=settings.pool,
            session=secrets.token_hex(16), zone=settings.zone,
        )  # fmt: skip
        machine = WorkerStateMachine(settings.worker)
        self._session = Session(hello, machine, self.activity, lambda: self._training.waiting_for(), time.monotonic())
        super().__init__(machine, self._session.instructions, already_s=0.0 if settings.returns else age_s())
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._ticket, self._source, self._interface = ticket, settings.ticket, settings.interface
        self._leave = leave
        self._training: Training = NoTraining()
        self.memory = Arena() if settings.shared_memory else Ordinary()
        self._groups = Groups(self.groups, self.tell, self.memory, self.link_meter)
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()  # set when there are messages to send
        self._closing = False
        first: Future[m.Welcome] = Future()
        self._thread = threading.Thread(target=self._run, args=(first,), name="control", daemon=True)
        self._thread.start()
        self.welcome = first.result()
        require_zstd(self.terms.codec)
        self._groups.codec = CODECS[self.terms.codec]

    @property
    def terms(self) -> m.RunTerms:
        return self.welcome.terms

    def set_training(self, training: Training) -> None:
        self._training = training

    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        self.tell(m.Ready(signature=signature, unreached=unreached))

    def short(self, view: View, error: CheckpointsGone) -> None:
        self.tell(m.CannotStart(view=view.number, reason=str(error)))

    def tell(self, message: m.Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the run
            self._loop.call_soon_threadsafe(self._queue, message)

    def add_line(self, line: m.Line) -> None:
        with self.condition:
            self._session.add_line(line)

    def report_script_end(self, fingerprint: str, after: m.StepTime) -> None:
        with self.condition:
            self.tell(self.state_machine.script_end_report(fingerprint, after))

    def close(self) -> None:
        """Closes the connection after it has sent the queued messages, for at most `CLOSE_S` seconds."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._close)
        self._thread.join(CLOSE_S)

    def _commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        return self._session.commit_message(
            time.monotonic(), view=view, round_=round_, compute_us=compute_us, shards=shards
        )

    def _end_round(self, commits: Sequence[CommitMessage]) -> bool:
        return self._session.end_round(time.monotonic(), commits)

    # --- the connection's thread -----------------------------------------------------------------------------

    def _run(self, first: Future[m.Welcome]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(beside(self._reconnect_loop(first), self._watch()))
        except (FarandoleError, OSError) as error:
            if not first.done():
                first.set_exception(error)
                return
            with self.condition:
                self._perform([self._gone(error)])
        finally:
            first.cancel()  # has no effect if it is done; otherwise the constructor would wait forever
            self._loop.close()

    async def _reconnect_loop(self, first: Future[m.Welcome]) -> None:
        """Connects, and reconnects, until this worker is done. The first Welcome goes to `first`."""
        session, logged = self._session, False
        while self._goes_on():
            try:
                self._ticket = newest(self._ticket, self._source)
                async with dial(self._ticket, session.patience_s) as socket:
                    await self._run_session(socket, first)
                logged = False
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if session.unreachable(time.monotonic()):
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {self._ticket.address} ({error or type(error).__name__}): is "
                        f"the run over, or is the ticket outdated?"
                    ) from error
            except CoordinatorUnreachable as error:  # another process answers
                if not session.met:
                    raise
                if not logged:
                    logged = True
                    _log.warning("%s; retrying until this worker's lease ends", error)
            if self._goes_on():
                await asyncio.sleep(session.retry_s(_RANDOM.random()))

    def _goes_on(self) -> bool:
        return not self._closing and (self.instructions.exit is None or self.instructions.exit.within_s is not None)

    async def _run_session(self, socket: Socket, first: Future[m.Welcome]) -> None:
        """Uses one connection from Hello to its end."""
        session = self._session
        self._groups.interface = self._interface or socket.get_extra_info("sockname")[0]
        with self.condition:
            hello = session.on_connected(time.monotonic())
        try:
            await socket.send_bytes(m.encode(hello))
            frame = await socket.receive(session.patience_s)
            if frame.type is not aiohttp.WSMsgType.BINARY:
                raise ConnectionError("the coordinator closed the connection")
            answer = m.decode_from_coordinator(frame.data)
            self._on_message(hello.attempt, answer)
            if not isinstance(answer, m.Welcome):
                return
            if first.done():
                _log.warning("reconnected to the coordinator")
            else:
                first.set_result(answer)
            await self._serve(socket, hello.attempt)
        except Refused as error:
            raise Refused(f"{self._ticket.address}: {error}") from None
        finally:
            with self.condition:
                session.on_closed(hello.attempt)

    async def _serve(self, socket: Socket, attempt: int) -> None:
        parts = (self._receive_loop(socket, attempt), self._send_loop(socket), self._heartbeat())
        tasks = [asyncio.create_task(part) for part in parts]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        errors = [repr(task.exception()) for task in done if task.exception()]
        if self._goes_on():
            why = f" ({', '.join(errors)})" if errors else ""
            _log.warning("lost the connection to the coordinator%s; reconnecting", why)

    async def _receive_loop(self, socket: Socket, attempt: int) -> None:
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                break
            message = m.decode_from_coordinator(frame.data)
            self.received[type(message).__name__] += 1
            _log.debug("received %s", type(message).__name__)
            self._on_message(attempt, message)
            if not self._goes_on():
                return

    def _on_message(self, attempt: int, message: m.Message) -> None:
        with self.condition:
            try:
                self._perform(self._session.on_message(attempt, message, time.monotonic()))
            except ProtocolError as error:
                self._perform([self._gone(error)])
            self.condition.notify_all()
        self._wake.set()

    def _gone(self, error: Exception) -> Exit:
        exit_ = Exit(str(error), 1)
        self.instructions.leave(exit_)
        return exit_

    def _queue(self, message: m.Message) -> None:
        with self.condition:
            self._session.tell(message, time.monotonic())
        self._wake.set()

    def _close(self) -> None:
        """Runs in the event loop, after the `_queue` call of every earlier message."""
        self._closing = True
        self._wake.set()

    async def _send_loop(self, socket: Socket) -> None:
        closing = False
        while not closing:
            await self._wake.wait()
            self._wake.clear()
            closing = self._closing  # read before the messages are taken, so that these are the last
            with self.condition:
                messages = self._session.take()
            for message in messages:
                self.sent[type(message).__name__] += 1
                _log.debug("sending %s", type(message).__name__)
                await socket.send_bytes(m.encode(message))

    async def _heartbeat(self) -> None:
        while not self._session.silent(time.monotonic()):
            with self.condition:
                self._session.beat(time.monotonic())
            self._wake.set()
            await asyncio.sleep(self._session.terms.heartbeat_s)
        raise TimeoutError(f"no message for {self._session.patience_s:g} s")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._session.terms.heartbeat_s)
            with self.condition:
                self._perform(self._session.watch(time.monotonic()))

    # --- actions ---------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self._connect(action)
                case Exit():
                    self.condition.notify_all()
                    self._leave(
                        action.code, saves=action.save, trains=self.state_machine.synced, within_s=action.within_s
                    )
                    leave_aside(self, self._training, action)
                case Save():
                    self.condition.notify_all()
                    save_aside(self, self._training, action)
                case CompareDigests():
                    threading.Thread(target=lambda: self.tell(self._training.digests()), daemon=True).start()
                case m.Published():
                    self._groups.put(action)
                case m.Stacks():
                    write_stacks(action.reason)
                case m.Trace():
                    self.tracer.ask(action, self._training.waiting_for())
                case _:
                    self.tell(action)

    def _connect(self, connect: Connect) -> None:
        current, view = self.state_machine.view, connect.view
        keep = (view.group, current.group if current else 0)
        self._groups.prepare_for(view, keep)  # a view is proposed only after all members have left earlier ones
        self._groups.arrange(connect, self.worker, lambda: self._training.prepare(view), lambda: self._connected(view))

    def _connected(self, view: View) -> None:
        with self.condition:
            self._perform(self.state_machine.connected(view))
            self.condition.notify_all()
