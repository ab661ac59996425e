"""The training thread of a simulated worker: what `worker/rounds.py` and `run.py` do, line by line, as a generator.

It yields None where the thread waits for a change, and seconds where it computes. The method that mutants replace is
`is_idle`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from farandole.membership import messages as m
from farandole.membership.view import Lineage, View
from farandole.simulate.data_plane import HEADER, STATE
from farandole.simulate.exchange import Exchange
from farandole.simulate.pieces import BUCKETS
from farandole.simulate.process import Gone, Process, Script
from farandole.simulate.replica import GARBAGE, ROOT_STATE, next_state, replica_digest, shard_value
from farandole.simulate.witness import Violation


class ScriptError(Exception):
    """The user's own error."""


class Worker(Process):
    """A worker with its training thread."""

    # --- the training thread (worker/rounds.py) ------------------------------------------------------------------

    def _obey(self) -> None:
        if self.told.save:
            self.world.witness.asked_to_save(self, self.told.save)
            between = self.between_steps and not self.told.save.between
            error = "between two steps" if between else "disk full" if self.world.rng.random() < 0.1 else ""
            self.told.save = None
            saved = m.Saved(path="" if error else "checkpoint", error=error, between=between)
            self.after(self.world.delay(0.1), self.tell, saved)
            self.world.tempt("saved", self)
        if self.told.exit is not None:
            if self.told.orphaned and self.whole:
                self._checkpoint()
            raise Gone

    def _checkpoint(self) -> None:
        self.world.witness.saved(self)
        if not self.reaches:
            self.world.store[self.step] = self.state

    def begin(self, kind: str, *, may_switch: bool) -> Generator[float | None, None, bool]:
        """False: no longer in a view (a joiner that was demoted)."""
        if not may_switch:  # a call round
            self.call = m.Call.of(f"{kind} after {self.step}")
            yield from self._begin_once("call", may_switch=False)
            yield from self._round()
        self.call = m.Call.of(f"{kind} {self.step}")
        if not (yield from self._begin_once(kind, may_switch=may_switch)):
            return False
        if self.member.synced:
            yield from self._pass_idle_rounds(kind)
        return True

    def _begin_once(self, kind: str, *, may_switch: bool) -> Generator[float | None, None, bool]:
        member = self.member
        while True:
            self._obey()
            if member.phase == "waiting":
                return False
            if member.phase == "member":
                old = member.view
                if self.perform(member.begin_round(self.step, may_switch=may_switch, call=self.call)):
                    self.world.witness.begun(self, old)
                    if member.view is not old:
                        self.world.tempt("switch", self)
                    if member.phase == "member":
                        break
                    continue
            yield None
        assert member.view is not None
        assert member.lineage is not None
        self.number = member.round
        self.kind = "idle" if may_switch and self.is_idle(member.view, member.lineage) else kind
        self.done = {}
        self.partials.clear()
        member.digest = self._digest() if member.synced else 0
        exchange = self._open(member.view)
        if not member.synced:
            exchange.may_word = False
        elif member.first and member.view.joining:
            self._send_state(member.view)
        self._start(member.lineage)
        self.world.tempt("begin", self)
        return True

    def _digest(self) -> int:
        """The replica is one number here."""
        view = self.member.view
        return replica_digest(self.state, self.step) if self.kind == "train" and view and view.size > 1 else 0

    def is_idle(self, view: View, lineage: Lineage) -> bool:
        """By those who were first dealt the round's shards: the same for everyone, whenever they begin it."""
        del view
        return len(lineage.sets[0]) < self.world.settings.minimum

    def _pass_idle_rounds(self, kind: str) -> Script:
        while self.kind == "idle":
            while not (yield from self._finish()):
                pass
            yield 0.05
            yield from self._begin_once(kind, may_switch=True)

    def _open(self, view: View) -> Exchange:
        if view.size > 1 and view.group not in self.groups:
            raise Violation(f"{self.name} is in view {view.number} without its connections")
        old = self.exchange
        if old is None or old.view.number != view.number:
            self.exchange = self.exchanges[view.number] = Exchange(self, view)
            if old is not None:
                old.close()
                old.settle()
        assert self.exchange is not None
        return self.exchange

    def _start(self, lineage: Lineage) -> None:
        exchange = self.exchange
        assert exchange is not None
        exchange.begin(self.number, self.kind, lineage, training=self.kind in ("train", "idle"))
        if not self.todo():
            for bucket in range(len(BUCKETS[self.kind])):
                exchange.ready(bucket)

    def todo(self) -> tuple[int, ...]:
        assert self.exchange is not None
        return tuple(s for s in self._assigned(self.exchange, self.name) if s not in self.done)

    def _sync(self) -> None:
        member, exchange = self.member, self.exchange
        assert exchange is not None
        self._obey()
        view = member.view
        if member.phase == "member" and view and view.number != exchange.view.number and member.round == self.number:
            self._open(view)
            assert member.lineage is not None
            self._start(member.lineage)

    def _finish(self) -> Generator[float | None, None, bool]:
        exchange, member = self.exchange, self.member
        assert exchange is not None
        while not exchange.ended and member.round <= self.number:
            self._obey()
            if member.phase == "member" and member.view and member.view.number != exchange.view.number:
                self._sync()
                return False
            yield None
        self.world.witness.committed(self, exchange)
        return True

    def _round(self) -> Generator[float | None, None, Any]:
        """Compute and finish the round that has begun. Its result."""
        while True:
            self._sync()
            todo = self.todo()
            if not todo:
                if (yield from self._finish()):
                    assert self.exchange is not None
                    return self.exchange.result
                continue
            yield self.shard_s * self.world.rng.uniform(0.2, 1.8)
            self.done[todo[0]] = shard_value(self.state, self.kind, self.step, todo[0])
            if len(todo) == 1:
                exchange = self.exchange
                assert exchange is not None
                for bucket in range(len(BUCKETS[self.kind])):
                    exchange.ready(bucket)
                    yield self.world.delay(0.002)

    # --- the script (run.py) ---------------------------------------------------------------------------------------

    def script(self) -> Script:
        try:
            yield from self._training()
            if self.world.rng.random() < 0.2:
                yield self.world.rng.choice((0.5, 3.0, 6.0))  # what it does after its loop
            self.finished = self.whole = True
            self.tell(self.member.finished(str(self.state)))
        except ScriptError as error:
            self.world.script_failed = True
            self.tell(m.Failed(traceback=str(error)))
        while True:
            self._obey()
            yield None

    def _training(self) -> Script:
        yield from self._enter()
        while True:
            result = yield from self._round()
            self.whole = False
            if self.fails:
                self.between_steps = True
                raise ScriptError(f"after step {self.step}")
            self.state = next_state(self.state, self.step, result)
            self._drift()
            kind = self._strayed() if self.strays else "evaluate" if self.step % 3 == 1 else ""
            if kind == "quit":
                self.step += 1
                return
            if kind:
                yield from self.begin(kind, may_switch=False)
                yield from self._round()
            self.step += 1
            if self.step >= self.world.steps:
                return
            if self.fails:
                raise ScriptError(f"before step {self.step}")
            self.whole = True
            yield from self.begin("train", may_switch=True)
            self._checkpoint_when_due()

    def _strayed(self) -> str:
        """What this script calls where the others do something else: an evaluation of its own, none, or its end."""
        kind, due = self.strays, self.step % 3 == 1
        if kind != "quit" and (kind == "more") == due:
            return "evaluate" if due else ""
        self.strays, self.world.script_failed, self.world.strayed = "", True, True
        self.world.say(self.name, f"strays: {kind}")
        return {"quit": "quit", "skip": "", "more": "evaluate", "other": "other"}[kind]

    def _drift(self) -> None:
        """What the script does on this worker alone."""
        if self.drifts:
            self.drifts = False
            self.drifted_at, self.state = self.step + 1, self.state + 1
            self.world.say(self.name, f"drifts before step {self.step + 1}")

    def _checkpoint_when_due(self) -> None:
        every = self.world.checkpoints
        if not (every and self.told.saves and (self.step % every == 0 or self.told.save_at_once)):
            return
        self.told.save_at_once = False
        if not self.member.synced:
            raise Violation(f"{self.name} is to write a checkpoint, and does not hold the state")
        full = self.world.disks.random() < 0.2
        if not full:
            self._checkpoint()
        told = m.Checkpointed(step=self.step, path="" if full else f"step {self.step}", error="disk full" * full)
        self.after(self.world.delay(0.1), self.tell, told)

    def _enter(self) -> Script:
        member = self.member
        while True:
            while not (member.phase == "waiting" and member.pending and member.prepared == member.pending.number):
                self._obey()
                yield None
            view = member.pending
            if self.name in view.synced:
                yield self.world.delay(0.05)  # to read the newest checkpoint
                store = {} if self.reaches else self.world.store
                step = max(store, default=0)
                state = store.get(step, ROOT_STATE)
                if member.newest.path and step < member.newest.step:
                    self.tell(m.Short(view=view.number, reason=f"step {step} of {member.newest.step}"))
                    yield from self._await(view, lambda: False)
                    continue
                if step >= self.world.steps:
                    self.tell(m.Restored(step=step, path="checkpoint", done=True))
                    while True:
                        self._obey()
                        yield None
                self.world.witness.begins(self, step)
                if self.perform(member.adopt(0, step, view=view.number)):
                    self.root, self.state, self.step, self.whole = view.number, state, step, True
                    self.world.witness.applied(self, view, 0)
                    yield from self.begin("train", may_switch=True)
                    return
                continue
            mail = self.mail[view.number]
            if not (yield from self._await(view, lambda n=mail: bool(n[HEADER]))):
                continue
            round_, step, root = mail[HEADER][view.synced[0]]
            if not self.perform(member.adopt(round_, step, view=view.number)):
                continue
            self.step, self.root = step, root
            self.world.witness.applied(self, view, round_)
            self.world.tempt("adopt", self)
            if not (yield from self.begin("train", may_switch=True)):
                continue
            if not (yield from self._await(view, lambda n=mail, v=view: len(n[STATE]) == len(v.synced))):
                continue
            yield self.world.delay(0.02)
            loaded, exchange = set(mail[STATE].values()), self.exchange
            self.state = min(loaded - {GARBAGE}, default=0)
            member.digest = self._digest()
            if self.perform(member.become_synced()):
                assert exchange is not None
                self.world.witness.become_synced(self, loaded)
                self.world.tempt("synced", self)
                exchange.release()
                yield from self._pass_idle_rounds("train")
                return

    def _await(self, view: View, there: Callable[[], bool]) -> Generator[float | None, None, bool]:
        while True:
            self._obey()
            if view not in (self.member.view, self.member.pending):
                return False
            if self.member.phase != "stopped" and there():
                return True
            yield None

    def _send_state(self, view: View) -> None:
        for joiner in view.joining:
            if self.name == view.synced[0]:
                self.post(joiner, view, HEADER, (self.number, self.step, self.root))
            self.post(joiner, view, STATE, self.state)
