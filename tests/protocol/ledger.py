"""What has happened everywhere in a simulated run, and whether it may have: the invariants of the schedules.

Of a run with a member that is wrong, besides all that holds anyway: who is honest is disbelieved at most by the word of
that one against its own, and loses its place by that one's word no more often than there are benefits for it; no
decision costs two theirs. Who does not hold the state yet has none to lose.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import BENEFITS
from farandole.protocol.view import View
from farandole.protocol.worker.state_machine import Save
from farandole.simulate.mistaken import WRONG
from farandole.simulate.replica import GARBAGE, alone, shard_value
from farandole.simulate.witness import Violation, Witness
from tests.protocol.unfed import UnfedWitness

if TYPE_CHECKING:
    from farandole.simulate.data_plane import DataPlane
    from farandole.simulate.exchange import SimulatedExchange
    from farandole.simulate.process import Process
    from farandole.simulate.world import World

DISBELIEVED = ("contradicted by", "it reports")  # see `issued_denial` and `outvoted`

ABSENT = "its connection closed"


class Ledger(Witness):
    """What has happened everywhere, and whether it may have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._applied: dict[int, int] = {}
        self._resumed: dict[int, tuple[int, bool]] = {}
        self._ended: dict[tuple[int, int], int] = {}
        self._committed: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._enders: dict[tuple[int, int], set[str]] = {}
        self._to_compare: set[tuple[int, int]] = set()  # rounds in which two were to compute one shard
        self._newest: Counter[str] = Counter()
        self._branches: set[int] = set()
        self.saved_step = 0  # known to be in the run's store
        self.misled_step = 0  # taken to be in it, by one that takes another place for it
        self.nowhere = False  # the newest checkpoint, as the run ended, was where nobody finds it
        self.erred = False  # what one machine computed wrong is in the run's state
        self._in_force = View(number=0, members=(), group=0)
        self._disbelieved: set[str] = set()  # honest ones that lost their place to one word against theirs
        self._torn: set[str] = set()  # evicted workers that hold parts of different states, without knowing it
        self._joined: set[str] = set()  # workers that a view took in; no schedule is so long that a trial ends
        self._wronged = 0
        self._wronged_at = -1.0
        self._unfed = UnfedWitness(world)

    def check(self, worker: Process) -> None:
        """After every event of a worker."""
        member, exchange = worker.state_machine, worker.exchange
        if member.view is not None:
            if member.view.number < self._newest[worker.name]:
                raise Violation(f"{worker.name} goes back to view {member.view.number}")
            self._newest[worker.name] = member.view.number
        if (
            member.has_result
            and not self._out(worker)
            and (
                exchange is None
                or exchange.round != member.round
                or exchange.result is None
                or exchange.result == GARBAGE
            )
        ):
            raise Violation(f"{worker.name} counts as holding round {member.round}, which it does not")

    def _out(self, worker: Process) -> bool:
        """It may not have heard that yet."""
        return worker.evicted or worker.name in self._world.coordinator.departed

    def switched(self, worker: Process, view: View, round_: int) -> None:
        """R2."""
        self._world.say(worker.name, f"applies view {view.number} {view.members} at round {round_}")
        self._in_force = max(self._in_force, view, key=lambda v: v.number)
        self._joined.update(view.joining)
        if self._applied.setdefault(view.number, round_) != round_:
            raise Violation(
                f"R2: {worker.name} applies view {view.number} at round {round_}, "
                f"others at {self._applied[view.number]}"
            )
        self._dealt(view)

    def resumed(self, worker: Process, message: m.Resume) -> None:
        round_ = worker.state_machine.round
        if (
            worker.name not in self._in_force.members
        ):  # a leaving worker takes the run up; what the lost did alone is done anew
            self._branches.add(message.view.number)
        if message.view.number in self._branches:
            worker.root = message.view.number
        self._in_force = max(self._in_force, message.view, key=lambda v: v.number)
        if self._resumed.setdefault(message.view.number, (round_, message.commit)) != (round_, message.commit):
            raise Violation(f"R2: {worker.name} resumes view {message.view.number} at round {round_}, others do not")
        self._dealt(message.view)

    def _dealt(self, view: View) -> None:
        """A round that begins in it has each host's shards in one range."""
        host_of = {name: self._world.host_of(self._world.workers[name]) for name in view.members}
        for workers in (view.members, view.synced):
            held = view.lineage(workers).assign(2 * len(workers) + 1) if workers else {}
            at = {shard: host_of[name] for name, shards in held.items() for shard in shards}
            ranges = [host for host, _ in groupby(at[shard] for shard in sorted(at))]
            if len(ranges) != len(set(ranges)):
                raise Violation(f"view {view.number} deals the shards of one host in several ranges: {at}")

    def ended(self, worker: DataPlane, exchange: SimulatedExchange) -> None:
        """R1."""
        self._world.say(worker.name, f"ends round {exchange.round} ({exchange.kind}) in view {exchange.view.number}")
        for name in exchange.view.members:
            other = self._world.workers[name]
            machine = other.state_machine
            if not other.alive or machine.round > exchange.round:
                continue
            # By those who could not compare it with this one; or since one says falsely that it does not hold it.
            redone = self._out(worker) and (self._compared(exchange) or self._world.mistaken is not None)
            if not (machine.round == exchange.round and machine.has_result) and machine.phase != "out" and not redone:
                raise Violation(f"R1: {worker.name} ends round {exchange.round}, which {name} does not hold")
        differ = len({word.digest for word in exchange.commits if word.digest}) > 1
        if differ and self._world.settings.bits != "any":
            raise Violation(f"{worker.name} ends round {exchange.round}, although the replicas differ")
        number, place = exchange.view.number, (worker.root, exchange.round)
        if self._compared(exchange):
            self._to_compare.add(place)
        self._forget_ends(place)
        if self._on_its_own(worker, place):
            return
        self._enders.setdefault(place, set()).add(worker.name)
        other = self._ended.setdefault(place, number)
        if other != number and self._redone(worker, place):
            self._ended[place] = number
        elif other != number:
            raise Violation(f"round {exchange.round} has ended in view {number} and in view {other}: both go on")
        for other in self._world.workers.values():
            begun_anew = other.alive and not other.evicted and other.state_machine.synced and other.root > worker.root
            if begun_anew and not self._left_behind(worker, exchange):
                raise Violation(f"{worker.name} goes on in a run that {other.name} has begun anew")

    def _left_behind(self, worker: DataPlane, exchange: SimulatedExchange) -> bool:
        """It is out, and has had the words of this one round; all others have left its view, so it gets no further."""
        peers = [self._world.workers[name] for name in exchange.view.members if name != worker.name]
        there = [
            w for w in peers if w.alive and w.state_machine.view and w.state_machine.view.number == exchange.view.number
        ]
        return self._world.coordinator.departed.keys() >= {worker.name} and bool(peers) and not there

    def _on_its_own(self, worker: Process, place: tuple[int, int]) -> bool:
        """It is out and has not heard it, and ends a round that the others redo, for they can't compare it with this
        one any more.
        """
        return place in self._to_compare and self._out(worker)

    def _alone(self, place: tuple[int, int]) -> bool:
        """Returns True if no worker that has ended that round is still in the run, and the others may redo it: one was
        evicted by a report against its own, or the round was to be compared, or a faulty member has reported that the
        replicas differ.
        """
        enders = self._enders.get(place, set())
        there = [each for each in map(self._world.workers.__getitem__, enders) if each.alive and not self._out(each)]
        mistaken = self._world.mistaken
        doubted = mistaken is not None and mistaken.kind == "differs"
        return bool(enders & self._disbelieved or place in self._to_compare or doubted) and not there

    def _forget_ends(self, place: tuple[int, int]) -> None:
        """Forget how a round ended for workers that are all gone, if the others may redo it."""
        if self._alone(place):
            self._ended.pop(place, None)
            self._committed.pop(place, None)

    def _redone(self, worker: Process, place: tuple[int, int]) -> bool:
        """Whether the round may be redone although some have ended it: these are gone, and a member has reported
        falsely that it does not hold the result.
        """
        enders = map(self._world.workers.__getitem__, self._enders[place] - {worker.name})
        there = [each for each in enders if each.alive and not self._out(each)]
        mistaken = self._world.mistaken
        return mistaken is not None and mistaken.kind == "has_result" and not there

    def _compared(self, exchange: SimulatedExchange) -> bool:
        """Whether two may compute one shard in this round."""
        again = exchange.lineage.rechecks is not None
        return exchange.kind == "train" and bool(exchange.view.unchecked or self._world.settings.audit or again)

    def committed(self, worker: Process, exchange: SimulatedExchange) -> None:
        """All who commit a round commit the same one; the sum itself was checked when it was made."""
        if exchange.result is None or exchange.result == GARBAGE:
            raise Violation(f"{worker.name} commits round {exchange.round}, whose result it does not have")
        if exchange.round in worker.apart_in:
            raise Violation(f"{worker.name} commits round {exchange.round}, in which it has seen the replicas differ")
        if exchange.kind == "train":
            self._trained(worker, exchange)
        place = (worker.root, exchange.round)
        if self._on_its_own(worker, place):
            return
        self._forget_ends(place)  # the round may be redone and then committed by a decision, so that it ends nowhere
        self._enders.setdefault(place, set()).add(worker.name)
        fact = (exchange.kind, worker.step, exchange.lineage, exchange.result)
        known = self._committed.setdefault(place, fact)
        if known[-1] == fact[-1] and self._redone(worker, place):
            self._committed[place] = fact
        elif known != fact:
            raise Violation(f"{worker.name} commits round {exchange.round} as {fact}, others as {known}")

    def _trained(self, worker: Process, exchange: SimulatedExchange) -> None:
        """With every shard audited, what one machine computes wrong is in no step of three or more."""
        workers, held = exchange.lineage.sets[-1], exchange.lineage.assign(exchange.shards)
        first = next(name for name, mine in held.items() if 0 in mine)
        misled = self._disbelieved.intersection(exchange.lineage.sets[0])  # the round ended by a false report alone
        for name in () if misled else exchange.view.unchecked:
            if name in workers and self._world.workers[name].errs == 1.0 and name != first:
                raise Violation(f"{worker.name} commits a step in which {name} has proved nothing")
        right = tuple(shard_value(worker.state, "train", worker.step, shard) for shard in range(exchange.shards))
        if exchange.result == right:
            return
        self.erred = True
        audited = (
            self._world.settings.audit == 1.0 and not exchange.view.unchecked and exchange.lineage.rechecks is None
        )
        if audited and len(workers) > 2:
            raise Violation(f"{worker.name} commits a step in which one of {workers} has computed wrong")

    def become_synced(self, worker: Process, loaded: set[Any]) -> None:
        self._world.say(worker.name, "is synced")
        differ = GARBAGE not in loaded and self._world.drifted  # the words of this round will say so
        if (len(loaded) != 1 or GARBAGE in loaded) and not self._out(worker) and not differ:
            raise Violation(f"{worker.name} is synced with a state that is torn: {loaded}")
        self._loaded(worker, loaded)

    def renewed(self, worker: Process, loaded: set[Any]) -> None:
        if GARBAGE in loaded and not self._out(worker):
            raise Violation(f"{worker.name} takes over a state that changed during the transfer")
        self._loaded(worker, loaded)

    def _loaded(self, worker: Process, loaded: set[Any]) -> None:
        """Note whether the state is torn."""
        (self._torn.add if GARBAGE in loaded else self._torn.discard)(worker.name)

    def saved(self, worker: Process) -> None:
        if worker.name in self._torn:
            raise Violation(f"{worker.name} saves a state that is torn")
        if worker.state_machine.differing and not self._joiners_went(worker):
            raise Violation(f"{worker.name} saves as a checkpoint what differs from the others' replicas")
        if (
            worker.state_machine.synced
            and worker.state != alone(worker.step)
            and not (self._world.drifted or self.erred)
        ):
            raise Violation(f"{worker.name} saves another state than that of step {worker.step}")
        if worker.reaches == "other":  # noted here: a coordinator may die between its state and its events
            self.misled_step = max(self.misled_step, worker.step)

    def on_first_view(self, worker: Process, step: int) -> None:
        """A worker is about to begin a first view with the state of `step`."""
        if step < self.saved_step:
            raise Violation(f"{worker.name} begins at step {step}, and a checkpoint of step {self.saved_step} is known")

    def recorded(self, event: events.Event) -> None:
        world = self._world
        self._unfed.recorded(event)
        match event:
            case events.OverEvent():
                self.nowhere = self.misled_step > max(world.store, default=0)
            case events.StateLostEvent():
                self._state_lost()
            case events.CheckpointEvent():
                self._checkpoint(world.workers[event.worker], event.step)
            case events.LostEvent():
                self._lost(world.workers[event.worker], event.reason)
            case events.ComputesWrongEvent() if not world.drifted and not world.workers[event.worker].errs:
                raise Violation(f"{event.worker} computes right, and has to go: {event.reason}")
            case events.RefusedEvent() if not self._may_refuse():
                raise Violation(f"{event.worker} computes right, and is refused: {event.reason}")
            case events.UndecidedEvent() if not world.drifted and not any(world.workers[w].errs for w in event.workers):
                raise Violation(f"all compute right: {event.reason}")
            case events.CallsDifferEvent() if not world.strayed and not world.mistaken:
                raise Violation(f"{event.reason}, and they did not")
            case events.FinishedEvent(equal=False) if not (world.strayed or world.drifted):
                raise Violation("the finished workers' states differ")
            case _:
                pass

    def _may_refuse(self) -> bool:
        """A joiner is compared with one who is in the run already, or began it, and may be the one that is wrong. What
        one of two says of the other may be, too.
        """
        world = self._world
        view = world.coordinator.view
        of_two = world.mistaken is not None and view is not None and view.members == (world.mistaken.name,)
        return of_two or world.drifted or any(other.errs for other in world.workers.values())

    def _checkpoint(self, worker: Process, step: int) -> None:
        if worker.reaches == "none":
            raise Violation(f"{worker.name} writes checkpoints, and does not reach the store")
        if not worker.reaches:
            self.saved_step = max(self.saved_step, step)

    def asked_to_save(self, worker: Process, save: Save) -> None:
        if worker.apart_in and save.save and not save.allow_between and not self._joiners_went(worker):
            raise Violation(f"{worker.name} is to save as a checkpoint what differs from the others' replicas")

    def _joiners_went(self, worker: Process) -> bool:
        """Return True if only joiners differed in the round that `worker` could not end, and all of them are removed.

        Then its replica is right. See docs/protocol.md, Recomputation 4.
        """
        odd = worker.state_machine.differing
        removed = all(name in self._joined and self._out(self._world.workers[name]) for name in odd)
        return bool(odd) and removed and worker.name not in odd

    def _state_lost(self) -> None:
        for worker in self._world.workers.values():
            holds = (
                worker.alive
                and worker.state_machine.synced
                and worker.instructions.exit is None
                and not worker.orphaned()
            )
            if holds and not self._out(worker):
                raise Violation(f"the run begins anew although {worker.name} holds the state")

    def _lost(self, worker: Process, reason: str) -> None:
        """An honest worker has lost its place: was that fair?"""
        world = self._world
        bad = world.mistaken.name if world.mistaken else ""
        if worker.name == bad:
            return
        against_one = bool(bad) and reason.startswith(f"contradicted by {bad}:")
        if against_one:
            self._disbelieved.add(worker.name)
        if any(words in reason for words in DISBELIEVED) and not against_one:
            raise Violation(f"{worker.name} is honest, and is not believed: {reason}")
        absent = reason.startswith(ABSENT)  # not by one word alone: it could not be asked
        confirmed = "; " in reason.partition(" (")[0]  # other accusations count against it too
        if (against_one or (WRONG in reason and not confirmed)) and not absent and worker.state_machine.synced:
            if self._wronged_at == world.now:
                raise Violation(f"one word of {bad} has cost two honest workers their place: {reason}")
            self._wronged_at = world.now
            self._wronged += 1
            if self._wronged > BENEFITS * (1 + world.restarts):
                raise Violation(f"{bad} has put out {self._wronged} honest workers by its word alone")
