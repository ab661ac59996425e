"""The coordinator as a pure state machine: messages and times in, actions out.

It decides views and nothing else: it is asked nothing in a step. The invariant that it keeps: at any time at most
one of {a proposed view, a stopped view} is outstanding, and a new view is issued only when the last one is in force
for all of its members or has been stopped and reported on by all who live.

    planned change   Propose(v+1) -> [workers agree in band, R2] -> Switched from every member of v+1 -> next
    unplanned        Stop -> Stopped from everyone who lives -> recovery.decide -> Resume(v')          -> next

Any death of a participant (a member of the view, or of the proposed one) takes the second way. A death is a closed
control connection, heartbeats missed for `heartbeat_timeout_s`, or peers' accusations that outlive the stop.

Here are the inputs and the workers' coming and going. After each input `_settle` looks at what is due next, so that
no way of losing or gaining a worker can leave a change undone. Once the run is over, nothing more is decided.
"""

from __future__ import annotations

from farandole.errors import ProtocolError, UsageError
from farandole.membership import ending, planned, unplanned
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Action, Ending, Log, RunSettings, Worker


class Coordinator(Books):
    """See the module's head. Feed it; then `drain()` the actions."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._signature: m.Signature | None = None
        self._guests = 0
        self._ticked: float | None = None

    def drain(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def _settle(self, now: float) -> None:
        """After every input: end the run or plan the next view, if it is time."""
        if self.over:
            return
        if self.everyone_finished() and not self.savers:
            ending.finish(self)
        elif self.ending and not self.view and not self.proposed and not self.stopping:
            ending.end(self)  # nobody holds a state
        else:
            planned.plan(self, now)

    # --- inputs from connections ---------------------------------------------------------------------------

    def hello(self, hello: m.Hello, now: float) -> str:
        """A worker has connected. Returns its id; the first action for it is Welcome or Refused."""
        worker = hello.worker
        if not worker:
            self._guests += 1
            worker = f"guest-{self._guests}"
        if worker in self.workers or any(worker in view.members for view in self.views()):  # of one lost just now
            self._guests += 1
            worker = f"{worker}-{self._guests}"
        self.workers[worker] = Worker(id=worker, host=hello.host, pid=hello.pid, pool=hello.pool, seen=now)
        s = self.settings
        self.send(
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
            self.send(worker, m.Goodbye(reason=self.over.reason, code=self.over.code))
        return worker

    def receive(self, worker: str, message: m.Message, now: float) -> None:
        """A message from `worker`. Messages of workers that are out are ignored: their connection is being closed."""
        known = self.workers.get(worker)
        if known is None:
            return
        known.seen = now
        if isinstance(message, m.Heartbeat):
            self._heartbeat(known, message)
            return
        if self.over:
            return
        try:
            self._hear(known, message)
        except ProtocolError as error:  # it contradicts what we know: it can't be one of the run's any more
            self._evict(worker, str(error))
        self._settle(now)

    def _hear(self, known: Worker, message: m.Message) -> None:
        worker = known.id
        match message:
            case m.Ready():
                self._ready(known, message.signature)
            case m.Leaving():
                self._notice(known, message.reason)
            case m.Publish():
                self._publish(worker, message)
            case m.Prepared():
                known.prepared = max(known.prepared, message.view)
            case m.Switched():
                planned.switched(self, known, message)
            case m.Level():
                planned.level(self, worker, message)
            case m.Suspect():
                unplanned.suspect(self, worker, message)
            case m.Stopped():
                unplanned.stopped(self, worker, message)
            case m.Failed():
                self._failed(known, message.traceback)
            case m.Saved():
                ending.saved(self, worker, message)
            case m.Finished():
                known.state, known.fingerprint = "finished", message.fingerprint
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__}")

    def disconnected(self, worker: str, now: float) -> None:
        """The control connection has closed."""
        if worker not in self.workers or self.over:
            return
        participant = worker in self.participants()
        gone = self.workers.pop(worker)
        if not (gone.state == "finished" or (gone.leaving and gone.state == "starting")):
            self.record("lost", worker=worker, host=gone.host, reason="its connection closed")
        self._gone(gone, "its connection closed", participant=participant)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        limit = self.settings.heartbeat_timeout_s
        slept = self._ticked is not None and now - self._ticked > limit / 2
        self._ticked = now
        if slept:  # it is we who were away: nobody's silence counts
            for worker in self.workers.values():
                worker.seen = now
        if slept or self.over:
            return
        for worker in [w.id for w in self.workers.values() if now - w.seen > limit]:
            self._evict(worker, f"no heartbeat for {limit:g} s")
        for worker in planned.late(self, now):
            self._evict(worker, f"no connection to the members within {self.settings.prepare_timeout_s:g} s")
        self._settle(now)

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
        self.startup_failures = 0
        self.record("scale", wanted=wanted, before=self.wanted)
        self.wanted = wanted
        ours = [w for w in self.workers.values() if w.pool and not w.leaving]
        for worker in ours[wanted:]:  # the newest go first
            self._release(worker, f"scaled to {wanted}")
        self._settle(now)

    def release(self, name: str, now: float) -> list[str]:
        """`farandole release`: a worker's id or a host's name; `wanted` falls by what the pool had of it.

        Never below the minimum: the last to leave hands the state over to its replacement.

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
        self.wanted = max(self.wanted, self.settings.minimum)  # who leaves last hands over to a replacement
        self._settle(now)
        return [w.id for w in found]

    def stop(self, reason: str, code: int, now: float) -> None:
        """`farandole stop`, SIGINT: everyone leaves after the same step; rank 0 writes a checkpoint."""
        if self.ending or self.over:
            return
        self.record("stopping", reason=reason)
        self.ending = Ending(code=code, reason=reason, failed=False)
        self._settle(now)

    def roster(self) -> m.Roster:
        """What pools act on."""
        leaving = tuple(w.id for w in self.workers.values() if w.leaving)
        ends = self.ending or self.over or any(w.state == "finished" for w in self.workers.values())
        return m.Roster(
            wanted=0 if ends else self.wanted,
            leaving=leaving,
            evicted=tuple(self.evicted),
            over=self.over.code if self.over else -1,
            reason=self.over.reason if self.over else "",
        )

    # --- single messages -----------------------------------------------------------------------------------

    def _heartbeat(self, worker: Worker, beat: m.Heartbeat) -> None:
        worker.beat = beat
        for line in beat.lines:
            if (line.step, line.index) > self.last_line:
                self.last_line = (line.step, line.index)
                self.actions.append(Log(line))

    def _ready(self, worker: Worker, signature: m.Signature) -> None:
        if worker.state != "starting":
            return
        self._signature = self._signature or signature
        difference = first_difference(self._signature, signature)
        if difference:
            del self.workers[worker.id]
            self.record("refused", worker=worker.id, host=worker.host, reason=difference)
            self.send(worker.id, m.Refused(reason=difference))
            self._startup_failed(worker)
            return
        worker.state = "ready"
        self.record("ready", worker=worker.id, host=worker.host, pid=worker.pid)

    def _notice(self, worker: Worker, reason: str) -> None:
        if not worker.leaving:
            worker.leaving = reason
            self.record("notice", worker=worker.id, reason=reason)

    def _release(self, worker: Worker, reason: str) -> None:
        self._notice(worker, reason)
        self.send(worker.id, m.Leave(reason=reason))

    def _publish(self, worker: str, message: m.Publish) -> None:
        view = self.proposed
        if view and view.group == message.group and worker in view.members:
            for peer in view.members:
                if peer != worker and peer in self.workers:
                    self.send(peer, m.Published(group=message.group, key=message.key, value=message.value))

    def _failed(self, worker: Worker, traceback: str) -> None:
        """The script raised. In a member it ends the run; in one that was not yet let in, only its own part."""
        self.record("failed", worker=worker.id, host=worker.host, traceback=traceback)
        if self.savers or (self.ending and self.ending.failed):
            return  # others fail alike: the first one counts
        if self.view is not None and not self.let_in(worker.id):
            participant = worker.id in self.participants()
            self.dismiss(worker.id, "its script failed before it was let in", code=1)
            self._gone(worker, "its script failed", participant=participant)
            return
        self.ending = Ending(code=1, reason=f"the script failed on {worker.id}", failed=True)
        if self.view is None:
            ending.end(self)
        elif self.stopping is None:
            unplanned.stop(self, self.ending.reason)

    # --- losses --------------------------------------------------------------------------------------------

    def _evict(self, worker: str, reason: str) -> None:
        """One eviction may bring others about: the worker may be out already."""
        if worker in self.workers and not self.over:
            participant = worker in self.participants()
            gone = self.workers[worker]
            self.evict(worker, reason)
            self._gone(gone, reason, participant=participant)

    def _gone(self, gone: Worker, reason: str, *, participant: bool) -> None:
        if gone.state in ("starting", "ready") or gone.id in self.unlevel:
            self._startup_failed(gone)
        self.unlevel.discard(gone.id)
        if not self.over:
            unplanned.without(self, gone.id, reason, participant=participant)

    def _startup_failed(self, worker: Worker) -> None:
        """A worker that dies before it is let in may do so for ever: the pool must not try for ever."""
        if not worker.pool or worker.leaving or self.ending:
            return
        self.startup_failures += 1
        if self.startup_failures < self.settings.startup_failures:
            return
        reason = f"{self.startup_failures} workers in a row died before they could join; see their log files"
        if self.view is None:
            self.ending = Ending(code=1, reason=reason, failed=True)
            ending.end(self)
        else:
            self.wanted = sum(1 for w in self.view.members if w in self.workers and self.workers[w].pool)
            self.record("no replacements", wanted=self.wanted, reason=reason)


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
