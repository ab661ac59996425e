"""The coordinator as a pure state machine: messages and times in, actions out.

It decides views and nothing else: it is asked nothing in a step. The invariant that it keeps: at any time at most
one of {a proposed view, a stopped view} is outstanding, and a new view is issued only when the last one is in force
for all of its members or has been stopped and reported on by all who live.

    planned change   Propose(v+1) -> [workers agree in band, R2] -> Switched from every member of v+1 -> next
    unplanned        Stop -> Stopped from everyone who lives -> recovery.decide -> Resume(v')          -> next

Any loss of a participant (a member of the view, or of the proposed one) takes the second way: its process has ended,
its connection closed or its heartbeats stopped for longer than is usual (`silence`), or peers' accusations outlive the
stop. What a closed connection does and does not mean, and how a killed coordinator comes back, is in `reconnection`.

Here are the inputs and the workers' coming and going. After each input `_settle` looks at what is due next, so that
no way of losing or gaining a worker can leave a change undone. Once the run is over, nothing more is decided.
"""

from __future__ import annotations

from farandole.errors import ProtocolError
from farandole.membership import (
    accounting,
    admission,
    calls,
    ending,
    events,
    feeding,
    going,
    last_resort,
    losses,
    metric_lines,
    names,
    planned,
    pools,
    reconnection,
    replicas,
    requests,
    roster,
    saving,
    standstill,
    strangers,
    suspicion,
    testimony,
    tracing,
    unplanned,
    verdicts,
)
from farandole.membership import messages as m
from farandole.membership.books import EVICTED, Books
from farandole.membership.records import Action, Ending, RunSettings, Worker
from farandole.membership.silence import Silence


