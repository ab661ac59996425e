"""The worker's side of the control plane: the member's state machine under a lock, and the connection that feeds it.

The training thread, the view's exchange thread and the connection's own thread meet in one condition variable. The
training thread waits in it for "my round ended, or the view changed, or I am to go"; nothing of a step waits for the
coordinator. `sent` and `received` count messages by kind, which is how the tests show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import aiohttp

from farandole.collective.group import Group, Rendezvous
from farandole.control.dial import dial
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, FarandoleError, ProtocolError, Refused
from farandole.membership import messages as m
from farandole.membership.member import Action, Connect, Exit, Member, Save
from farandole.membership.view import View, Word
from farandole.settings import Settings

KEPT_LINES = (
    m.MAX_LINES
)  # steps of metrics that every worker keeps, so that a new rank 0 can send what the old one could not
STALL_STEPS = 50  # whose median the stall limit follows
EXIT_GRACE_S = 5.0  # after Goodbye, for a training thread that is busy


class Client:
    """A worker's place in the run. This class alone is a world of one; `Connected` adds the coordinator."""

    def __init__(self, worker: str, minimum: int = 1) -> None:
        self.worker = worker
        self.minimum = minimum
        self.member = Member(worker)
        self.condition = threading.Condition(threading.RLock())
        self.exit: Exit | None = None
        self.save: Save | None = None  # the coordinator asks for the last checkpoint
        self.groups: dict[int, Group] = {}
        self.prepare: Callable[[View], None] = _nothing  # the training side makes a view's buffers, in the background
        self.waiting_for: Callable[[], tuple[int, str, float] | None] = lambda: None
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.epoch = 0

    def ask_in(self, signature: m.Signature) -> None:
        """Built and opened: ready for a view. A world of one has its view at once."""
        del signature
        with self.condition:
            view = View(number=1, members=(self.worker,), group=1)
            self.member.receive(m.Propose(view=view))
            self.member.connected(view)

    def tell(self, message: m.Message) -> None:
        """Send a message to the coordinator."""
        del message

    def add_line(self, line: m.Line) -> None:
        """A line of metrics."""
        del line

    def finish(self, fingerprint: str) -> None:
        """The script has run to its end."""
        del fingerprint

    def close(self) -> None:
        """Let go of the connection."""

    # --- the state machine, from the training side -----------------------------------------------------------

    def adopt(self, round_: int, step: int, *, view: int) -> bool:
        return self._do(lambda: self.member.adopt(round_, step, view=view))

    def levelled(self) -> bool:
        return self._do(self.member.levelled)

    def begin_round(self, step: int, *, may_switch: bool) -> bool:
        return self._do(lambda: self.member.begin_round(step, may_switch=may_switch))

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        with self.condition:
            return self.member.word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[Word]) -> bool:
        with self.condition:
            return self.member.end_round(words)

    def lost(self, view: int, peer: str, reason: str) -> None:
        with self.condition:
            self._perform(self.member.lost(view, peer, reason))

    def changed(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def _do(self, ask: Callable[[], list[Action] | None]) -> bool:
        with self.condition:
            actions = ask()
            if actions is None:
                return False
            self._perform(actions)
            return True

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, m.Message):
                self.tell(action)


