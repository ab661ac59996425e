"""The coordinator as a pure state machine: messages and times in, actions out.

It decides views and, after a stop, how the run goes on; no step asks it anything. Invariant: at most one view is
proposed at a time, and none while one is stopped. A new view is issued only when the last one is in force for all of
its members, or was stopped, all participants within reach have reported, and it is fenced.

    reconfiguration  Propose(v+1) -> [workers agree by commit messages, R2] -> Switched from every member -> next
    recovery         Stop -> Stopped from all within reach -> recovery.decide -> Resume(v')     -> next

This file has the inputs, and workers that come and go. After each input `_next_decision` looks at what is due, so no
way to lose or gain a worker can leave a change half done. After the run is over, nothing more is decided.
See docs/protocol.md, Who knows what.
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
    metric_lines,
    reconnection,
    recovery,
    scaling,
    shutdown,
    view_changes,
)
from farandole.protocol.coordinator.state import (
    EXIT_DATA_UNAVAILABLE,
    EXIT_EVICTED,
    Action,
    CoordinatorState,
    Ending,
    Removal,
    RunSettings,
    Worker,
)
from farandole.protocol.failure_detector import Silence

# --- pools ------------------------------------------------------------------------------------------------------------
#
# What pools report about their workers and hosts, and what follows.
#
#     WorkerProcessExited   a process has ended, for certain
#     PreemptionNotice      a host will go: its workers leave gracefully, others as soon as they come
#     Capacity              how many workers the pool can have; other pools are asked for the rest
#     HostPriced            the price of a host is written down
#     StartFailed, NoCapacity, RebalanceAdvice, HostSeen   become events: nobody was lost, and nobody has to leave
#
# A pool repeats the first two to a restarted coordinator; what is known already has no effect. What a pool reports
# about workers of another pool is ignored.


def on_pool_message(state: CoordinatorState, pool: str, host: str, message: m.FromPool) -> None:
    """Handle a message of `pool`, whose process is on `host`."""
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
    """Handle the certain end of a worker's process.

    Its connection may not have closed yet. Pools may report the same end again.
    """
    if worker in state.dead:
        return
    state.mark_dead(worker, reason)
    record, departed = state.workers.get(worker), state.departed.get(worker)
    if record is not None and state.has_trained(worker):
        if not record.connected:
            view_changes.remove(state, worker, Removal.DIED, reason)
    else:
        if record is None and departed is None:
            state.record(events.ExitedEvent(worker=worker, host=host, reason=reason))
        expected = departed and (departed.started or departed.refused or departed.code in (0, EXIT_DATA_UNAVAILABLE))
        if pool and not expected and not (record and record.leaving) and worker not in state.preempted:
            failures.on_startup_failure(state, worker, pool)
        if departed and departed.started and departed.code == EXIT_EVICTED:  # its peers had noticed its death first
            failures.count_late_known_death(state, worker, reason, entered=departed.entered)
        if record is not None and not record.connected:
            view_changes.remove(state, worker, Removal.DIED, reason)
    recovery.recover_if_ready(state)


def on_arrival(state: CoordinatorState, worker: str) -> None:
    """Handle a new connection of a worker. Its host may have had a preemption notice before."""
    if reason := state.preempted.pop(worker, ""):
        scaling.request_leave(state, state.workers[worker], reason)


def _on_preemption(state: CoordinatorState, worker: str, message: m.PreemptionNotice) -> None:
    """Make the worker leave before its host is preempted."""
    reason = f"{message.host} is preempted within {message.within_s} s: {message.reason}"
    if record := state.workers.get(worker):
        scaling.request_leave(state, record, reason)
        scaling.set_deadline(state, record, message.within_s)
    elif worker not in state.departed and worker not in state.dead:
        state.leave_on_arrival(worker, reason)


# --- coordinator ------------------------------------------------------------------------------------------------------


class Coordinator(CoordinatorState):
    """The coordinator as a state machine: call its input methods, then `drain()` the actions.

    `known` is the journal's content if a coordinator that was killed is replaced (see `reconnection.restore`).
    """

    def __init__(self, settings: RunSettings, known: reconnection.Durable | None = None, now: float = 0.0) -> None:
        super().__init__(settings)
        self._ticked: float | None = None
        if known is not None:
            reconnection.restore(self, known, now)
        elif settings.edited:
            self.record(events.CodeEditedEvent(files=settings.edited))

    def drain(self) -> list[Action]:
        """Return the actions since the last call, in order, and forget them."""
        actions, self.actions = self.actions, []
        return actions

    def _next_decision(self, now: float) -> None:
        """End the run, stop the view or plan the next one if that is due. Called after every input."""
        metric_lines.release_lines(self)
        if not self.over:
            for workers, message in disputes.confirmed(self):
                recovery.on_shared_report(self, workers, message)
        scaling.shrink(self)
        if self.over or shutdown.advance(self, now):
            return
        if self.ending and shutdown.is_between_steps(self):
            recovery.stop_view(self, self.ending.reason)
        elif reason := failures.stop_for_data(self):
            recovery.stop_view(self, reason)
        else:
            view_changes.plan(self, now)

    # --- inputs from connections ---------------------------------------------------------------------------

    def hello(self, hello: m.Hello, now: float) -> str:
        """Handle a worker that connects or reconnects, and return its ID.

        The first action for it is Welcome or Goodbye.

        Raises:
            ProtocolError: this Hello, or a newer one of the same process, was received before.
        """
        record = self.workers.get(hello.worker)
        same = record is not None and record.session == hello.session != ""
        if record and same:
            if hello.attempt <= record.attempt:
                raise ProtocolError(f"this Hello of {hello.worker} is a repetition, or older than its newest one")
            record.attempt, record.pid = hello.attempt, hello.pid
            if not self.over and self.is_waited_for(record.id):
                if self.stopping and record.id in self.stopping.expelled:
                    reason = f"evicted: {self.stopping.expelled[record.id]}"
                    self.send(record.id, m.Goodbye(reason=reason, code=self.eviction_code(record.id)))
                    return record.id
                self._welcome(record.id)
                scaling.repeat_notice(self, record)
                accounting.repeat_trace(self, record.id)
                reconnection.on_return(self, record, now, synced=hello.synced)
                if disputes.returns_too_often(self, record.id):
                    view_changes.remove(self, record.id, Removal.EVICTED, "its connection breaks too often")
                self._next_decision(now)
                return record.id
            del self.workers[record.id]  # it has no part yet: it joins again from the start
        departed = self.departed.get(hello.worker)
        back = departed is not None and departed.session == hello.session != ""
        worker = hello.worker if back or same else scaling.new_id(self, hello)
        if back and departed:  # no Welcome, which would renew the lease of a worker that the others go on without
            self.send(worker, m.Goodbye(reason=departed.reason, code=departed.code))
            return worker
        # Either this coordinator has neither journal nor copy: then it does not know what the worker holds, or who may
        # go on with that, and its view numbers begin with 1. Or an external worker has outlived a run that was killed
        # and is resumed. The worker sends no commit message from now on. What it saves belongs to the run, under its
        # step, so the next start finds the newest.
        # See docs/protocol.md, Reconnection and the lease 7
        if hello.synced and not self.over:
            self.send(worker, m.Goodbye(reason="evicted: this run does not know it", code=EXIT_EVICTED, save=True))
            return worker
        self._welcome(worker)
        if self.over:
            self.send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))
        elif hello.attempt > 1:
            self.send(worker, m.ViewWithdrawn())
        if not same:  # the event goes to the journal, so that the next coordinator notices workers that do not return
            self.record(events.StartingEvent(worker=worker, host=hello.host, pid=hello.pid))
        self.failure_detector.begin(silence := Silence(), now)
        self.workers[worker] = Worker(
            id=worker, host=hello.host, pid=hello.pid, pool=hello.pool, silence=silence, session=hello.session,
            attempt=hello.attempt, zone=hello.zone,
        )  # fmt: skip
        on_arrival(self, worker)
        return worker

    def knows(self, hello: m.Hello) -> bool:
        """Return True if this process of a worker belongs to the run, or did before."""
        record = self.workers.get(hello.worker) or self.departed.get(hello.worker)
        return record is not None and record.session == hello.session != ""

    def _welcome(self, worker: str) -> None:
        """Send the terms of the run to a worker that has connected."""
        s = self.settings
        self.send(worker, m.Welcome(run=s.run, worker=worker, folder=s.folder, terms=s.terms, lines=self.last_line))

    def on_message(self, worker: str, message: m.Message, now: float) -> None:
        """Handle a message of `worker`. Messages of removed workers are ignored: their connections are being closed."""
        record = self.workers.get(worker)
        if record is None:
            return
        self.failure_detector.hear(record.silence, now, learns=record.computed)
        if isinstance(message, m.Heartbeat):
            self._heartbeat(record, message, now)
            return
        if isinstance(message, m.Prepared):  # nothing else follows from it, and every member sends one
            record.prepared = max(record.prepared, message.view)
            return
        if self.over:
            return
        if isinstance(message, m.Switched | m.Stopped | m.Finished):
            metric_lines.note_step(self, record, message.step)
        try:
            self._dispatch(record, message)
        except ProtocolError as error:  # it contradicts the state: the worker cannot stay in the run
            self.ban_and_remove(worker, str(error), now)
        self._next_decision(now)

    def _dispatch(self, record: Worker, message: m.Message) -> None:
        """Call the handler of a message that is neither a heartbeat nor Prepared.

        Raises:
            ProtocolError: the message contradicts the state.
        """
        worker = record.id
        match message:
            case m.Ready():
                admission.on_ready(self, record, message)
            case m.LeaveRequest():
                scaling.request_leave(self, record, message.reason)
            case m.Lapsed() if record.leaving:
                view_changes.remove_late_leaver(self, record)
            case m.Publish():
                view_changes.on_publish(self, worker, message)
            case m.Switched():
                view_changes.on_switched(self, record, message)
            case m.PeerNotAuthenticated():
                view_changes.on_peer_not_authenticated(self, worker, message)
            case m.Synced():
                view_changes.on_synced(self, worker, message)
            case m.Suspect():
                recovery.on_suspect(self, worker, message)
            case m.Stopped():
                recovery.on_stopped(self, worker, message)
            case m.ScriptFailed() | m.DataUnavailable():
                view_changes.on_script_end(self, record, message)
            case m.Saved() | m.Digests():
                shutdown.on_answer(self, worker, message)
            case m.Checkpointed() | m.Restored():
                if isinstance(message, m.Restored) and message.done:
                    shutdown.on_nothing_left(self, record, message)
                shutdown.on_checkpoint(self, record, message)
            case m.SettingChanged():
                admission.on_setting_changed(self, record, message)
            case m.UnknownOperator():
                admission.on_unknown_operator(self, record, message)
            case m.LoaderEnded() | m.Unrecorded():
                for event in reported_events.events_of(worker, message):
                    self.record(event)
            case m.CannotStart():
                if shutdown.on_cannot_start(self, record, message):
                    recovery.stop_view(self, f"{worker} cannot begin")
            case m.Spans():
                accounting.on_spans(self, record, message)
            case m.Drifts():
                disputes.on_drifts(self, message)
            case m.NotFinite() | m.Differs() | m.ShardsDiffer():
                if self.is_waited_for(worker):
                    disputes.corroborate(self, worker, message)
            case m.Finished() if self.affects_only_itself(record):
                view_changes.remove(self, worker, Removal.LEFT, "its script ended before it became a member")
            case m.Finished():
                view_changes.on_finished(self, record, message)
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__}")

    def on_disconnect(self, worker: str, now: float) -> None:
        """Handle a closed control connection. The worker may be alive; see `reconnection.py`."""
        if worker not in self.workers or self.over:
            return
        if worker in self.dead:
            view_changes.remove(self, worker, Removal.DIED, self.dead[worker] or "its process has ended")
        else:
            reconnection.on_absence(self, self.workers[worker], now)
        self._next_decision(now)

    def on_pool_message(self, pool: str, host: str, message: m.FromPool, now: float) -> None:
        """Handle a message of `pool`, whose process is on `host`, about its workers and hosts."""
        if not self.over:
            on_pool_message(self, pool, host, message)
            self._next_decision(now)

    def tick(self, now: float) -> None:
        """Check all time limits. Call it a few times a second."""
        slept = self._ticked is not None and now - self._ticked > self.settings.heartbeat_timeout_s / 2
        self._ticked = self.clock = now
        self.failure_detector.tick(now, (worker.silence for worker in self.workers.values() if worker.connected))
        if slept:  # the coordinator itself was suspended
            self.progress.moved(now)
        if slept or self.over:
            return
        accounting.tick(self, now)
        for worker, reason in reconnection.on_silence(self, now):
            view_changes.remove(self, worker, Removal.EVICTED, reason)
        for worker in view_changes.late_members(self, now):
            recovery.expel(self, worker, f"no connection to the members within {self.settings.prepare_timeout_s:g} s")
        failures.watch_for_stalls(self, now)
        self._next_decision(now)

    def ban_and_remove(self, worker: str, reason: str, now: float) -> None:
        """Evict `worker`, and tell it not to rejoin."""
        self.ban(worker)
        view_changes.remove(self, worker, Removal.EVICTED, reason)
        self._next_decision(now)

    # --- inputs from users ---------------------------------------------------------------------------------

    def scale(self, wanted: int, now: float, pool: str = "") -> None:
        """Handle `farandole scale`.

        Raises:
            UsageError: see `scaling.scale`.
        """
        scaling.scale(self, wanted, pool)
        self._next_decision(now)

    def release(self, name: str, now: float) -> list[str]:
        """Handle `farandole release`, and return the IDs of the workers that were asked to leave.

        Raises:
            UsageError: see `scaling.release`.
        """
        released = scaling.release(self, name)
        self._next_decision(now)
        return released

    def request_end(self, reason: str, code: int, now: float) -> None:
        """Handle `farandole stop` or SIGINT: all members leave after the same step, and one writes a checkpoint.

        This ends the run. A stop of a view (`Stop`, `recovery.stop_view`) is something else; the event `stopping` and
        the settings `stop_s` and `stop_on_nan` are about the end of the run, as the command is.
        """
        if self.ending or self.over:
            return
        self.record(events.StoppingEvent(reason=reason))
        self.ending, self.ending_at = Ending(code=code, reason=reason, failed=False), now
        self._next_decision(now)

    def roster(self, pool: str = "") -> m.Roster:
        """Return the roster of `pool`; without a name, that of the run's own pool."""
        return scaling.build_roster(self, pool)

    # --- single messages -----------------------------------------------------------------------------------

    def _heartbeat(self, worker: Worker, beat: m.Heartbeat, now: float) -> None:
        """Pass a heartbeat to each part of the coordinator that uses it."""
        worker.heartbeat, worker.computed = beat, worker.computed or beat.shards > 0
        if self.view and beat.view == self.view.number and worker.state in ("member", "finished"):
            failures.note_progress(self, worker.id, beat.step)
            disputes.note_proof(self, beat)
            self.progress.on_heartbeat(worker.id, beat, now)
        self.speeds.heard(worker.id, beat, self.view)
        view_changes.on_round_begun(self, worker.id, beat)
        recovery.on_blocked(self, worker.id, beat)
        metric_lines.on_heartbeat(self, worker, beat)
        accounting.on_heartbeat(self, worker, beat, now)
        if beat.number and beat.number % m.HEARD_EVERY == 0:
            self.send(worker.id, m.HeartbeatAnswer(beat=beat.number, lines=self.last_line))
