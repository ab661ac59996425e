"""A worker that has a coordinator: the connection, kept up for as long as the run and the worker's lease last.

A thread of its own runs an event loop with three duties while connected (listen, speak, send heartbeats) and one
always: watch for stalled peers and for the end of the lease. When the connection breaks, or nothing is heard for most
of the heartbeat timeout, it connects again, with backoff, for as long as it takes; training goes on meanwhile.

What was told to a connection that broke may be lost, either way. So nothing is kept for the next one but what still
holds (`STANDING`); a worker that comes back is stopped and asked where it stands. The lease: this worker gives no word
and ends no round later than `orphan_s` after it sent the newest heartbeat that was answered; then it saves and goes.
Why that is enough is argued in `membership/reconnection.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import threading
import time
from collections.abc import Iterable, Sequence

import aiohttp

from farandole.control.dial import dial
from farandole.control.ticket import Ticket
from farandole.errors import CheckpointsGone, CoordinatorUnreachable, FarandoleError, ProtocolError, Refused
from farandole.membership import messages as m
from farandole.membership.lease import Lease
from farandole.membership.member import Action, Compare, Connect, Exit, Save
from farandole.membership.view import View, Word
from farandole.platform.output import say
from farandole.settings import Settings
from farandole.worker.departure import ORPHANED, leave_in_the_end
from farandole.worker.groups import Groups
from farandole.worker.hung import save_aside, write_stacks
from farandole.worker.metric_lines import Lines
from farandole.worker.participant import Participant
from farandole.worker.patience import held_up_by

STANDING = (m.Ready, m.Leaving, m.Failed, m.Differs, m.Finished, m.NotFinite)  # said again on every new connection
LAST = (m.NotFinite, m.Failed, m.Stopped, m.Finished)  # perhaps the last to be heard: the metrics go before it
FIRST_S = 20.0  # to reach the coordinator for the first time: it may be on its way back, also from being frozen
PATIENCE = 0.6  # of the heartbeat timeout: a worker that hears nothing is back before the coordinator gives it up
BACKOFF_S = (0.1, 1.0)  # between two tries, doubling, with jitter


class Connected(Participant):
    """A worker that has a coordinator.

    Raises:
        CoordinatorUnreachable: nobody answers at the ticket's address, or somebody who does not know the ticket.
        Refused: the run does not let this worker in.
    """

    def __init__(self, ticket: Ticket, settings: Settings) -> None:
        super().__init__(settings.worker)
        self.saves = False  # until the coordinator says so
        self._ticket = ticket
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._outgoing: asyncio.Queue[m.Message | None] = asyncio.Queue()
        self._standing: list[m.Message] = []
        self._groups = Groups(self.groups, self.tell)
        self._lines = Lines()
        self._closing = False
        self._session, self._attempt = secrets.token_hex(16), 0
        self._heard_at = 0.0
        self._greet_at = 0.0
        self._lease = Lease()
        self._watching: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.welcome: m.Welcome
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure:
            raise self._failure
        self.minimum = self.welcome.minimum

    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        self.tell(m.Ready(signature=signature, unreached=unreached))

    def short(self, view: View, error: CheckpointsGone) -> None:
        self.tell(m.Short(view=view.number, reason=str(error)))

    def tell(self, message: m.Message) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the run
            self._loop.call_soon_threadsafe(self._queue, message)

    def add_line(self, line: m.Line) -> None:
        with self.condition:
            self._lines.add(line)

    def finish(self, fingerprint: str) -> None:
        with self.condition:
            member = self.member
            view = member.view.number if member.view else 0
            self.tell(m.Finished(fingerprint=fingerprint, view=view, round=member.round, step=member.step))

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._outgoing.put_nowait(None))
        self._thread.join(2.0)

    # --- the lease -------------------------------------------------------------------------------------------

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        if self._lease.over(time.monotonic()):
            return None
        return super().word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[Word]) -> bool:
        return not self._lease.over(time.monotonic()) and super().end_round(words)

    async def _watch(self) -> None:
        """Whatever becomes of connections: who stalls is reported, and without a coordinator the lease runs out."""
        while True:
            await asyncio.sleep(self.welcome.heartbeat_s)
            waiting = self.waiting_for()
            if waiting and time.monotonic() - waiting[2] > self._stall_limit():
                view, peer, since = waiting
                self.lost(view, peer, "stalled", waited_s=max(1, round(time.monotonic() - since)))
            if self._lease.over(time.monotonic()):
                limit = self.welcome.orphan_s
                self._leave(Exit(f"no coordinator for {limit:g} s: this worker stops", ORPHANED, save=True))
                return

    def _stall_limit(self) -> float:
        """How long to wait for a peer before reporting it: ten median steps, at least the run's `stall_s`."""
        with self.condition:
            step_s = self._lines.median_step_s()
        return max(self.welcome.stall_s, 10 * (step_s or 0.0))

    # --- the connection's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stay())
        except (FarandoleError, OSError) as error:
            self._failure = error
            if self._started.is_set():
                self._leave(Exit(str(error), 1))
        finally:
            self._started.set()
            self._loop.close()

    async def _stay(self) -> None:
        """Connect, and connect again, until this worker is done."""
        wait, told = BACKOFF_S[0], False
        first_until = time.monotonic() + FIRST_S
        while not self._closing and self.exit is None:
            try:
                if await self._converse():
                    wait, told = BACKOFF_S[0], False
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if not self._started.is_set() and time.monotonic() > first_until:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {self._ticket.address} ({error or type(error).__name__}): is "
                        f"the run over, or the ticket an old one?"
                    ) from error
            except CoordinatorUnreachable as error:  # somebody else does
                if not self._started.is_set():
                    raise
                if not told:
                    told = True
                    say(f"farandole: {error}; trying again until this worker's lease is over")
            if not self._closing and self.exit is None:
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, BACKOFF_S[1])
        if self._watching:
            self._watching.cancel()

    async def _converse(self) -> bool:
        """One connection, from Hello to its end. True: the coordinator has said Welcome."""
        patience = self.welcome.heartbeat_timeout_s if self._started.is_set() else FIRST_S
        async with dial(self._ticket, patience) as socket:
            self._groups.interface = self._settings.interface or socket.get_extra_info("sockname")[0]
            self._greet_at = time.monotonic()
            self._attempt += 1
            await socket.send_bytes(m.encode(self._hello()))
            first = await socket.receive(patience)
            if first.type is not aiohttp.WSMsgType.BINARY:
                return False
            answer = m.decode_from_coordinator(first.data)
            if isinstance(answer, m.Goodbye) and self._started.is_set():
                self._obey(answer)
                return True
            if not isinstance(answer, m.Welcome):
                why = answer.reason if isinstance(answer, m.Refused) else f"answered {type(answer).__name__}"
                raise Refused(f"{self._ticket.address}: {why}")
            self._welcomed(answer)
            await self._serve(socket)
        return True

    def _hello(self) -> m.Hello:
        s = self._settings
        with self.condition:
            synced = self.member.synced
        return m.Hello(
            kind="worker", worker=self.worker, host=s.host, pid=os.getpid(), pool=s.pool, session=self._session,
            attempt=self._attempt, synced=synced,
        )  # fmt: skip

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self._started.is_set() and welcome.worker != self.worker:
            raise Refused(f"this worker was {self.worker}, and the run calls it {welcome.worker} now")
        with self.condition:
            self.welcome = welcome
            self.worker = self.member.worker = welcome.worker
            self._lines.send_after(welcome.lines)
            self._lease.welcomed(self._greet_at, welcome.orphan_s)
        self._heard_at = time.monotonic()
        self._outgoing = asyncio.Queue()
        for message in self._standing:
            self._outgoing.put_nowait(message)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
            self._started.set()
        else:
            say("farandole: the coordinator is back")

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        tasks = [asyncio.create_task(part) for part in (self._listen(socket), self._speak(socket), self._heartbeat())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        errors = [repr(task.exception()) for task in done if task.exception()]
        if not self._closing and self.exit is None:
            why = f" ({', '.join(errors)})" if errors else ""
            say(f"farandole: the connection to the coordinator is lost{why}; connecting again")

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                break
            message = m.decode_from_coordinator(frame.data)
            self._heard_at = time.monotonic()
            self.received[type(message).__name__] += 1
            match message:
                case m.Heard():
                    self._heard(message)
                case m.Saver():
                    self.saves = message.worker == self.worker
                    self.save_at_once = self.saves and message.at_once
                case m.Published():
                    self._groups.put(message)
                case m.Stacks():
                    write_stacks(message.reason)
                case _:
                    self._obey(message)
            if self.exit is not None:
                return

    def _heard(self, message: m.Heard) -> None:
        self._lease.heard(message.beat, self.welcome.orphan_s)
        with self.condition:
            self._lines.forget(message.lines)

    def _obey(self, message: m.Message) -> None:
        with self.condition:
            self.saves = self.saves and not isinstance(message, m.Demoted)
            try:
                actions = self.member.receive(message)
            except ProtocolError as error:
                actions = [Exit(str(error), 1)]
            self._perform(actions)
            self.condition.notify_all()

    def _queue(self, message: m.Message) -> None:
        if isinstance(message, m.NotFinite):  # the newest one stands
            self._standing = [said for said in self._standing if not isinstance(said, m.NotFinite)]
        if isinstance(message, LAST):
            self._outgoing.put_nowait(self._beat(0))
        if isinstance(message, STANDING) or (isinstance(message, m.Restored) and message.done):
            self._standing.append(message)
        self._outgoing.put_nowait(message)

    async def _speak(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        outgoing = self._outgoing
        while True:
            message = await outgoing.get()
            if message is None:
                return
            self.sent[type(message).__name__] += 1
            await socket.send_bytes(m.encode(message))

    async def _heartbeat(self) -> None:
        limit = PATIENCE * self.welcome.heartbeat_timeout_s
        while time.monotonic() - self._heard_at <= limit:
            self._outgoing.put_nowait(self._beat(self._lease.beat(time.monotonic())))
            await asyncio.sleep(self.welcome.heartbeat_s)
        raise TimeoutError(f"nothing heard for {limit:g} s")

    def _beat(self, number: int) -> m.Heartbeat:
        with self.condition:
            member = self.member
            leads = member.view is not None and member.view.members[:1] == (self.worker,)
            lines = self._lines.take() if leads else ()
            view = member.view.number if member.view else 0
            shard_us, shards, of = self.shard_timer.take()
            return m.Heartbeat(
                number=number, view=view, round=member.round, step=member.step, epoch=self.epoch, lines=lines,
                shard_us=shard_us, shards=shards, of=of, call=member.call, done=self.done, waits=self.waits,
                whole=self.whole,
                waits_for=held_up_by(self.waiting_for(), self._lines.median_step_s(), self.welcome, time.monotonic()),
            )  # fmt: skip

    # --- actions ---------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self._connect(action)
                case Exit():
                    self._leave(action)
                case Save():
                    self.save = action
                    self.condition.notify_all()
                    save_aside(self, action)
                case Compare():
                    threading.Thread(target=lambda: self.tell(self.digests()), daemon=True).start()
                case _:
                    self.tell(action)

    def _leave(self, exit_: Exit) -> None:
        """The training thread is told; if it is busy for longer than the grace, the process ends under it."""
        with self.condition:
            self.orphaned = self.orphaned or (exit_.save and self.exit is None)
            trains = self.member.synced
            self.exit = self.exit or exit_
            self.condition.notify_all()
        leave_in_the_end(exit_.code, saves=exit_.save, trains=trains)

    def _connect(self, connect: Connect) -> None:
        current, view = self.member.view, connect.view
        keep = (view.group, current.group if current else 0)
        self._groups.leave(view, keep)  # everyone has left the past ones: only then is a view proposed
        self._groups.arrange(connect, self.worker, lambda: self.prepare(view), lambda: self._connected(view))

    def _connected(self, view: View) -> None:
        with self.condition:
            self._perform(self.member.connected(view))
            self.condition.notify_all()
