"""The coordinator as a pure state machine: messages and times in, actions out.

It decides views and nothing else: it is asked nothing in a step. The invariant that it keeps: at any time at most
one of {a proposed view, a stopped view} is outstanding, and a new view is issued only when the last one is in force
for all of its members or has been stopped and reported on by all who live.

    planned change   Propose(v+1) -> [workers agree in band, R2] -> Switched from every member of v+1 -> next
    unplanned        Stop -> Stopped from everyone who lives -> recovery.decide -> Resume(v')          -> next

Any death of a participant (a member of the view, or of the proposed one) takes the second way. A death is a closed
control connection, heartbeats missed for `heartbeat_timeout_s`, or peers' accusations that outlive the stop.
"""

from __future__ import annotations

from typing import Any

from farandole.errors import UsageError
from farandole.membership import messages as m
from farandole.membership import recovery
from farandole.membership.records import Action, Close, Ending, Log, Record, RunSettings, Send, Stopping, Worker
from farandole.membership.view import View


class Coordinator:
    """See the module's head. Feed it; then `drain()` the actions."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.wanted = settings.wanted
        self.workers: dict[str, Worker] = {}
        self.evicted: list[str] = []
        self.view: View | None = None
        self.proposed: View | None = None
        self.stopping: Stopping | None = None
        self.ending: Ending | None = None
        self.over: Ending | None = None
        self._previous: View | None = None  # while leavers of it may still be there
        self._cause = ""
        self._unlevel: set[str] = set()  # joiners of `view` that do not hold the state yet
        self._savers: list[str] = []  # who may still write the last checkpoint
        self._signature: m.Signature | None = None
        self._number = 0
        self._stops = 0
        self._guests = 0
        self._startup_failures = 0
        self._proposed_at = 0.0
        self._ticked: float | None = None
        self._last_line = (-1, 0)
        self._actions: list[Action] = []

    def drain(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # --- inputs from connections ---------------------------------------------------------------------------

    def hello(self, hello: m.Hello, now: float) -> str:
        """A worker has connected. Returns its id; the first action for it is Welcome or Refused."""
        worker = hello.worker
        if not worker:
            self._guests += 1
            worker = f"guest-{self._guests}"
        if worker in self.workers:
            self._guests += 1
            worker = f"{worker}-{self._guests}"
        self.workers[worker] = Worker(id=worker, host=hello.host, pid=hello.pid, pool=hello.pool, seen=now)
        s = self.settings
        self._send(
            worker,
            m.Welcome(
                run=s.run,
                worker=worker,
                folder=s.folder,
                seed=s.seed,
                threads=s.threads,
                minimum=s.minimum,
                heartbeat_s=s.heartbeat_s,
                stall_s=s.stall_s,
                ledger=s.ledger,
            ),
        )
        if self.over:
            self._send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))
        return worker

    def receive(self, worker: str, message: m.Message, now: float) -> None:
        """A message from `worker`. Messages of workers that are out are ignored: their connection is being closed."""
        known = self.workers.get(worker)
        if known is None:
            return
        known.seen = now
        match message:
            case m.Heartbeat():
                self._heartbeat(known, message)
            case m.Ready():
                self._ready(known, message.signature, now)
            case m.Leaving():
                self._notice(known, message.reason, now)
            case m.Publish():
                self._publish(worker, message)
            case m.Prepared():
                known.prepared = max(known.prepared, message.view)
            case m.Switched():
                self._switched(known, message, now)
            case m.Level():
                self._level(known, message, now)
            case m.Suspect():
                self._suspect(worker, message, now)
            case m.Stopped():
                self._stopped(worker, message, now)
            case m.Failed():
                self._failed(known, message.traceback, now)
            case m.Saved():
                self._saved(worker, message)
            case m.Finished():
                self._finished(known, message)
            case _:
                self._evict(worker, f"unexpected message {type(message).__name__}", now)

    def disconnected(self, worker: str, now: float) -> None:
        """The control connection has closed."""
        if worker in self.workers:
            self._lost(worker, "its connection closed", now)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        slept = self._ticked is not None and now - self._ticked > self.settings.heartbeat_timeout_s / 2
        self._ticked = now
        if slept:  # it is we who were away: nobody's silence counts
            for worker in self.workers.values():
                worker.seen = now
            return
        limit = self.settings.heartbeat_timeout_s
        for worker in [w for w in self.workers.values() if now - w.seen > limit]:
            self._evict(worker.id, f"no heartbeat for {limit:g} s", now)
        if self.proposed and not self.stopping and now - self._proposed_at > self.settings.prepare_timeout_s:
            number = self.proposed.number
            waits = any(self.workers[w].prepared < number for w in self.proposed.members if w in self.workers)
            for joiner in self.proposed.joining if waits else ():
                self._evict(joiner, f"no connection to the members within {self.settings.prepare_timeout_s:g} s", now)

    # --- inputs from people --------------------------------------------------------------------------------

    def scale(self, wanted: int, now: float) -> None:
        """`farandole scale`: how many workers the run wants from its pool.

        Raises:
            UsageError: below the minimum or above the maximum.
        """
        s = self.settings
        if wanted < s.minimum:
            raise UsageError(f"scale {wanted}: below the run's --min {s.minimum}; use `farandole stop` to end the run")
        if s.maximum is not None and wanted > s.maximum:
            raise UsageError(f"scale {wanted}: above the run's --max {s.maximum}")
        self._startup_failures = 0
        self._record("scale", wanted=wanted, before=self.wanted)
        self.wanted = wanted
        ours = [w for w in self.workers.values() if w.pool and not w.leaving]
        for worker in ours[wanted:]:  # the newest go first
            self._release(worker, f"scaled to {wanted}")
        self._plan(now)

    def release(self, name: str, now: float) -> list[str]:
        """`farandole release`: a worker's id or a host's name; `wanted` falls by what the pool had of it.

        Raises:
            UsageError: no such worker or host.
        """
        found = [w for w in self.workers.values() if name in (w.id, w.host) and not w.leaving]
        if not found:
            known = ", ".join(f"{w.id} on {w.host}" for w in self.workers.values()) or "none"
            raise UsageError(f"release {name}: no such worker or host; there are: {known}")
        for worker in found:
            self.wanted -= 1 if worker.pool else 0
            self._release(worker, "released")
        self.wanted = max(self.wanted, 0)
        self._plan(now)
        return [w.id for w in found]

    def stop(self, reason: str, code: int, now: float) -> None:
        """`farandole stop`, SIGINT: everyone leaves after the same step; rank 0 writes a checkpoint."""
        if self.ending or self.over:
            return
        self._record("stopping", reason=reason)
        self.ending = Ending(code=code, reason=reason, failed=False)
        if self.view is None and self.proposed is None:
            self._end()
        else:
            self._plan(now)

    def roster(self) -> m.Roster:
        """What pools act on."""
        leaving = tuple(w.id for w in self.workers.values() if w.leaving)
        over = self.over.code if self.over else -1
        ending = self.ending or self.over
        wanted = 0 if ending or any(w.state == "finished" for w in self.workers.values()) else self.wanted
        return m.Roster(
            wanted=wanted,
            leaving=leaving,
            evicted=tuple(self.evicted),
            over=over,
            reason=self.over.reason if self.over else "",
        )

    # --- single messages -----------------------------------------------------------------------------------

    def _heartbeat(self, worker: Worker, beat: m.Heartbeat) -> None:
        worker.beat = beat
        for line in beat.lines:
            if (line.step, line.index) > self._last_line:
                self._last_line = (line.step, line.index)
                self._actions.append(Log(line))

    def _ready(self, worker: Worker, signature: m.Signature, now: float) -> None:
        if worker.state != "starting":
            return
        self._signature = self._signature or signature
        difference = first_difference(self._signature, signature)
        if difference:
            self._record("refused", worker=worker.id, host=worker.host, reason=difference)
            self._send(worker.id, m.Refused(reason=difference))
            self._startup_failed(worker)
            del self.workers[worker.id]
            return
        worker.state = "ready"
        self._record("ready", worker=worker.id, host=worker.host, pid=worker.pid)
        self._plan(now)

    def _notice(self, worker: Worker, reason: str, now: float) -> None:
        if not worker.leaving:
            worker.leaving = reason
            self._record("notice", worker=worker.id, reason=reason)
            self._plan(now)

    def _release(self, worker: Worker, reason: str) -> None:
        worker.leaving = reason
        self._record("notice", worker=worker.id, reason=reason)
        self._send(worker.id, m.Leave(reason=reason))

    def _publish(self, worker: str, message: m.Publish) -> None:
        view = self.proposed
        if view and view.group == message.group and worker in view.members:
            for peer in view.members:
                if peer != worker and peer in self.workers:
                    self._send(peer, m.Published(group=message.group, key=message.key, value=message.value))

    def _suspect(self, worker: str, message: m.Suspect, now: float) -> None:
        if self.view is None or message.peer not in self.workers:
            return
        if self.stopping is None:
            if message.view != self.view.number and not (self.proposed and message.view == self.proposed.number):
                return  # of a view that is no more
            self._stop(f"{worker} reports {message.peer}: {message.reason}", now)
        if self.stopping is not None:
            self.stopping.accusations[(worker, message.peer)] = message.reason
            self._decide_when_all_reported(now)

    # --- planned changes -----------------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        """Propose the next view if one is due and nothing is outstanding."""
        for gone in [w for w in self.workers.values() if w.leaving and w.state in ("starting", "ready")]:
            if not (self.proposed and gone.id in self.proposed.members):
                self._send(gone.id, m.Goodbye(reason=gone.leaving))
                del self.workers[gone.id]
        finished = any(w.state == "finished" for w in self.workers.values())
        if self.stopping or self.proposed or self.over or finished or self._unlevel:
            return
        if self.ending:
            if not self.ending.failed and self.view and self.view.members:
                self._propose(View(number=self._next(), members=(), group=self.view.group), self.ending.reason, now)
            return
        ready = [w.id for w in self.workers.values() if w.state == "ready" and not w.leaving]
        if self.view is None:
            first = ready[: self.settings.maximum]
            if len(first) >= self.settings.minimum:
                number = self._next()
                view = View(number=number, members=tuple(first), joining=tuple(first[1:]), group=number)
                self._propose(view, "first view", now)
            return
        members = self.view.members
        leavers = [w for w in members if self.workers[w].leaving]
        room = len(ready) if self.settings.maximum is None else self.settings.maximum - len(members) + len(leavers)
        joiners = ready[: max(room, 0)]
        if len(leavers) == len(members):
            leavers = []  # somebody must hand the state to a joiner first; they leave in the view after
        stay = tuple(w for w in members if w not in leavers)
        if not joiners and not leavers:
            return
        number = self._next()
        causes = [f"{w} joins" for w in joiners] + [f"{w} leaves ({self.workers[w].leaving})" for w in leavers]
        view = View(
            number=number,
            members=(*stay, *joiners),
            joining=tuple(joiners),
            group=number if joiners else self.view.group,
        )
        self._propose(view, ", ".join(causes), now)

    def _propose(self, view: View, cause: str, now: float) -> None:
        self.proposed = view
        self._proposed_at = now
        self._cause = cause
        self._record("proposed", view=view.number, members=list(view.members), cause=cause)
        for worker in self._participants():
            self._send(worker, m.Propose(view=view))

    def _switched(self, worker: Worker, message: m.Switched, now: float) -> None:
        worker.switched = max(worker.switched, message.view)
        if self.stopping or self.proposed is None or message.view != self.proposed.number:
            return
        view = self.proposed
        if self.view is None or self.view.number != view.number:
            self._previous = self.view
            self.view = view
            self._unlevel = set(view.joining)
            self._record(
                "view", view=view.number, members=list(view.members), round=message.round, step=message.step,
                cause=self._cause,
            )  # fmt: skip
            for member in view.members:
                self.workers[member].state = "member"
            self._startup_failures = 0
        self._close_proposal(now)

    def _close_proposal(self, now: float) -> None:
        """The proposed view is in force once everyone concerned has switched; leavers may go then."""
        view = self.proposed
        if view is None or self.view is not view:
            return
        before = self._previous.members if self._previous else ()
        concerned = [w for w in dict.fromkeys((*before, *view.members)) if w in self.workers]
        if any(self.workers[w].switched < view.number for w in concerned):
            return
        self.proposed = self._previous = None
        if not view.members:
            self._savers = [w for w in before if w in self.workers]
            self._save()
            return
        for leaver in [w for w in before if w not in view.members and w in self.workers]:
            self._dismiss(leaver, "left gracefully")
        self._plan(now)

    def _level(self, worker: Worker, message: m.Level, now: float) -> None:
        if self.view and message.view == self.view.number:
            self._unlevel.discard(worker.id)
            self._plan(now)

    # --- unplanned changes ---------------------------------------------------------------------------------

    def _participants(self) -> list[str]:
        """Everyone alive who is in the view, in the proposed one, or still in the one before."""
        views = [v for v in (self._previous, self.view, self.proposed) if v]
        return [w for w in dict.fromkeys(w for v in views for w in v.members) if w in self.workers]

    def _evict(self, worker: str, reason: str, now: float) -> None:
        """Take a worker out that may still be alive: its connection is closed, its pool is told to kill it."""
        self.evicted.append(worker)
        self._send(worker, m.Goodbye(reason=f"evicted: {reason}", code=3))
        self._actions.append(Close(worker))
        self._lost(worker, reason, now)

    def _lost(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone. A participant's death stops the view; any other concerns nobody."""
        participant = worker in self._participants()
        gone = self.workers.pop(worker)
        if gone.state == "finished" or (gone.leaving and gone.state == "starting"):
            participant = participant and gone.state == "finished"
        else:
            self._record("lost", worker=worker, host=gone.host, reason=reason)
        if gone.state in ("starting", "ready"):
            self._startup_failed(gone)
        if worker in self._savers:
            self._savers.remove(worker)
            self._save()
        elif self.stopping:
            self.stopping.waiting.discard(worker)
            self.stopping.reports.pop(worker, None)
            self._decide_when_all_reported(now)
        elif participant and not self._everyone_finished():
            self._stop(f"{worker}: {reason}", now)
        self._plan(now)

    def _stop(self, cause: str, now: float) -> None:
        self._stops += 1
        waiting = set(self._participants())
        self.stopping = Stopping(number=self._stops, waiting=waiting, cause=cause)
        for worker in waiting:
            self._send(worker, m.Stop(stop=self._stops))
        self._decide_when_all_reported(now)

    def _stopped(self, worker: str, report: m.Stopped, now: float) -> None:
        if self.stopping and report.stop == self.stopping.number and worker in self.stopping.waiting:
            self.stopping.waiting.discard(worker)
            self.stopping.reports[worker] = report
            self._decide_when_all_reported(now)

    def _decide_when_all_reported(self, now: float) -> None:
        stop = self.stopping
        if stop is None or stop.waiting:
            return
        for worker in recovery.convict(stop.accusations, tuple(stop.reports)):
            reason = next(r for (_, b), r in stop.accusations.items() if b == worker)
            del stop.reports[worker]
            self.stopping = None  # its loss must not start the decision again
            self._evict_quietly(worker, reason)
        self.stopping = None
        views = {v.number: v for v in (self._previous, self.view, self.proposed) if v}
        outcome = recovery.decide(stop.reports, views)
        self.proposed = self._previous = None
        self._unlevel = set()
        if self.ending and self.ending.failed:
            best = sorted(stop.reports, key=lambda w: (-stop.reports[w].round, w))
            self._savers = [w for w in best if stop.reports[w].level]
            self._save()
        elif outcome is None:
            self._start_over(stop)
        else:
            self._resume(outcome, stop)
        self._plan(now)

    def _resume(self, outcome: recovery.Outcome, stop: Stopping) -> None:
        view = View(number=self._next(), members=outcome.members, group=outcome.group)
        self.view = view
        for worker in (*outcome.behind,):
            self._evict_quietly(worker, "it does not hold a round that others have ended")
        for worker in outcome.dismissed:
            self._dismiss(worker, "left gracefully")
        for worker in outcome.unlevel:
            self.workers[worker].state = "ready"
            self._send(worker, m.Demoted())
        for worker in view.members:
            self.workers[worker].state = "finished" if self.workers[worker].state == "finished" else "member"
            self.workers[worker].switched = view.number
            self._send(
                worker,
                m.Resume(view=view, round=outcome.round, commit=outcome.commit, lineage=outcome.lineage),
            )
        step = max((stop.reports[w].step for w in view.members), default=0)
        self._record(
            "view", view=view.number, members=list(view.members), round=outcome.round, step=step, cause=stop.cause,
            outcome="commit" if outcome.commit else "redo",
        )  # fmt: skip

    def _start_over(self, stop: Stopping) -> None:
        """Nobody who held the state is left: the next first view begins again."""
        if self.view is not None:
            self._record("state lost", reason=f"no worker that held the state is left ({stop.cause})")
            self._last_line = (-1, 0)
        self.view = None
        for worker in stop.reports:
            if worker in self.workers:
                self.workers[worker].state = "ready"
                self._send(worker, m.Demoted())

    # --- the end -------------------------------------------------------------------------------------------

    def _failed(self, worker: Worker, traceback: str, now: float) -> None:
        """The script raised. In a member it ends the run; in one that was not yet let in, only its own part."""
        member = self.view is not None and worker.id in self.view.members
        self._record("failed", worker=worker.id, host=worker.host, traceback=traceback)
        if self.ending and self.ending.failed:
            return  # others fail alike: the first one counts
        if self.view is not None and not member:
            self._dismiss(worker.id, "its script failed before it was let in", code=1)
            self._startup_failed(worker)
            self._plan(now)
            return
        self.ending = Ending(code=1, reason=f"the script failed on {worker.id}", failed=True)
        if self.view is None:
            self._end()
        elif self.stopping is None:
            self._stop(self.ending.reason, now)

    def _save(self) -> None:
        """Ask the best placed worker for the last checkpoint, the next one if it dies, until one has answered."""
        assert self.ending is not None
        if not self._savers:
            self._record("not saved", reason="no worker is left that holds the state of a whole step")
            self._end()
            return
        if self.ending.saver != self._savers[0]:
            self.ending.saver = self._savers[0]
            self._send(self.ending.saver, m.End(save=True, reason=self.ending.reason))

    def _saved(self, worker: str, message: m.Saved) -> None:
        if self.ending and self.ending.saver == worker and not self.over:
            if message.error:
                self._record("not saved", worker=worker, reason=message.error)
                self._savers.remove(worker)
                self._save()
                return
            self._record("saved", worker=worker, path=message.path)
            self._end()

    def _finished(self, worker: Worker, message: m.Finished) -> None:
        worker.state = "finished"
        worker.fingerprint = message.fingerprint
        if self._everyone_finished():
            prints = {w.fingerprint for w in self.workers.values() if w.state == "finished"}
            self._record("finished", fingerprint=" != ".join(sorted(prints)), equal=len(prints) == 1)
            self.ending = self.ending or Ending(code=0, reason="the script has run to its end", failed=False)
            self._end()

    def _everyone_finished(self) -> bool:
        members = [w for w in (self.view.members if self.view else ()) if w in self.workers]
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    def _end(self) -> None:
        assert self.ending is not None
        self.over = self.ending
        self._savers = []
        self._record("over", code=self.over.code, reason=self.over.reason)
        for worker in self.workers:
            self._send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))

    # --- small things --------------------------------------------------------------------------------------

    def _startup_failed(self, worker: Worker) -> None:
        """A worker that dies before it is let in may do so for ever: the pool must not try for ever."""
        if not worker.pool or worker.leaving or self.ending:
            return
        self._startup_failures += 1
        if self._startup_failures < self.settings.startup_failures:
            return
        reason = f"{self._startup_failures} workers in a row died before they could join; see their log files"
        if self.view is None:
            self.ending = Ending(code=1, reason=reason, failed=True)
            self._end()
        else:
            self.wanted = sum(1 for w in self.view.members if w in self.workers and self.workers[w].pool)
            self._record("no replacements", wanted=self.wanted, reason=reason)

    def _dismiss(self, worker: str, reason: str, code: int = 0) -> None:
        gone = self.workers.pop(worker)
        self._record("left", worker=worker, host=gone.host, reason=reason)
        self._send(worker, m.Goodbye(reason=reason, code=code))

    def _evict_quietly(self, worker: str, reason: str) -> None:
        gone = self.workers.pop(worker)
        self.evicted.append(worker)
        self._record("lost", worker=worker, host=gone.host, reason=f"evicted: {reason}")
        self._send(worker, m.Goodbye(reason=f"evicted: {reason}", code=3))
        self._actions.append(Close(worker))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _send(self, worker: str, message: m.Message) -> None:
        self._actions.append(Send(worker, message))

    def _record(self, event: str, **fields: Any) -> None:
        self._actions.append(Record(event, fields))


def first_difference(expected: m.Signature, got: m.Signature) -> str:
    """The first fact in which a joiner differs from the run, in words; empty when there is none."""
    theirs = dict(got.facts)
    for name, value in expected.facts:
        if name not in theirs:
            return f"{name}: the run has {value}, this worker has none"
        if theirs[name] != value:
            return f"{name}: the run has {value}, this worker has {theirs[name]}"
    extra = [name for name, _ in got.facts if name not in dict(expected.facts)]
    return f"{extra[0]}: the run has none, this worker has {theirs[extra[0]]}" if extra else ""
