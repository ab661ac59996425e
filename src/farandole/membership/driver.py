"""The rounds of one worker, one exchange after the other, through whatever happens to the view.

What the script calls (`begin`, `sync`, `finish`; `entering` for a joiner) are generators: without threads, clock or
torch. Their owner runs one at a time, the script's own, and holds the worker's lock whenever it resumes one; so what
stands between two yields happens at once. A generator yields what comes next without the lock:

    Change   wait until something has changed (a message, the end of an exchange), perhaps for so many seconds at most
    work     a call into the `port`, whose result it is resumed with: it may take long, and the coordinator's messages
             and the peers' words come in meanwhile

So what it knows may be past as soon as it has yielded. Why that does no harm:

1. Only this driver begins rounds, and only `Member` ends them or moves them on. The driver remembers the round
   (`number`) and the view (`exchange.view`) that it works for. However late it looks, comparing them with the member's
   tells whether the round was committed meanwhile (the member's is a later one), is to be redone (another view, the
   same round), or neither.
2. What it does for a view that is past meanwhile meets nobody: the messages of an exchange carry view and round in
   their tags, and `Member.word` refuses words of another view or round. It is closed and settled when the next one is
   opened, and by then everyone who lives has abandoned it, since the coordinator had all answers to its stop before it
   said how to go on; or has left it in order.
3. A round is redone from the same partial sums: they are taken up once a round, when it begins. What was computed
   stays, `todo` names what has been inherited, and the lineage says for everyone who holds what.
4. A joiner must not vouch for a state that it does not hold: its exchange withholds the word from before it starts
   until `entering` has loaded the state and the member has agreed that the view still stands.
5. A shard that this worker computes to check another is computed after its own, and before its word: the exchange
   withholds that too. What has been found stays for as long as the round is in hand, whatever becomes of the view; who
   checks whom is settled anew each time that it starts (`plan.checks`).
6. Whether a round is idle, and how many workers count as having begun it, is read off the lineage's first set: all
   members have that in common, also those who begin the round late, in a smaller view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from farandole.membership.call_rounds import CallRounds
from farandole.membership.checking import Checking
from farandole.membership.drift import Drift
from farandole.membership.generators import Change, Script, do
from farandole.membership.instructions import Instructions
from farandole.membership.member import Member
from farandole.membership.messages import Message
from farandole.membership.port import Exchange, Port, Task
from farandole.membership.terms import RunTerms
from farandole.membership.values import NOTHING, Call
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position

IDLE_S = 0.05  # between two idle rounds


class Demoted(Exception):
    """This joiner's view is no more: it waits for the next one."""


