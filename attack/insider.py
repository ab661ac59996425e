"""A member that trains as it should and says something else beside it: `python -m attack.insider KIND TICKET JOB ...`.

It is let in like any external worker, since it computes what everybody computes; only what it tells the coordinator is
wrong. When it has said it all it goes on training, for as long as it is let.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

import msgspec

import farandole.run
from farandole.control.ticket import Ticket
from farandole.errors import FarandoleError
from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from farandole.script import run_script
from farandole.settings import Settings
from farandole.worker.connection import Connected

FAR = 10**6
FIRST_ROUNDS = 2  # as a member, before it says anything
SAID = "insider: all said"


class Insider:
    """Speaks for the worker that is `connected`, and says what `kind`, a name of `KINDS`, says."""

    def __init__(self, kind: str, connected: Connected) -> None:
        self.kind = kind
        self.connected = connected
        self.member = connected.member
        self.replace: Callable[[m.Message], m.Message] = lambda message: message
        self._since = -1
        self._honestly = connected.tell
        connected.tell = self.tell  # type: ignore[method-assign]
        threading.Thread(target=self._misbehave, daemon=True).start()

    def tell(self, message: m.Message) -> None:
        self._honestly(self.replace(message))

    def _misbehave(self) -> None:
        while not self.in_force or self.member.round < self.in_force_since + FIRST_ROUNDS:
            time.sleep(0.02)
        with contextlib.suppress(FarandoleError):
            KINDS[self.kind](self)
        time.sleep(1.0)
        print(SAID, flush=True)

    @property
    def worker(self) -> str:
        return self.connected.worker

    @property
    def in_force(self) -> View | None:
        view = self.member.view
        return view if view is not None and self.member.synced and view.size > 1 else None

    @property
    def in_force_since(self) -> int:
        self._since = self.member.round if self._since < 0 else self._since
        return self._since

    @property
    def others(self) -> tuple[str, ...]:
        view = self.in_force
        return tuple(worker for worker in view.members if worker != self.worker) if view else ()

    def stop_everyone(self) -> None:
        """By a lawful word: its connection to one of them broke."""
        view = self.in_force
        if view is not None:
            self._honestly(m.Suspect(view=view.number, peer=self.others[-1], reason="Connection reset by peer"))


def far_ahead(insider: Insider) -> None:
    """A mistake in one number: it answers a stop with a round that is far ahead of all."""

    def replace(message: m.Message) -> m.Message:
        if isinstance(message, m.Stopped):
            return msgspec.structs.replace(message, round=message.round + FAR, step=message.step + FAR, has_result=True)
        return message

    view = insider.in_force
    assert view is not None
    insider.replace = replace
    for number in range(3):
        insider.tell(
            m.Heartbeat(
                view=view.number, round=FAR + number, step=FAR + number, shards_computed=FAR, at_step_start=True
            )
        )
    insider.stop_everyone()


def forged_view(insider: Insider) -> None:
    """It says that a view is in force which nobody proposed, and in which nobody else is."""
    number = FAR
    alone = View(number=number, members=(insider.worker,), group=number)

    def replace(message: m.Message) -> m.Message:
        if isinstance(message, m.Stopped):
            return msgspec.structs.replace(
                message, view=alone, lineage=Lineage(sets=((insider.worker,),)), has_result=True
            )
        return message

    insider.replace = replace
    for message in (m.Prepared(view=number), m.Switched(view=number, round=FAR, step=FAR), m.Synced(view=number)):
        insider.tell(message)
    insider.stop_everyone()


def accusing(insider: Insider) -> None:
    """Everybody, of everything, again and again."""
    view = insider.in_force
    assert view is not None
    for waited_s in (0, 0, 3600, 2**40):
        for number in (view.number, view.number + 1, 0, FAR):
            for peer in (*insider.others, insider.worker, "nobody"):
                insider.tell(m.Suspect(view=number, peer=peer, reason="it is to blame", waited_s=waited_s))


def storming(insider: Insider) -> None:
    """A report of a broken connection in every view that it is in, as fast as they come."""
    until = time.monotonic() + 6.0
    while time.monotonic() < until and insider.connected.instructions.exit is None:
        insider.stop_everyone()
        time.sleep(0.02)


def posing(insider: Insider) -> None:
    """What only pools and the coordinator may say, and what only others may say of themselves."""
    for peer in insider.others:
        insider.tell(m.WorkerProcessExited(worker=peer, reason="it has ended, believe me"))
        insider.tell(m.Publish(group=FAR, key=peer, value=b"\x00" * 64))
        insider.tell(m.Publish(group=1, key="0/1", value=b"\x00" * 64))


KINDS: dict[str, Callable[[Insider], None]] = {
    "far-ahead": far_ahead,
    "forged-view": forged_view,
    "accusing": accusing,
    "storming": storming,
    "posing": posing,
}


def main(kind: str, ticket: str, job: str, *arguments: str) -> None:
    def join(ticket: Ticket, settings: Settings) -> Connected:
        return Insider(kind, Connected(ticket, settings)).connected

    farandole.run.Connected = join
    run_script(ticket, job, list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
