"""Rounds: one exchange after the other, through whatever happens to the view.

The training thread calls `begin`, computes what `todo` names, and calls `finish` until the round has ended. Between
them the view may be stopped and resumed any number of times: `sync` and `finish` notice it by comparing the view and
the round that they opened with the member's, open the next view's exchange over the same partial sums, and `todo`
then names what was inherited.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from farandole.checkpoint.store import first_line
from farandole.collective.buckets import Layout, Partials
from farandole.collective.exchange import Exchange
from farandole.collective.group import PeerLost
from farandole.collective.state import Arrival, Snapshot, send_state
from farandole.control.client import Client
from farandole.membership.messages import Saved
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position
from farandole.receiver import Receiver

IDLE_S = 0.05  # between two idle rounds


class Rounds:
    """Drives the rounds of one worker. `snapshot` gives the state to send to joiners, `save` writes a checkpoint.

    `save(between)` says why not, if this worker's state is only that between two steps and `between` is false.
    """

    def __init__(self, client: Client, *, snapshot: Callable[[], Any], save: Callable[[bool], Saved]) -> None:
        self._client = client
        self._member = client.member
        self._snapshot = snapshot
        self._save = save
        self._made: dict[int, Exchange] = {}
        self._exchange: Exchange | None = None
        self._partials: Partials | None = None
        self._shards = 0
        self._done: set[int] = set()
        self._lineage = Lineage(sets=())
        self._planned = self._lineage  # the lineage that `replan` was last called for
        self.number = 0
        self.layout: Layout | None = None  # of training steps; a proposed view's buffers are made for it ahead
        self.replan: Callable[[], None] | None = None  # called when this worker's shards are others than expected
        self.workers = 0  # that have begun the round in hand, whatever became of them
        self._wanted: tuple[Partials, Callable[[int], int], Position, bool]
        self._idle = False
        self._proven = False  # a joiner given up in its first round may hold a torn state without knowing it
        client.prepare = self._prepare
        client.waiting_for = self._waiting_for

    # --- a round ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        assert self._exchange is not None
        return self._exchange.view

    def begin(self, partials: Partials, shards: Callable[[int], int], position: Position, *, may_switch: bool) -> None:
        """Begin a round, of `shards(workers)` shards where so many workers begin it; if those are below the minimum,
        after as many idle rounds as it takes.

        Blocks while the view is stopped. With `may_switch`, an agreed view takes effect here.
        """
        self._wanted = (partials, shards, position, may_switch)
        self._begin_once()
        if self._member.level:
            self._pass_idle_rounds()

    def _begin_once(self) -> None:
        client, member = self._client, self._member
        partials, shards_of, position, may_switch = self._wanted
        with client.condition:
            while True:
                self._obey()
                if member.phase == "member" and client.begin_round(position.step, may_switch=may_switch):
                    if member.phase == "member":
                        break
                    _stand_back()
                    continue
                if member.phase == "waiting":  # a joiner whose view was stopped before its first round
                    raise _DemotedError
                client.condition.wait()
            view, self.number, first, level = member.view, member.round, member.first, member.level
            lineage = member.lineage
        assert view is not None
        assert lineage is not None
        self._idle = may_switch and len(lineage.sets[0]) < client.minimum  # by the lineage, which is equal for everyone
        self.workers = client.workers_at(position.step, len(lineage.sets[0]))
        if self._idle:
            partials, shards = Partials(Layout([], 0)), 0
        else:
            shards = shards_of(self.workers)
        partials.begin(shards)
        self._partials, self._shards, self._done = partials, shards, set()
        exchange = self._open(view)
        if not level:
            exchange.may_word.clear()
        elif first and view.joining:
            self._send_state(view, position)
        self._start(lineage)

    def _pass_idle_rounds(self) -> None:
        """Too few workers: rounds without work, in which a joiner's view can be agreed on (R2) like in any other."""
        while self._idle:
            while not self.finish():
                pass
            with self._client.condition:
                self._client.condition.wait(IDLE_S)
            self._begin_once()

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    def todo(self) -> tuple[int, ...]:
        """The shards that are this worker's and not computed yet."""
        mine = self._lineage.assign(self._shards).get(self._client.worker, ()) if self._shards else ()
        return tuple(shard for shard in mine if shard not in self._done)

    def open(self, shard: int) -> None:
        """Compute `shard` now. With the last one, buckets are handed over as the backward pass fills them."""
        assert self._partials is not None
        assert self._exchange is not None
        last = self.todo() == (shard,)
        self._partials.complete = self._exchange.ready if last else _not_yet
        self._partials.open(shard)
        self._client.pace.open()

    def close(self, shard: int) -> None:
        self._done.add(shard)
        if self._trains:
            self._client.pace.close()

    @property
    def _trains(self) -> bool:
        """Whether the round is a training step's; evaluations compute before they open a shard."""
        return self._wanted[3] and not self._idle

    def sync(self) -> None:
        """Follow the member if its view has changed meanwhile."""
        with self._client.condition:
            self._obey()
            view = self._member.view
            stale = (
                self._member.phase == "member"
                and view is not None
                and view.number != self.view.number
                and self._member.round == self.number
            )
            lineage = self._member.lineage
        if stale and view is not None and lineage is not None:
            self._open(view)
            self._start(lineage)

    def finish(self) -> bool:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        exchange, client = self._exchange, self._client
        assert exchange is not None
        exchange.finish()
        with client.condition:
            while not exchange.ended and self._member.round <= self.number:
                self._obey()
                view = self._member.view
                if self._member.phase == "member" and view is not None and view.number != exchange.view.number:
                    break
                client.condition.wait()
            else:
                self._proven = True
                if self._trains:
                    self._client.pace.step_ended(len(self._done), self._shards)
                return True
        self.sync()
        return False

    def reduced(self) -> list[Any]:
        """The reduced buckets of the round that has ended."""
        assert self._exchange is not None
        assert self._partials is not None
        return self._exchange.reduced(self._partials.layout)

    def _open(self, view: View) -> Exchange:
        old = self._exchange
        if old is not None and old.view.number == view.number:
            return old
        with self._client.condition:
            new = self._made.pop(view.number, None)
            for number in [n for n in self._made if n < view.number]:
                self._made.pop(number).close()
        self._exchange = new or Exchange(view, self._client.worker, self._client.groups.get(view.group), self._client)
        if old is not None:
            old.close()
            old.settle()  # everyone who lives has abandoned it, or has left it in order
        return self._exchange

    def _start(self, lineage: Lineage) -> None:
        assert self._exchange is not None
        assert self._partials is not None
        self._lineage = lineage
        if self._trains and lineage != self._planned and self.replan is not None:
            self._planned = lineage
            self.replan()
        self._exchange.begin(self.number, self._partials, self._shards, lineage)
        if not self.todo():
            for bucket in range(len(self._partials.layout.buckets)):
                self._exchange.ready(bucket)

    # --- joining ---------------------------------------------------------------------------------------------

    def enter(
        self,
        load: Callable[[Any], None],
        start: Callable[[Position, list[bool] | None], None],
        restore: Callable[[], Position | None],
        parameters: int,
    ) -> None:
        """Wait for a view, and for the state if others hold it; then `start(position, flags)` has begun a round.

        `load` takes the state over; `flags` are the veterans' requires_grad, without which the buckets would differ.
        Who begins a first view has the state from `restore`, and no flags; with no step left (None) that ends the run.
        A view that is stopped before means waiting for the next one.
        """
        client, member = self._client, self._member
        while True:
            with client.condition:
                while not (member.phase == "waiting" and member.pending and member.prepared == member.pending.number):
                    self._obey()
                    client.condition.wait()
                view = member.pending
            if client.worker in view.level:
                position = restore()
                if position is None:
                    return self.obey_until_goodbye()
                if client.adopt(0, position.step, view=view.number):
                    self._proven = True
                    start(position, None)
                    return
                continue
            arrival = Receiver(Arrival(view, client.groups[view.group], parameters), view, client)
            if not self._await(lambda a=arrival: a.header is not None, view) or arrival.header is None:
                continue
            round_, position, flags = arrival.header
            if not client.adopt(round_, position.step, view=view.number):
                continue
            try:
                start(position, flags)
            except _DemotedError:
                continue
            if not self._await(lambda a=arrival: a.state is not None, view):
                continue
            load(arrival.state)
            exchange = self._exchange
            if client.levelled():
                assert exchange is not None
                exchange.may_word.set()
                self._pass_idle_rounds()
                return

    def _await(self, there: Callable[[], bool], view: View) -> bool:
        """Wait until `there()`; False if `view` is given up before (then: until this worker is a candidate again)."""
        client, member = self._client, self._member
        with client.condition:
            while True:
                self._obey()
                if view not in (member.view, member.pending):
                    return False
                if member.phase != "stopped" and there():
                    return True
                client.condition.wait()

    def _send_state(self, view: View, position: Position) -> None:
        """Veterans: send the state as of this round's start, in the background. The joiners' words end the wait."""
        group = self._client.groups[view.group]
        snapshot = Snapshot(self._snapshot())

        def send() -> None:
            try:
                send_state(view, self._client.worker, group, self.number, position, snapshot)
            except PeerLost as lost:
                self._client.lost(view.number, lost.peer, lost.reason)

        threading.Thread(target=send, name=f"state-{view.number}", daemon=True).start()

    # --- small things ----------------------------------------------------------------------------------------

    def _prepare(self, view: View) -> None:
        if self._client.worker not in view.members:
            return
        exchange = Exchange(view, self._client.worker, self._client.groups.get(view.group), self._client)
        if self.layout is not None:
            exchange.warm(self.layout)
        with self._client.condition:
            self._made[view.number] = exchange

    def _waiting_for(self) -> tuple[int, str, float] | None:
        exchange = self._exchange
        waiting = exchange.waiting_for if exchange else None
        return (exchange.view.number, *waiting) if exchange and waiting else None

    def _obey(self) -> None:
        """The coordinator may have asked for a checkpoint or said goodbye."""
        client = self._client
        if client.save is not None:
            wanted, client.save = client.save, None
            if wanted.save:  # on a thread: this one may hold the lock that the heartbeats need
                work = threading.Thread(target=lambda: client.tell(self._saved(wanted.between)), daemon=True)
                work.start()
        if client.exit is not None:
            if client.orphaned and self._proven:
                client.orphaned = False
                saved = self._saved(False)
                print(f"farandole: checkpoint: {saved.path or saved.error}", file=sys.stderr, flush=True)
            print(f"farandole: {client.exit.reason}", file=sys.stderr, flush=True)
            raise SystemExit(client.exit.code)

    def _saved(self, between: bool) -> Saved:
        try:
            return self._save(between)
        except Exception as error:  # noqa: BLE001  whatever it is: without an answer nobody else would try
            return Saved(error=first_line(error))

    def obey_until_goodbye(self) -> NoReturn:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        with self._client.condition:
            while True:
                self._obey()
                self._client.condition.wait()


class _DemotedError(Exception):
    """This joiner's view is no more: it waits for the next one."""


def _stand_back() -> None:
    """A leaver has nothing left to do but to end, which must not take the cores that the others train on."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)


def _not_yet(bucket: int) -> None:
    del bucket