class Driver:
    """See the module's head. With fewer than `minimum` workers, rounds are idle.

    Attributes:
        number: of the round in hand.
        workers: that have begun it, whatever became of them.
        begun: the round that was begun last, as soon as that is so.
        waits: this worker has nothing to compute and waits for others.
        proven: it has ended a round, or begun the run; a joiner that is given up before may hold a torn state without
            knowing it.
    """

    def __init__(self, member: Member, told: Instructions, port: Port, terms: RunTerms) -> None:
        self.member = member
        self.task = Task(position=Position(), shards=_none)
        self.exchange: Exchange = _Before()
        self.lineage = Lineage(sets=())
        self.shards = self.number = self.workers = 0
        self.done: set[int] = set()
        self.begun = -1
        self.waits = True
        self.proven = False
        self.calls = CallRounds()
        self._told = told
        self.port = port
        self._terms = terms
        self.checking = Checking(member, terms)
        member.drift = Drift() if terms.bits == "any" else None
        self._call = NOTHING
        self._idle = False

    # --- a round ---------------------------------------------------------------------------------------------

    def begin(self, task: Task) -> Script[None]:
        """Begin a round for `task`, after a call round where one is due; below the minimum, after idle rounds.

        Raises:
            Demoted: this worker is a joiner, and its view was stopped before.
        """
        first, call = self.calls.due(task.sizes, task.position.step, trains=task.trains, doing=task.doing)
        if first is not None:
            yield from self._begin_once(Task(position=task.position, shards=_none), first)
            while not (yield from self.finish()):
                pass
        yield from self._begin_once(task, call)
        if self.member.synced:
            yield from self.pass_idle_rounds()

    def _begin_once(self, task: Task, call: Call) -> Script[None]:
        member, port = self.member, self.port
        while True:
            yield from self.obey()
            if member.phase == "member":
                told = member.begin_round(task.position.step, may_switch=task.trains, call=call)
                self.tell(told or ())
                if member.phase == "member":
                    break
                yield from do(port.stand_back)
                continue
            if member.phase == "waiting":
                raise Demoted
            yield Change()
        view, lineage, synced, first = member.view, member.lineage, member.synced, member.first
        assert view is not None
        assert lineage is not None
        self.task, self._call = task, call
        self.number = self.begun = member.round
        self._idle = task.trains and len(lineage.sets[0]) < self._terms.minimum
        member.trains = self.trains
        renewal = member.drift.renewal(view, task.position.step) if member.drift and self.trains else None
        self.workers = port.workers(task.position.step, len(lineage.sets[0]))
        if synced:
            yield from self.take_digest()
        self.shards, self.done = 0, set()
        self.checking.begin()
        if not self._idle:
            self.shards = yield from do(task.shards, self.workers)
        yield from do(port.take_up, None if self._idle else task.content, self.shards)
        yield from self._open(view)
        if not synced:
            self.exchange.withhold()
        elif first and view.joining:
            yield from do(port.send_state, view, self.number, task.position)
        if renewal is not None:
            yield from self._renew(view, renewal)
        yield from self._start(lineage)

    def _renew(self, view: View, renewal: View) -> Script[None]:
        """Replicas have drifted apart, and some are given the state again. See `drift`."""
        if self.member.worker in renewal.senders(self._terms.bits):
            yield from do(self.port.send_state, renewal, self.number, self.task.position)
        elif self.member.worker in renewal.joining:
            arriving = yield from do(self.port.receive, renewal)
            if (yield from self.until(view, lambda: arriving.state is not None)):
                yield from do(self.port.renew, arriving.state)
                yield from self.take_digest()

    def until(self, view: View, there: Callable[[], bool]) -> Script[bool]:
        """Wait until `there()`; False if `view` is given up before (then: until this worker is a candidate again)."""
        while True:
            yield from self.obey()
            if view not in (self.member.view, self.member.pending):
                return False
            if self.member.phase != "stopped" and there():
                return True
            yield Change()

    def pass_idle_rounds(self) -> Script[None]:
        """Too few workers: rounds without work, in which a joiner's view can be agreed on (R2) like in any other."""
        while self._idle:
            while not (yield from self.finish()):
                pass
            yield Change(IDLE_S)
            yield from self._begin_once(self.task, self._call)

    def checked(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """This worker has computed `shard`, another's, too. With the last that it owes its word may be given."""
        self.checking.checked(shard, names, digests)
        if self.member.synced and not self.checking.owed():
            self.exchange.release()

    def todo(self) -> tuple[int, ...]:
        """The shards that are this worker's and not computed yet."""
        mine = self.lineage.assign(self.shards).get(self.member.worker, ()) if self.shards else ()
        return tuple(shard for shard in mine if shard not in self.done)

    @property
    def trains(self) -> bool:
        """Whether the round is a training step's, and not an idle one in its place."""
        return self.task.trains and not self._idle

    @property
    def idle(self) -> bool:
        """Whether the round in hand is one without work, for want of workers."""
        return self._idle

    def inherited(self, shard: int) -> bool:
        """Whether `shard` of this round was another's, who is gone."""
        sets = self.lineage.sets
        if len(sets) < 2:
            return False
        first = Lineage(sets=sets[:1], shares=self.lineage.shares)
        return shard not in first.assign(self.shards).get(self.member.worker, ())

    def sync(self) -> Script[None]:
        """Follow the member if its view has changed meanwhile: open its exchange, over the same partial sums."""
        yield from self.obey()
        member = self.member
        view, lineage = member.view, member.lineage
        goes_on = member.phase == "member" and member.round == self.number
        if goes_on and view is not None and view.number != self.exchange.view.number and lineage is not None:
            yield from self._open(view)
            yield from self._start(lineage)

    def finish(self) -> Script[bool]:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        member, exchange = self.member, self.exchange
        self.waits = True
        yield from do(exchange.finish)
        while not exchange.ended and member.round <= self.number:
            yield from self.obey()
            if member.phase == "member" and member.view is not None and member.view.number != exchange.view.number:
                yield from self.sync()
                return False
            yield Change()
        self.proven, self.waits = True, False
        return True

    def _open(self, view: View) -> Script[None]:
        old = self.exchange
        if old.view.number == view.number:
            return
        self.exchange = yield from do(self.port.open, view)
        old.close()
        yield from do(old.settle)  # everyone who lives has abandoned it, or has left it in order

    def _start(self, lineage: Lineage) -> Script[None]:
        self.lineage, self.waits = lineage, False
        self.checking.arrange(lineage, self.shards if self.trains else 0, self.task.position.step)
        if self.checking.owed():
            self.exchange.withhold()
        yield from do(self.port.start, self.task, self.number, self.shards, lineage)
        if not self.todo():
            yield from do(self.port.hand_in)

    # --- what the coordinator asks for -----------------------------------------------------------------------

    def obey(self) -> Script[None]:
        """It may have asked for a checkpoint, or said goodbye."""
        told, port = self._told, self.port
        if told.save is not None:
            wanted, told.save = told.save, None
            if wanted.save:
                port.answer(wanted)
        if told.exit is not None:
            if told.orphaned and self.proven:
                told.orphaned = False
                saved = yield from do(port.save, bool(self.member.apart))
                if saved.between and told.exit.within_s is None:  # in an evaluation, or the script has ended
                    yield from do(port.save, True)
            port.leave(told.exit)

    def obey_until_goodbye(self) -> Script[NoReturn]:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        while True:
            yield from self.obey()
            yield Change()

    # --- small things ----------------------------------------------------------------------------------------

    def take_digest(self) -> Script[None]:
        """Of the replica as a training step begins, for the word; elsewhere, or alone, there is nothing to compare."""
        view = self.member.view
        compared = self.trains and view is not None and view.size > 1
        self.member.digest = (yield from do(self.port.digest)) if compared else 0

    def tell(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.port.tell(message)


class _Before:
    """Before the first round."""

    view = View(number=0, members=(), group=0)
    ended = True

    def withhold(self) -> None: ...

    def release(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def settle(self) -> None: ...


def _none(workers: int) -> int:
    del workers
    return 0