class Coordinator(Books):
    """See the module's head. Feed it, then `drain()` the actions. `known`: what a killed one left (`reconnection`)."""

    def __init__(self, settings: RunSettings, known: reconnection.Durable | None = None, now: float = 0.0) -> None:
        super().__init__(settings)
        self._ticked: float | None = None
        if known is not None:
            reconnection.restore(self, known, now)
        elif settings.edited:
            self.record(events.CodeEdited(files=settings.edited))

    def drain(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def _settle(self, now: float) -> None:
        """After every input: end the run or plan the next view, if it is time."""
        metric_lines.settle(self)
        if not self.over:
            for workers, message in testimony.confirmed(self):
                unplanned.seen(self, workers, message)
        requests.shrink(self)
        if self.over or ending.settle(self, now):
            return
        if self.ending and ending.comes_between(self):
            unplanned.stop(self, self.ending.reason)
        elif unfed := feeding.due(self):
            unplanned.stop(self, unfed)
        else:
            planned.plan(self, now)

    # --- inputs from connections ---------------------------------------------------------------------------

    def hello(self, hello: m.Hello, now: float) -> str:
        """A worker has connected, or connected again. Returns its id; the first action for it is Welcome or Goodbye.

        Raises:
            ProtocolError: a Hello that was said before.
        """
        known = self.workers.get(hello.worker)
        same = known is not None and known.session == hello.session != ""
        if known and same:
            if hello.attempt <= known.attempt:
                raise ProtocolError(f"a Hello of {hello.worker} that was said before, or is older than its newest one")
            known.attempt, known.pid = hello.attempt, hello.pid
            if not self.over and self.has_part(known.id):
                if self.stopping and known.id in self.stopping.expelled:
                    reason = f"evicted: {self.stopping.expelled[known.id]}"
                    self.send(known.id, m.Goodbye(reason=reason, code=self.eviction(known.id)))
                    return known.id
                self._welcome(known.id)
                requests.remind(self, known)
                tracing.remind(self, known.id)
                reconnection.returned(self, known, now)
                if suspicion.returns_too_often(self, known.id):
                    going.evict(self, known.id, "its connection breaks again and again")
                self._settle(now)
                return known.id
            del self.workers[known.id]  # it has no part yet: it asks in anew
        departed = self.departed.get(hello.worker)
        back = departed is not None and departed.session == hello.session != ""
        worker = hello.worker if back or same else names.fresh(self, hello)
        if back and departed:  # no Welcome: it would renew the lease of one that the others go on without
            self.send(worker, m.Goodbye(reason=departed.reason, code=departed.code))
            return worker
        if hello.synced and not self.over:  # see `reconnection`, 7
            self.send(worker, m.Goodbye(reason="evicted: this run does not know it", code=EVICTED, save=True))
            return worker
        self._welcome(worker)
        if self.over:
            self.send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))
        elif hello.attempt > 1:
            self.send(worker, m.Demoted())
        if not same:  # an event, so that the journal has it: the next coordinator misses who does not return
            self.record(events.Starting(worker=worker, host=hello.host, pid=hello.pid))
        self.silences.begin(silence := Silence(), now)
        self.workers[worker] = Worker(
            id=worker, host=hello.host, pid=hello.pid, pool=hello.pool, silence=silence, session=hello.session,
            attempt=hello.attempt,
        )  # fmt: skip
        pools.arrived(self, worker)
        return worker

    def knows(self, hello: m.Hello) -> bool:
        """Whether this process of a worker is one of the run's, or was."""
        known = self.workers.get(hello.worker) or self.departed.get(hello.worker)
        return known is not None and known.session == hello.session != ""

    def _welcome(self, worker: str) -> None:
        s = self.settings
        self.send(worker, m.Welcome(run=s.run, worker=worker, folder=s.folder, terms=s.terms, lines=self.last_line))

    def receive(self, worker: str, message: m.Message, now: float) -> None:
        """A message from `worker`. Messages of workers that are out are ignored: their connection is being closed."""
        known = self.workers.get(worker)
        if known is None:
            return
        self.silences.hear(known.silence, now, learns=known.computed)
        if isinstance(message, m.Heartbeat):
            self._heartbeat(known, message, now)
            return
        if isinstance(message, m.Prepared):  # nothing follows from it, and everyone sends one
            known.prepared = max(known.prepared, message.view)
            return
        if self.over:
            return
        if isinstance(message, m.Switched | m.Stopped | m.Finished):
            metric_lines.said(self, known, message.step)
        try:
            self._hear(known, message)
        except ProtocolError as error:  # it contradicts what we know: it can't be one of the run's any more
            self.put_out(worker, str(error), now)
        self._settle(now)

    def _hear(self, known: Worker, message: m.Message) -> None:
        worker = known.id
        match message:
            case m.Ready():
                admission.ready(self, known, message)
            case m.Leaving():
                requests.notice(self, known, message.reason)
            case m.Lapsed() if known.leaving:
                going.lapsed(self, known)
            case m.Publish():
                planned.publish(self, worker, message)
            case m.Switched():
                planned.switched(self, known, message)
            case m.Unproved():
                strangers.unproved(self, worker, message)
            case m.Synced():
                planned.synced(self, worker, message)
            case m.Suspect():
                unplanned.suspect(self, worker, message)
            case m.Stopped():
                unplanned.stopped(self, worker, message)
            case m.Failed() | m.Unfed():
                going.ends(self, known, message)
            case m.Saved() | m.Digests():
                ending.answered(self, worker, message)
            case m.Checkpointed() | m.Restored():
                if isinstance(message, m.Restored) and message.done:
                    ending.nothing_left(self, known, message)
                saving.heard(self, known, message)
            case m.SettingChanged():
                admission.setting_changed(self, known, message)
            case m.UnknownOperator():
                admission.unknown_operator(self, known, message)
            case m.LoaderEnded() | m.Unrecorded():
                for event in last_resort.told(worker, message):
                    self.record(event)
            case m.Short():
                if saving.short(self, known, message):
                    unplanned.stop(self, f"{worker} can't begin")
            case m.Spans():
                tracing.heard(self, known, message)
            case m.Drifts():
                replicas.drifts(self, message)
            case m.NotFinite() | m.Differs() | m.Unlike():
                if self.has_part(worker):
                    testimony.heard(self, worker, message)
            case m.Finished() if self.stands_alone(known):
                going.excuse(self, known, "its script ended before it was let in", 0)
            case m.Finished():
                calls.finished(self, known, message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__}")

    def disconnected(self, worker: str, now: float) -> None:
        """The control connection has closed. That alone is no death; see `reconnection`."""
        if worker not in self.workers or self.over:
            return
        gone = self.workers[worker]
        if worker in self.gone:
            going.lost(self, gone, self.gone[worker] or "its process has ended")
        else:
            reconnection.absent(self, gone, now)
        self._settle(now)

    def from_pool(self, pool: str, host: str, message: m.FromPool, now: float) -> None:
        """What `pool`, whose process is on `host`, says of its own. See `pools`."""
        if not self.over:
            pools.hear(self, pool, host, message)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        slept = self._ticked is not None and now - self._ticked > self.settings.heartbeat_timeout_s / 2
        self._ticked = self.clock = now
        self.silences.tick(now, (worker.silence for worker in self.workers.values() if worker.connected))
        if slept:  # it is we who were away
            self.movement.moved(now)
        if slept or self.over:
            return
        accounting.tick(self, now)
        for worker, reason in reconnection.silent(self, now):
            going.evict(self, worker, reason)
        for worker in planned.late(self, now):
            unplanned.expel(self, worker, f"no connection to the members within {self.settings.prepare_timeout_s:g} s")
        standstill.watch(self, now)
        self._settle(now)

    def put_out(self, worker: str, reason: str, now: float) -> None:
        """It has to go, and is told to stay out."""
        self.bar(worker)
        going.evict(self, worker, reason)
        self._settle(now)

    # --- inputs from people --------------------------------------------------------------------------------

    def scale(self, wanted: int, now: float, pool: str = "") -> None:
        """`farandole scale`. Raises UsageError; see `requests`."""
        requests.scale(self, wanted, pool)
        self._settle(now)

    def release(self, name: str, now: float) -> list[str]:
        """`farandole release`: the ids of those who were asked to leave. Raises UsageError; see `requests`."""
        released = requests.release(self, name)
        self._settle(now)
        return released

    def stop(self, reason: str, code: int, now: float) -> None:
        """`farandole stop`, SIGINT: everyone leaves after the same step; rank 0 writes a checkpoint."""
        if self.ending or self.over:
            return
        self.record(events.Stopping(reason=reason))
        self.ending, self.ending_at = Ending(code=code, reason=reason, failed=False), now
        self._settle(now)

    def roster(self, pool: str = "") -> m.Roster:
        """What that pool acts on; without a name, the run's own."""
        return roster.of(self, pool)

    # --- single messages -----------------------------------------------------------------------------------

    def _heartbeat(self, worker: Worker, beat: m.Heartbeat, now: float) -> None:
        worker.beat, worker.computed = beat, worker.computed or beat.shards > 0
        if self.view and beat.view == self.view.number and worker.state in ("member", "finished"):
            losses.reached(self, worker.id, beat.step)
            verdicts.heard(self, beat)
            self.movement.heard(worker.id, beat, now)
        self.speeds.heard(worker.id, beat, self.view)
        calls.began(self, worker.id, beat)
        unplanned.held_up(self, worker.id, beat)
        metric_lines.heard(self, worker, beat)
        accounting.heard(self, worker, beat, now)
        if beat.number and beat.number % m.HEARD_EVERY == 0:
            self.send(worker.id, m.Heard(beat=beat.number, lines=self.last_line))
