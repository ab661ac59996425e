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
from farandole.protocol import events, reported_events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import (
    accounting,
    admission,
    disputes,
    failures,
    reconnection,
    recovery,
    scaling,
    shutdown,
    verdicts,
    view_changes,
)
from farandole.protocol.coordinator import metric_lines as last_resort
from farandole.protocol.coordinator.state import (
    EXIT_DATA_UNAVAILABLE,
    EXIT_EVICTED,
    Action,
    CoordinatorState,
    Ending,
    RunSettings,
    Worker,
)
from farandole.protocol.failure_detector import Silence

# --- pools ------------------------------------------------------------------------------------------------------------
#
# What pools say of their workers and hosts, and what follows.
#
#     exited        a process has ended, for certain
#     noticed       a host will go: its workers leave gracefully, those that have not come yet as soon as they do
#     capacity      how many workers it can have: what it can't, other pools are asked for
#     start_failed, no_capacity, advised, host_seen   are told to people: nobody was lost, and nobody has to leave
#     host_priced   what a host costs is written down
#
# A pool says the first two again to a coordinator that is back; what is known does nothing then. What it says of
# workers of others is not heard.


def on_pool_message(state: CoordinatorState, pool: str, host: str, message: m.FromPool) -> None:
    """A message of `pool`, whose own process is on `host`."""
    match message:
        case m.WorkerProcessExited(worker=worker, reason=reason) if scaling.owns(state, pool, worker):
            on_process_exit(state, worker, pool, host, reason)
        case m.PreemptionNotice():
            for worker in message.workers:
                if scaling.owns(state, pool, worker):
                    _on_preemption(state, worker, message)
        case m.StartFailed(worker=worker) if scaling.owns(state, pool, worker):
            state.record(events.StartFailedEvent(worker=worker, host=message.host, reason=message.reason))
        case m.NoCapacity():
            state.record(events.NoCapacityEvent(pool=pool, reason=message.reason))
        case m.Capacity(workers=workers, gathers=gathers):
            mark = scaling.pool_mark(state, pool)
            state.gathering_pools = (state.gathering_pools | {mark}) if gathers else state.gathering_pools - {mark}
            state.pool_capacity = {
                **{m: n for m, n in state.pool_capacity.items() if m != mark},
                **({} if workers is None else {mark: workers}),
            }
        case m.HostSeen():
            state.record(events.HostEvent(pool=pool, host=message.host, state=message.state, reason=message.reason))
        case m.HostPriced(host=named, dollars=dollars, since=since, day=day):
            state.record(events.PricedEvent(pool=pool, host=named, dollars=dollars, since=since, day=day))
        case m.RebalanceAdvice():
            state.record(events.AdviceEvent(pool=pool, host=message.host, reason=message.reason))
        case _:
            pass


def on_process_exit(state: CoordinatorState, worker: str, pool: str, host: str, reason: str) -> None:
    """Its connection may not have closed yet. May be told again."""
    if worker in state.dead:
        return
    state.mark_dead(worker, reason)
    known, departed = state.workers.get(worker), state.departed.get(worker)
    if known is not None and state.let_in(worker):
        if not known.connected:
            view_changes.lost(state, known, reason)
    else:
        if known is None and departed is None:
            state.record(events.ExitedEvent(worker=worker, host=host, reason=reason))
        let_go = departed and (departed.started or departed.refused or departed.code in (0, EXIT_DATA_UNAVAILABLE))
        if pool and not let_go and not (known and known.leaving) and worker not in state.preempted:
            failures.on_startup_failure(state, worker, pool)
        if departed and departed.started and departed.code == EXIT_EVICTED:  # its peers had seen it first
            failures.on_wrong_worker(state, worker, reason, entered=departed.entered)
        if known is not None and not known.connected:
            view_changes.lost(state, known, reason)
    recovery.recover_if_ready(state)


def on_arrival(state: CoordinatorState, worker: str) -> None:
    """It has come. Its host may have had notice before."""
    if reason := state.preempted.pop(worker, ""):
        scaling.request_leave(state, state.workers[worker], reason)


def _on_preemption(state: CoordinatorState, worker: str, message: m.PreemptionNotice) -> None:
    reason = f"{message.host} goes within {message.within_s} s: {message.reason}"
    if known := state.workers.get(worker):
        scaling.request_leave(state, known, reason)
        scaling.set_deadline(state, known, message.within_s)
    elif worker not in state.departed and worker not in state.dead:
        state.leave_on_arrival(worker, reason)


# --- coordinator ------------------------------------------------------------------------------------------------------


