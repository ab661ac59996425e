"""A coordinator driven message by message, for the tests of `protocol`: its clock, and what it sent and recorded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.reconnection import Durable, to_durable
from farandole.protocol.coordinator.state import Close, Log, Record, RunSettings, Send
from farandole.protocol.events import Event, fields_of, name_of
from farandole.protocol.view import Lineage, View

FACTS = (("torch version", "2.13"), ("intra-op threads", "1"), ("weight", "(2, 3) float32"))
SIGNATURE = m.Signature(facts=FACTS)


def view_of(number: int, *members: str, **fields: Any) -> View:
    """As the coordinator of a `Scene` makes it: each worker is on a host of its own."""
    made = {"number": number, "members": members, "hosts": tuple(map(host, members)), "group": number}
    new = members if number == 1 else fields.get("joining", ())
    return View(**{**made, "unchecked": new, **fields})


def host(worker: str) -> str:
    return f"h-{worker}"


class Scene:
    """What has come in, and what was recorded and closed, since the last `forget`. Each worker is one process."""

    def __init__(self, known: Durable | None = None, now: float = 0.0, **settings: Any) -> None:
        self.settings = {"wanted": 2, **settings}
        self.coordinator = Coordinator(RunSettings(run="r", **self.settings), known, now)
        self.now = now
        self.attempts: Counter[str] = Counter()
        self.reached: set[str] = set()  # whose connections stand
        self.journal = b""  # what the server would have written of the state
        self.sent: dict[str, list[m.Message]] = {}
        self.events: list[str] = []
        self.fields: dict[str, dict[str, Any]] = {}
        self.recorded: list[Event] = []
        self.closed: list[str] = []
        self.lines: list[m.Line] = []  # of metrics, that went to the file; since the beginning
        self.look()

    def look(self) -> Scene:
        actions = self.coordinator.drain()
        if any(isinstance(action, Record) for action in actions):  # as the server does
            self.journal = msgspec.json.encode(to_durable(self.coordinator))
        for action in actions:
            match action:
                case Send(worker, message) if worker in self.reached:
                    self.sent.setdefault(worker, []).append(message)
                case Record(event):
                    self.recorded.append(event)
                    self.events.append(name_of(event))
                    self.fields[name_of(event)] = msgspec.json.decode(msgspec.json.encode(fields_of(event)))
                case Log(line):
                    self.lines.append(line)
                case Close(worker):
                    self.closed.append(worker)
                    self.reached.discard(worker)
                case _:
                    pass
        return self

    def forget(self) -> None:
        self.look()
        self.sent, self.events, self.fields, self.closed = {}, [], {}, []

    def restarted(self, after_s: float = 1.0) -> Scene:
        """The coordinator was killed; another one takes over what the journal holds. No connection is left."""
        scene = Scene(msgspec.json.decode(self.journal, type=Durable), self.now + after_s, **self.settings)
        scene.attempts = self.attempts
        return scene

    # --- what workers do -------------------------------------------------------------------------------------

    def hello(self, *workers: str, pool: str = "pool", synced: bool = False) -> None:
        """They connect: for the first time, or again, as the same process."""
        for worker in workers:
            self.attempts[worker] += 1
            self.greet(worker, pool=pool, session=f"s-{worker}", attempt=self.attempts[worker], synced=synced)

    def greet(self, worker: str, **hello: Any) -> str:
        """Any Hello at all. Returns the id that it is given."""
        given = self.coordinator.hello(
            m.Hello(kind="worker", worker=worker, **{"host": host(worker), **hello}), self.now
        )
        self.reached.add(given)
        self.look()
        return given

    def back(self, *workers: str) -> None:
        """They hold the run's state, and come back."""
        self.hello(*workers, synced=True)

    def say(self, worker: str, *messages: m.Message) -> None:
        for message in messages:
            self.coordinator.on_message(worker, message, self.now)
        self.look()

    def ready(self, *workers: str, pool: str = "pool", facts: tuple[tuple[str, str], ...] = FACTS) -> None:
        self.hello(*workers, pool=pool)
        for worker in workers:
            self.say(worker, m.Ready(signature=m.Signature(facts=facts)))

    def switch(self, view: View, round_: int, *workers: str, synced: bool = True) -> None:
        for worker in workers or view.members:
            self.say(worker, m.Switched(view=view.number, round=round_, step=round_))
        for joiner in view.joining if synced else ():
            self.say(joiner, m.Synced(view=view.number))

    def report(
        self, worker: str, round_: int, *, has_result: bool = False, synced: bool = True, view: View | None = None,
        cannot_end: bool = False,
    ) -> None:  # fmt: skip
        """`worker` answers the last Stop; who is synced is in the coordinator's view, if not in `view`."""
        state = self.coordinator
        view = view or (state.view if synced else None)
        lineage = self.dealt(view, round_) if view else Lineage(sets=())
        stop = self.last(worker, m.Stop).stop
        prepared = state.proposed.number if state.proposed else 0  # whoever has not switched yet was about to
        self.say(
            worker,
            m.Stopped(
                stop=stop,
                view=view,
                round=round_,
                step=round_,
                has_result=has_result,
                synced=synced,
                lineage=lineage,
                prepared=prepared,
                cannot_end=cannot_end,
            ),
        )

    def issued(self, number: int) -> View:
        """One that they may be in."""
        return next(each.view for each in self.coordinator.issued if each.view.number == number)

    def dealt(self, view: View, round_: int) -> Lineage:
        """How that round's shards are, as far as was said."""
        found = [each.deals(round_)[0] for each in self.coordinator.issued if each.view == view]
        return found[0] if found else view.lineage(view.members)

    # --- what happens to them --------------------------------------------------------------------------------

    def close(self, *workers: str) -> None:
        """Their connections close: they may be alive."""
        for worker in workers:
            self.reached.discard(worker)
            self.coordinator.on_disconnect(worker, self.now)
        self.look()

    def exit(self, *workers: str, pool: str = "pool") -> None:
        """Their pool has seen their processes end."""
        for worker in workers:
            self.coordinator.on_pool_message(
                pool, host(worker), m.WorkerProcessExited(worker=worker, reason="killed by signal 9"), self.now
            )
        self.look()

    def lose(self, worker: str) -> None:
        """It is dead: for certain, and seen from both sides."""
        known = self.coordinator.workers.get(worker)
        if known and not known.pool:
            self.coordinator.mark_dead(worker, "killed by signal 9")  # of an external worker nobody could say that
        self.exit(worker, pool=known.pool if known else "pool")
        self.close(worker)

    def wait(self, seconds: float, *alive: str) -> None:
        """Time passes, in ticks of half a second; heartbeats come from `alive` only."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for worker in alive:
                self.say(worker, m.Heartbeat())
            self.coordinator.tick(self.now)
            self.look()

    # --- reading ---------------------------------------------------------------------------------------------

    def last(self, worker: str, kind: type[Any]) -> Any:
        found = [message for message in self.sent.get(worker, ()) if isinstance(message, kind)]
        assert found, f"{worker} was sent no {kind.__name__}"
        return found[-1]

    def kinds(self, worker: str) -> list[str]:
        return [type(message).__name__ for message in self.sent.get(worker, ())]

    def members(self, *workers: str) -> tuple[str, ...]:
        """Of the view that all of them were last told to go on in."""
        views = {self.last(worker, m.Resume).view for worker in workers}
        assert len(views) == 1, views
        return views.pop().members


def trained(*workers: str, facts: tuple[tuple[str, str], ...] = FACTS, **settings: Any) -> Scene:
    """Everyone in the first view and synced."""
    scene = Scene(**{"wanted": len(workers), "minimum": len(workers), **settings})
    scene.ready(*workers, facts=facts)
    while scene.coordinator.proposed:
        scene.switch(scene.coordinator.proposed, 0)
    assert scene.coordinator.view
    assert scene.coordinator.view.members == workers
    scene.forget()
    return scene
