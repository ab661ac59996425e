"""What a worker's driver asks for, with threads and tensors: exchanges, partial sums, the state to joiners, saving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from farandole.checkpoint.store import first_line
from farandole.collective.buckets import Layout
from farandole.collective.exchange import Exchange
from farandole.collective.partials import Partials
from farandole.membership.member import Exit, Save
from farandole.membership.messages import Digests, Message, Saved
from farandole.membership.port import Task
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position
from farandole.platform.output import say
from farandole.worker.departure import stand_back
from farandole.worker.participant import Participant
from farandole.worker.receiver import Receiver, hand_on


class Held(Protocol):
    """The state that a worker holds."""

    def snapshot(self) -> Any:
        """As of the beginning of the step in hand, to be sent."""
        ...

    def renew(self, state: Any) -> None:
        """Take over another's, as of the same step."""
        ...

    def save(self, between: bool) -> Saved:
        """Write a checkpoint; says why not, if this is only a state between two steps and `between` is false."""
        ...

    def digest(self) -> int:
        """Of the replica as the step in hand began."""
        ...

    def digests(self) -> Digests:
        """Of everything in it."""
        ...


class RoundsPort:
    """See `membership.port.Port`. `replan` is called when this worker's shards are others than expected."""

    parameters = 0  # how many of them have a flag in the state's header

    def __init__(self, participant: Participant, held: Callable[[], Held], replan: Callable[[], None]) -> None:
        self.exchange: Exchange | None = None
        self._participant = participant
        self._held, self._replan = held, replan
        self._made: dict[int, Exchange] = {}  # ahead, for proposed views
        self._partials = Partials(Layout([], 0))
        self._planned = Lineage(sets=())  # the lineage that `replan` was last called for

    # --- without waiting -------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        self._participant.tell(message)

    def answer(self, save: Save) -> None:
        """On a thread: this one holds the lock that the heartbeats need. Without a thread it does so all the same."""
        participant = self._participant

        def save_and_tell() -> None:
            participant.tell(self.saved(save.between))

        try:
            threading.Thread(target=save_and_tell, daemon=True).start()
        except RuntimeError:
            save_and_tell()

    def leave(self, exit_: Exit) -> NoReturn:
        say(f"farandole: {exit_.reason}")
        raise SystemExit(exit_.code)

    def workers(self, step: int, begun: int) -> int:
        return self._participant.workers_at(step, begun)

    # --- a round ---------------------------------------------------------------------------------------------

    def stand_back(self) -> None:
        stand_back()

    def take_up(self, content: Any, shards: int) -> None:
        self._partials = Partials(Layout([], 0)) if content is None else content
        self._partials.begin(shards)

    def prepare(self, view: View, layout: Layout) -> None:
        """In the background: the exchange of a proposed view, with its buffers for `layout`."""
        if self._participant.worker in view.members:
            exchange = self._make(view)
            exchange.warm(layout)
            with self._participant.condition:
                self._made[view.number] = exchange

    def open(self, view: View) -> Exchange:
        with self._participant.condition:
            new = self._made.pop(view.number, None)
            for number in [n for n in self._made if n < view.number]:
                self._made.pop(number).close()
        self.exchange = new = new or self._make(view)
        return new

    def _make(self, view: View) -> Exchange:
        participant = self._participant
        links, memory, waits = participant.groups.get(view.group), participant.memory, participant.tracer.waits
        return Exchange(view, participant.worker, links, participant, memory=memory, waits=waits)

    def send_state(self, view: View, round_: int, position: Position) -> None:
        hand_on(self._participant, view, round_, position, self._held().snapshot())

    def receive(self, view: View) -> Receiver:
        return Receiver(view, self._participant, self.parameters)

    def renew(self, state: Any) -> None:
        self._held().renew(state)

    def digest(self) -> int:
        return self._held().digest()

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        assert self.exchange is not None
        if task.trains and shards and lineage != self._planned:
            self._planned = lineage
            self._replan()
        self.exchange.begin(round_, self._partials, shards, lineage, training=task.trains)

    def hand_in(self) -> None:
        assert self.exchange is not None
        for bucket in range(len(self._partials.layout.buckets)):
            self.exchange.ready(bucket)

    def open_shard(self, shard: int, *, last: bool) -> None:
        """Compute `shard` into the partial sums; with the `last` one, buckets are handed over as they are filled."""
        assert self.exchange is not None
        self._partials.complete = self.exchange.ready if last else _not_yet
        self._partials.open(shard, last=last)

    def reduced(self) -> list[Any]:
        """The reduced buckets of the round that has ended."""
        assert self.exchange is not None
        return self.exchange.reduced(self._partials.layout)

    # --- the last checkpoint ---------------------------------------------------------------------------------

    def save(self, between: bool) -> Saved:
        saved = self.saved(between)
        if not saved.between:
            say(f"farandole: checkpoint: {saved.path or saved.error}")
        return saved

    def saved(self, between: bool) -> Saved:
        """Whatever happens, an answer: without one nobody else would try."""
        try:
            return self._held().save(between)
        except Exception as error:  # noqa: BLE001
            return Saved(error=first_line(error))


def _not_yet(bucket: int) -> None:
    del bucket