class Coordinator(CoordinatorState):
    """See the module's head. Feed it, then `drain()` the actions. `known`: what a killed one left (`reconnection`)."""

    def __init__(self, settings: RunSettings, known: reconnection.Durable | None = None, now: float = 0.0) -> None:
        super().__init__(settings)
        self._ticked: float | None = None
        if known is not None:
            reconnection.restore(self, known, now)
        elif settings.edited:
            self.record(events.CodeEditedEvent(files=settings.edited))

    def drain(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def _settle(self, now: float) -> None:
        """After every input: end the run or plan the next view, if it is time."""
        last_resort.release_lines(self)
        if not self.over:
            for workers, message in disputes.confirmed(self):
                recovery.on_shared_report(self, workers, message)
        scaling.shrink(self)
        if self.over or shutdown.advance(self, now):
            return
        if self.ending and shutdown.is_between_steps(self):
            recovery.stop_view(self, self.ending.reason)
        elif unfed := failures.stop_for_data(self):
            recovery.stop_view(self, unfed)
        else:
            view_changes.plan(self, now)

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
                    self.send(known.id, m.Goodbye(reason=reason, code=self.eviction_code(known.id)))
                    return known.id
                self._welcome(known.id)
                scaling.repeat_notice(self, known)
                accounting.repeat_trace(self, known.id)
                reconnection.on_return(self, known, now)
                if disputes.returns_too_often(self, known.id):
                    view_changes.evict(self, known.id, "its connection breaks again and again")
                self._settle(now)
                return known.id
            del self.workers[known.id]  # it has no part yet: it asks in anew
        departed = self.departed.get(hello.worker)
        back = departed is not None and departed.session == hello.session != ""
        worker = hello.worker if back or same else scaling.new_id(self, hello)
        if back and departed:  # no Welcome: it would renew the lease of one that the others go on without
            self.send(worker, m.Goodbye(reason=departed.reason, code=departed.code))
            return worker
        if hello.synced and not self.over:  # see `reconnection`, 7
            self.send(worker, m.Goodbye(reason="evicted: this run does not know it", code=EXIT_EVICTED, save=True))
            return worker
        self._welcome(worker)
        if self.over:
            self.send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))
        elif hello.attempt > 1:
            self.send(worker, m.Demoted())
        if not same:  # an event, so that the journal has it: the next coordinator misses who does not return
            self.record(events.StartingEvent(worker=worker, host=hello.host, pid=hello.pid))
        self.failure_detector.begin(silence := Silence(), now)
        self.workers[worker] = Worker(
            id=worker, host=hello.host, pid=hello.pid, pool=hello.pool, silence=silence, session=hello.session,
            attempt=hello.attempt,
        )  # fmt: skip
        on_arrival(self, worker)
        return worker

    def knows(self, hello: m.Hello) -> bool:
        """Whether this process of a worker is one of the run's, or was."""
        known = self.workers.get(hello.worker) or self.departed.get(hello.worker)
        return known is not None and known.session == hello.session != ""

    def _welcome(self, worker: str) -> None:
        s = self.settings
        self.send(worker, m.Welcome(run=s.run, worker=worker, folder=s.folder, terms=s.terms, lines=self.last_line))

    def on_message(self, worker: str, message: m.Message, now: float) -> None:
        """A message from `worker`. Messages of workers that are out are ignored: their connection is being closed."""
        known = self.workers.get(worker)
        if known is None:
            return
        self.failure_detector.hear(known.silence, now, learns=known.computed)
        if isinstance(message, m.Heartbeat):
            self._heartbeat(known, message, now)
            return
        if isinstance(message, m.Prepared):  # nothing follows from it, and everyone sends one
            known.prepared = max(known.prepared, message.view)
            return
        if self.over:
            return
        if isinstance(message, m.Switched | m.Stopped | m.Finished):
            last_resort.note_step(self, known, message.step)
        try:
            self._dispatch(known, message)
        except ProtocolError as error:  # it contradicts what we know: it can't be one of the run's any more
            self.ban_and_remove(worker, str(error), now)
        self._settle(now)

    def _dispatch(self, known: Worker, message: m.Message) -> None:
        worker = known.id
        match message:
            case m.Ready():
                admission.on_ready(self, known, message)
            case m.LeaveRequest():
                scaling.request_leave(self, known, message.reason)
            case m.Lapsed() if known.leaving:
                view_changes.lapsed(self, known)
            case m.Publish():
                view_changes.on_publish(self, worker, message)
            case m.Switched():
                view_changes.on_switched(self, known, message)
            case m.PeerUnproved():
                view_changes.on_unproved_peer(self, worker, message)
            case m.Synced():
                view_changes.on_synced(self, worker, message)
            case m.Suspect():
                recovery.on_suspect(self, worker, message)
            case m.Stopped():
                recovery.on_stopped(self, worker, message)
            case m.ScriptFailed() | m.DataUnavailable():
                view_changes.on_script_end(self, known, message)
            case m.Saved() | m.Digests():
                shutdown.on_answer(self, worker, message)
            case m.Checkpointed() | m.Restored():
                if isinstance(message, m.Restored) and message.done:
                    shutdown.on_nothing_left(self, known, message)
                shutdown.on_checkpoint(self, known, message)
            case m.SettingChanged():
                admission.on_setting_changed(self, known, message)
            case m.UnknownOperator():
                admission.on_unknown_operator(self, known, message)
            case m.LoaderEnded() | m.Unrecorded():
                for event in reported_events.events_of(worker, message):
                    self.record(event)
            case m.CannotStart():
                if shutdown.on_cannot_start(self, known, message):
                    recovery.stop_view(self, f"{worker} can't begin")
            case m.Spans():
                accounting.on_spans(self, known, message)
            case m.Drifts():
                disputes.on_drifts(self, message)
            case m.NotFinite() | m.Differs() | m.ShardsDiffer():
                if self.has_part(worker):
                    disputes.corroborate(self, worker, message)
            case m.Finished() if self.stands_alone(known):
                view_changes.excuse(self, known, "its script ended before it was let in", 0)
            case m.Finished():
                view_changes.on_finished(self, known, message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__}")

    def on_disconnect(self, worker: str, now: float) -> None:
        """The control connection has closed. That alone is no death; see `reconnection`."""
        if worker not in self.workers or self.over:
            return
        gone = self.workers[worker]
        if worker in self.dead:
            view_changes.lost(self, gone, self.dead[worker] or "its process has ended")
        else:
            reconnection.on_absence(self, gone, now)
        self._settle(now)

    def on_pool_message(self, pool: str, host: str, message: m.FromPool, now: float) -> None:
        """What `pool`, whose process is on `host`, says of its own. See `pools`."""
        if not self.over:
            on_pool_message(self, pool, host, message)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        slept = self._ticked is not None and now - self._ticked > self.settings.heartbeat_timeout_s / 2
        self._ticked = self.clock = now
        self.failure_detector.tick(now, (worker.silence for worker in self.workers.values() if worker.connected))
        if slept:  # it is we who were away
            self.progress.moved(now)
        if slept or self.over:
            return
        accounting.tick(self, now)
        for worker, reason in reconnection.silent_workers(self, now):
            view_changes.evict(self, worker, reason)
        for worker in view_changes.late_members(self, now):
            recovery.expel(self, worker, f"no connection to the members within {self.settings.prepare_timeout_s:g} s")
        failures.watch_for_stalls(self, now)
        self._settle(now)

    def ban_and_remove(self, worker: str, reason: str, now: float) -> None:
        """It has to go, and is told to stay out."""
        self.ban(worker)
        view_changes.evict(self, worker, reason)
        self._settle(now)

    # --- inputs from people --------------------------------------------------------------------------------

    def scale(self, wanted: int, now: float, pool: str = "") -> None:
        """`farandole scale`. Raises UsageError; see `requests`."""
        scaling.scale(self, wanted, pool)
        self._settle(now)

    def release(self, name: str, now: float) -> list[str]:
        """`farandole release`: the ids of those who were asked to leave. Raises UsageError; see `requests`."""
        released = scaling.release(self, name)
        self._settle(now)
        return released

    def stop(self, reason: str, code: int, now: float) -> None:
        """`farandole stop`, SIGINT: everyone leaves after the same step; rank 0 writes a checkpoint."""
        if self.ending or self.over:
            return
        self.record(events.StoppingEvent(reason=reason))
        self.ending, self.ending_at = Ending(code=code, reason=reason, failed=False), now
        self._settle(now)

    def roster(self, pool: str = "") -> m.Roster:
        """What that pool acts on; without a name, the run's own."""
        return scaling.build_roster(self, pool)

    # --- single messages -----------------------------------------------------------------------------------

    def _heartbeat(self, worker: Worker, beat: m.Heartbeat, now: float) -> None:
        worker.heartbeat, worker.computed = beat, worker.computed or beat.shards > 0
        if self.view and beat.view == self.view.number and worker.state in ("member", "finished"):
            failures.note_progress(self, worker.id, beat.step)
            verdicts.note_proof(self, beat)
            self.progress.on_heartbeat(worker.id, beat, now)
        self.speeds.heard(worker.id, beat, self.view)
        view_changes.on_round_begun(self, worker.id, beat)
        recovery.on_held_up(self, worker.id, beat)
        last_resort.on_heartbeat(self, worker, beat)
        accounting.on_heartbeat(self, worker, beat, now)
        if beat.number and beat.number % m.HEARD_EVERY == 0:
            self.send(worker.id, m.LinesHeard(beat=beat.number, lines=self.last_line))
