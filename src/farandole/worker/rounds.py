"""Rounds: one exchange after the other, through whatever happens to the view.

The training thread calls `begin`, computes what `todo` names, and calls `finish` until the round has ended. Between
them the view may be stopped and resumed any number of times: `sync` and `finish` notice it by comparing the view and
the round that they opened with the member's, open the next view's exchange over the same partial sums, and `todo`
then names what was inherited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from farandole.checkpoint.store import first_line
from farandole.collective.buckets import Layout, Partials
from farandole.collective.exchange import Exchange
from farandole.collective.transfer import Arrival
from farandole.membership.messages import Digests, Saved
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position
from farandole.platform.output import say
from farandole.worker.calls import Calls
from farandole.worker.departure import stand_back
from farandole.worker.participant import Participant
from farandole.worker.receiver import Receiver, hand_on

IDLE_S = 0.05  # between two idle rounds
WORK = 0  # the shard that whoever has it may take its time for, in a patient round


class Rounds:
    """Drives the rounds of one worker. `snapshot` gives the state to send to joiners, `save` writes a checkpoint.

    `save(between)` says why not, if this worker's state is only that between two steps and `between` is false.
    """

    def __init__(
        self, participant: Participant, *, snapshot: Callable[[], Any], save: Callable[[bool], Saved],
        digest: Callable[[], int], digests: Callable[[], Digests],
    ) -> None:  # fmt: skip
        self._participant = participant
        self._member = participant.member
        self._snapshot, self._save, self._digest_now, self.digests = snapshot, save, digest, digests
        self._made: dict[int, Exchange] = {}
        self._exchange: Exchange | None = None
        self._partials: Partials | None = None
        self._shards = 0
        self._done: set[int] = set()
        self.lineage = Lineage(sets=())
        self._planned = self.lineage  # the lineage that `replan` was last called for
        self.number = 0
        self.layout: Layout | None = None  # of training steps; a proposed view's buffers are made for it ahead
        self.replan: Callable[[], None] | None = None  # called when this worker's shards are others than expected
        self.workers = 0  # that have begun the round in hand, whatever became of them
        self._calls = Calls()
        self._wanted: tuple[Partials, Callable[[int], int], Position, bool]
        self._idle = self._patient = False
        self._proven = False  # a joiner given up in its first round may hold a torn state without knowing it
        participant.attend(self)

    # --- a round ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        assert self._exchange is not None
        return self._exchange.view

    def begin(
        self, partials: Partials, shards: Callable[[int], int], position: Position, *, may_switch: bool,
        doing: str = "", patient: bool = False,
    ) -> None:  # fmt: skip
        """Begin a round, of `shards(workers)` shards where so many begin it; below the minimum, after idle rounds.

        Blocks while the view is stopped. With `may_switch` it is a step's, and an agreed view takes effect here.
        `doing` says what else was called, in words that are equal on all workers, the number of shards with them. In a
        `patient` round the holder of shard `WORK` is never reported as stalled.
        """
        self._patient = False
        first, then = self._calls.due(partials.layout, position.step, trains=may_switch, doing=doing)
        if first is not None:
            self._participant.call = first
            self._wanted = (Partials(Layout([], 0)), lambda _: 0, position, False)
            self._begin_once()
            while not self.finish():
                pass
        self._patient = patient
        self._participant.call, self._wanted = then, (partials, shards, position, may_switch)
        self._begin_once()
        if self._member.synced:
            self._pass_idle_rounds()

    def _begin_once(self) -> None:
        participant, member = self._participant, self._member
        partials, shards_of, position, may_switch = self._wanted
        with participant.condition:
            while True:
                self._obey()
                if member.phase == "member" and participant.begin_round(position.step, may_switch=may_switch):
                    if member.phase == "member":
                        break
                    stand_back()
                    continue
                if member.phase == "waiting":  # a joiner whose view was stopped before its first round
                    raise _DemotedError
                participant.condition.wait()
            view, self.number, first, synced = member.view, member.round, member.first, member.synced
            lineage, participant.begun = member.lineage, member.round
        assert view is not None
        assert lineage is not None
        self._idle = may_switch and len(lineage.sets[0]) < participant.minimum  # the lineage is equal for everyone
        self.workers = participant.workers_at(position.step, len(lineage.sets[0]))
        participant.member.digest = self._digest() if synced else 0
        if self._idle:
            partials, shards = Partials(Layout([], 0)), 0
        else:
            shards = shards_of(self.workers)
        partials.begin(shards)
        self._partials, self._shards, self._done = partials, shards, set()
        exchange = self._open(view)
        if not synced:
            exchange.may_word.clear()
        elif first and view.joining:
            self._send_state(view, position)
        self._start(lineage)

    def _pass_idle_rounds(self) -> None:
        """Too few workers: rounds without work, in which a joiner's view can be agreed on (R2) like in any other."""
        while self._idle:
            while not self.finish():
                pass
            with self._participant.condition:
                self._participant.condition.wait(IDLE_S)
            self._begin_once()

    def todo(self) -> tuple[int, ...]:
        """The shards that are this worker's and not computed yet."""
        mine = self.lineage.assign(self._shards).get(self._participant.worker, ()) if self._shards else ()
        return tuple(shard for shard in mine if shard not in self._done)

    def open(self, shard: int) -> None:
        """Compute `shard` now. With the last one, buckets are handed over as the backward pass fills them."""
        assert self._partials is not None
        assert self._exchange is not None
        last = self.todo() == (shard,)
        self._partials.complete = self._exchange.ready if last else _not_yet
        self._partials.open(shard)
        self._participant.shard_timer.open()

    def close(self, shard: int) -> None:
        self._done.add(shard)
        self._participant.done += 1
        if self._trains:
            self._participant.shard_timer.close()

    @property
    def _trains(self) -> bool:
        """Whether the round is a training step's; evaluations compute before they open a shard."""
        return self._wanted[3] and not self._idle

    def sync(self) -> None:
        """Follow the member if its view has changed meanwhile."""
        member = self._member
        with self._participant.condition:
            self._obey()
            view, lineage = member.view, member.lineage
            goes_on = member.phase == "member" and member.round == self.number
        if goes_on and view is not None and view.number != self.view.number and lineage is not None:
            self._open(view)
            self._start(lineage)

    def finish(self) -> bool:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        exchange, participant = self._exchange, self._participant
        assert exchange is not None
        participant.waits = True
        exchange.finish()
        with participant.condition:
            while not exchange.ended and self._member.round <= self.number:
                self._obey()
                view = self._member.view
                if self._member.phase == "member" and view is not None and view.number != exchange.view.number:
                    break
                participant.condition.wait()
            else:
                self._proven, participant.waits = True, False
                if self._trains:
                    self._participant.shard_timer.step_ended(len(self._done), self._shards)
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
        with self._participant.condition:
            new = self._made.pop(view.number, None)
            for number in [n for n in self._made if n < view.number]:
                self._made.pop(number).close()
        self._exchange = new or Exchange(
            view, self._participant.worker, self._participant.groups.get(view.group), self._participant
        )
        if old is not None:
            old.close()
            old.settle()  # everyone who lives has abandoned it, or has left it in order
        return self._exchange

    def _start(self, lineage: Lineage) -> None:
        assert self._exchange is not None
        assert self._partials is not None
        self.lineage, self._participant.waits = lineage, False
        if self._trains and lineage != self._planned and self.replan is not None:
            self._planned = lineage
            self.replan()
        self._exchange.begin(self.number, self._partials, self._shards, lineage, training=self._wanted[3])
        if not self.todo():
            for bucket in range(len(self._partials.layout.buckets)):
                self._exchange.ready(bucket)

    # --- joining ---------------------------------------------------------------------------------------------

    def enter(
        self, load: Callable[[Any], None], start: Callable[[Position, list[bool] | None], None],
        restore: Callable[[View], Position | None], parameters: int,
    ) -> None:  # fmt: skip
        """Wait for a view, and for the state if others hold it; then `start(position, flags)` has begun a round.

        `load` takes the state over; `flags` are the veterans' requires_grad, without which the buckets would differ.
        Who begins a first view has the state from `restore`, and no flags; None: others begin, or the run ends.
        A view that is stopped before means waiting for the next one.
        """
        participant, member = self._participant, self._member
        while True:
            self._calls.enter()
            with participant.condition:
                while not (member.phase == "waiting" and member.pending and member.prepared == member.pending.number):
                    self._obey()
                    participant.condition.wait()
                view = member.pending
            if participant.worker in view.synced:
                position = restore(view)
                if position is None:
                    self._await(lambda: False, view)
                elif participant.adopt(0, position.step, view=view.number):
                    self._proven = True
                    start(position, None)
                    return
                continue
            arrival = Receiver(Arrival(view, participant.groups[view.group], parameters), view, participant)
            if not self._await(lambda a=arrival: a.header is not None, view) or arrival.header is None:
                continue
            round_, position, flags = arrival.header
            if not participant.adopt(round_, position.step, view=view.number):
                continue
            try:
                start(position, flags)
            except _DemotedError:
                continue
            if not self._await(lambda a=arrival: a.state is not None, view):
                continue
            load(arrival.state)
            exchange, member.digest = self._exchange, self._digest()
            if participant.become_synced():
                assert exchange is not None
                exchange.may_word.set()
                self._pass_idle_rounds()
                return

    def _await(self, there: Callable[[], bool], view: View) -> bool:
        """Wait until `there()`; False if `view` is given up before (then: until this worker is a candidate again)."""
        participant, member = self._participant, self._member
        with participant.condition:
            while True:
                self._obey()
                if view not in (member.view, member.pending):
                    return False
                if member.phase != "stopped" and there():
                    return True
                participant.condition.wait()

    def _send_state(self, view: View, position: Position) -> None:
        """Veterans: the joiners' words end the wait."""
        hand_on(self._participant, view, self.number, position, self._snapshot())

    # --- small things ----------------------------------------------------------------------------------------

    def _digest(self) -> int:
        """Of the replica as a training step begins; there is nothing to compare in other rounds, or alone."""
        view = self._member.view
        return self._digest_now() if self._trains and view is not None and view.size > 1 else 0

    def prepare(self, view: View) -> None:
        if self._participant.worker not in view.members:
            return
        exchange = Exchange(view, self._participant.worker, self._participant.groups.get(view.group), self._participant)
        if self.layout is not None:
            exchange.warm(self.layout)
        with self._participant.condition:
            self._made[view.number] = exchange

    def waiting_for(self) -> tuple[int, str, float] | None:
        exchange = self._exchange
        waiting = exchange.waiting_for if exchange else None
        if waiting and self._patient and WORK in self.lineage.assign(self._shards).get(waiting[0], ()):
            return None
        return (exchange.view.number, *waiting) if exchange and waiting else None

    def _obey(self) -> None:
        """The coordinator may have asked for a checkpoint or said goodbye."""
        participant = self._participant
        if participant.told.save is not None:
            wanted, participant.told.save = participant.told.save, None
            if wanted.save:  # on a thread: this one may hold the lock that the heartbeats need
                threading.Thread(target=lambda: participant.tell(self.saved(wanted.between)), daemon=True).start()
        if participant.told.exit is not None:
            if participant.told.orphaned and self._proven:
                participant.told.orphaned = False
                saved = self.saved(bool(self._member.apart))
                saved = self.saved(True) if saved.between else saved  # in an evaluation, or the script has ended
                say(f"farandole: checkpoint: {saved.path or saved.error}")
            say(f"farandole: {participant.told.exit.reason}")
            raise SystemExit(participant.told.exit.code)

    def saved(self, between: bool) -> Saved:
        try:
            return self._save(between)
        except Exception as error:  # noqa: BLE001  whatever it is: without an answer nobody else would try
            return Saved(error=first_line(error))

    def obey_until_goodbye(self) -> NoReturn:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        with self._participant.condition:
            while True:
                self._obey()
                self._participant.condition.wait()


class _DemotedError(Exception):
    """This joiner's view is no more: it waits for the next one."""


def _not_yet(bucket: int) -> None:
    del bucket