class Connected(Client):
    """A worker that has a coordinator.

    Raises:
        CoordinatorUnreachable: nobody answers at the ticket's address.
        Refused: the ticket's secret is not the run's, or the run does not let this worker in.
    """

    def __init__(self, ticket: Ticket, settings: Settings) -> None:
        super().__init__(settings.worker)
        self._ticket = ticket
        self._settings = settings
        self._interface = settings.interface  # of the data plane; by default the one that leads to the coordinator
        self._loop = asyncio.new_event_loop()
        self._outgoing: asyncio.Queue[m.Message | None] = asyncio.Queue()
        self._rendezvous: dict[int, Rendezvous] = {}
        self._lines: deque[m.Line] = deque(maxlen=KEPT_LINES)
        self._lines_sent = (-1, -1)
        self._closing = False
        self._welcomed: asyncio.Future[m.Welcome] = self._loop.create_future()
        started = threading.Event()
        self._failure: BaseException | None = None
        self.welcome: m.Welcome
        self._thread = threading.Thread(target=self._run, args=(started,), name="control", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure:
            raise self._failure
        self.worker = self.member.worker = self.welcome.worker
        self.minimum = self.welcome.minimum

    def ask_in(self, signature: m.Signature) -> None:
        self.tell(m.Ready(signature=signature))

    def tell(self, message: m.Message) -> None:
        if not self._closing:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is the run
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    def add_line(self, line: m.Line) -> None:
        with self.condition:
            self._lines.append(line)

    def finish(self, fingerprint: str) -> None:
        self.tell(self._beat())
        self.tell(m.Finished(fingerprint=fingerprint))

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, None)
        self._thread.join(2.0)

    # --- the connection's thread -----------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._converse(started))
        except (FarandoleError, OSError) as error:
            self._failure = error
        finally:
            started.set()
            self._loop.close()

    async def _converse(self, started: threading.Event) -> None:
        ticket = self._ticket
        async with aiohttp.ClientSession() as session:
            try:
                socket = await dial(session, ticket)
            except aiohttp.WSServerHandshakeError as error:
                raise Refused(
                    f"{ticket.address} refused the ticket (HTTP {error.status}): is it this run's?"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise CoordinatorUnreachable(
                    f"no coordinator answers at {ticket.address} ({error}): is the run over, or the ticket an old one?"
                ) from error
            async with socket:
                settings = self._settings
                self._interface = settings.interface or socket.get_extra_info("sockname")[0]
                hello = m.Hello(
                    kind="worker", worker=settings.worker, host=settings.host, pid=os.getpid(), pool=settings.pool
                )
                await socket.send_bytes(m.encode(hello))
                first = await socket.receive()
                if first.type is not aiohttp.WSMsgType.BINARY:
                    raise Refused(f"{ticket.address} closed the connection before its welcome")
                welcome = m.decode_from_coordinator(first.data)
                if not isinstance(welcome, m.Welcome):
                    raise Refused(f"{ticket.address} answered {type(welcome).__name__}")
                self.welcome = welcome
                started.set()
                await self._serve(socket)

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        tasks = [asyncio.create_task(part) for part in (self._listen(socket), self._speak(socket), self._heartbeat())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        errors = [repr(task.exception()) for task in done if task.exception()]
        if not self._closing and self.exit is None:
            why = f" ({', '.join(errors)})" if errors else ""
            self._leave(Exit(f"the connection to the coordinator is lost{why}", 1))

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                break
            message = m.decode_from_coordinator(frame.data)
            self.received[type(message).__name__] += 1
            if isinstance(message, m.Published):
                if message.group in self._rendezvous:
                    self._rendezvous[message.group].put(message.key, message.value)
                continue
            with self.condition:
                try:
                    actions = self.member.receive(message)
                except ProtocolError as error:
                    actions = [Exit(str(error), 1)]
                self._perform(actions)
                self.condition.notify_all()

    async def _speak(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        while True:
            message = await self._outgoing.get()
            if message is None:
                return
            self.sent[type(message).__name__] += 1
            await socket.send_bytes(m.encode(message))

    async def _heartbeat(self) -> None:
        while True:
            self._outgoing.put_nowait(self._beat())
            waiting = self.waiting_for()
            if waiting and time.monotonic() - waiting[2] > self._stall_limit():
                view, peer, since = waiting
                self.lost(view, peer, f"stalled: waited for it for {time.monotonic() - since:.0f} s")
            await asyncio.sleep(self.welcome.heartbeat_s)

    def _stall_limit(self) -> float:
        """How long to wait for a peer before reporting it: ten median steps, at least the run's `stall_s`."""
        with self.condition:
            took = [line.fields["seconds"] for line in list(self._lines)[-STALL_STEPS:] if line.index == 0]
        seconds = [each for each in took if isinstance(each, float)]
        return max(self.welcome.stall_s, 10 * median(seconds)) if seconds else self.welcome.stall_s

    def _beat(self) -> m.Heartbeat:
        with self.condition:
            member = self.member
            lines: tuple[m.Line, ...] = ()
            if member.view and member.view.members[:1] == (self.worker,):
                lines = tuple(line for line in self._lines if (line.step, line.index) > self._lines_sent)
                if lines:
                    self._lines_sent = (lines[-1].step, lines[-1].index)
            number = member.view.number if member.view else 0
            return m.Heartbeat(view=number, round=member.round, step=member.step, epoch=self.epoch, lines=lines)

    # --- actions ---------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self._connect(action.view)
                case Exit():
                    self._leave(action)
                case Save():
                    self.save = action
                    self.condition.notify_all()
                case _:
                    self.tell(action)

    def _leave(self, exit_: Exit) -> None:
        """The training thread is told; if it is busy for longer than the grace, the process ends under it."""
        with self.condition:
            self.exit = self.exit or exit_
            self.condition.notify_all()
        watchdog = threading.Timer(EXIT_GRACE_S, os._exit, (exit_.code,))
        watchdog.daemon = True
        watchdog.start()

    def _connect(self, view: View) -> None:
        current = self.member.view
        past = [number for number in self.groups if number not in (view.group, current.group if current else 0)]
        # everyone has left the past ones: only then is a view proposed
        dropped = [self.groups.pop(number) for number in past]
        for number in [n for n in self._rendezvous if n < view.number]:
            self._rendezvous.pop(number).close()
        if view.group not in self.groups and view.size > 1:
            self._rendezvous[view.group] = Rendezvous(
                lambda key, value: self.tell(m.Publish(group=view.group, key=key, value=value))
            )
        threading.Thread(target=self._make_connections, args=(view, dropped), daemon=True).start()

    def _make_connections(self, view: View, dropped: list[Group]) -> None:
        dropped.clear()  # closing connections takes a while: here, where nobody waits
        try:
            if view.group not in self.groups and view.size > 1:
                store = self._rendezvous[view.group]
                group = Group(view.group, self.worker, view.members, store, self._interface)
                with self.condition:
                    self.groups[view.group] = group
            self.prepare(view)
        except (RuntimeError, KeyError):
            return  # the view was given up meanwhile, or its deadline will pass: the coordinator decides
        with self.condition:
            self._perform(self.member.connected(view))
            self.condition.notify_all()


def _nothing(argument: Any) -> None:
    del argument
