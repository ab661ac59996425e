"""A trace at the coordinator: who was asked for its next steps, and what has come. It decides nothing about the run.

1. One trace at a time. It is on while a worker owes its part and somebody still looks at it: whoever has asked looks
   again and again, and `LEASE_S` after the last look another one may begin. The newest trace's answers are kept until
   then, in memory, and in no books: a coordinator that is back knows of none, and an answer to another number is passed
   over.
2. Asked are the members of the view in force. Who joins later is not in the trace, and who leaves or dies owes nothing
   any more: it is `gone`. A worker that is back on another connection is asked again, and says the same again.
3. What is kept is bounded: `TOTAL` spans and waits of all workers together, an even part of that of each, though never
   less than `LEAST`. Who says more, or another's numbers, breaks the protocol. Kept as bytes, a tenth of the objects.
"""

from __future__ import annotations

import msgspec

from farandole.errors import ProtocolError, UsageError
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Tracing, Worker
from farandole.membership.spans import MOST_SPANS, Traced

LEASE_S = 10.0
LOOKS_S = 0.5  # at least so often who waits for a trace looks
TOTAL, LEAST = 500_000, 500


def ask(books: Books, steps: int, number: int, now: float) -> None:
    """Have every member tell of its next `steps` steps. `number`: one that no other trace has had.

    Raises:
        UsageError: it can't be done now.
    """
    if books.over or books.ending:
        raise UsageError("the run is ending: there are no steps to come")
    on = books.tracing
    if on is not None and (owed := look(books).owed) and now - on.looked_at < LEASE_S:
        raise UsageError(
            f"another trace is on, and waits for {', '.join(owed)}: one at a time, so ask again when it is done; one "
            f"that nobody looks at any more is dropped after {LEASE_S:g} s"
        )
    members = [worker for worker in books.members() if books.workers[worker].state != "finished"]
    if not members:
        raise UsageError("nobody trains: there are no steps to trace; `farandole status` says what the run waits for")
    most = max(LEAST, min(MOST_SPANS, TOTAL // (2 * len(members))))
    books.tracing = Tracing(number=number, steps=steps, most=most, looked_at=now, asked=tuple(members))
    for worker in members:
        remind(books, worker)


def remind(books: Books, worker: str) -> None:
    """It may not have heard of a trace to which it owes its part."""
    on = books.tracing
    if on is not None and worker in look(books).owed:
        books.send(worker, m.Trace(number=on.number, steps=on.steps, most=on.most))


def end(books: Books) -> None:
    """Whoever owes its part is to tell what it has so far: nobody waits for more, or the run ends."""
    on = books.tracing
    if on is not None and on.steps:
        on.steps = 0
        for worker in on.asked:
            remind(books, worker)


def heard(books: Books, worker: Worker, spans: m.Spans) -> None:
    """Its part. Raises ProtocolError where it says more than it may."""
    on = books.tracing
    if on is None or spans.number != on.number or worker.id not in on.asked:
        return
    if max(len(spans.spans), len(spans.waits)) > on.most:
        raise ProtocolError(f"{worker.id} tells of more than {on.most} spans")
    on.answers[worker.id] = msgspec.msgpack.encode(spans)


def look(books: Books, now: float | None = None) -> Traced:
    """How far it is. `now`: for somebody who waits for it."""
    on = books.tracing
    if on is None:
        return Traced()
    on.looked_at = on.looked_at if now is None else now
    there = [worker for worker in on.asked if worker in books.workers]  # nobody gets a name that another has had
    return Traced(
        number=on.number,
        steps=on.steps,
        asked=on.asked,
        answered=tuple(on.answers),
        gone=tuple(w for w in on.asked if w not in on.answers and w not in there),
        owed=tuple(w for w in there if w not in on.answers),
    )


def awaited(books: Books, now: float) -> bool:
    """Somebody waits for it just now, and should get what is there before a run that is over is out of reach."""
    return books.tracing is not None and now - books.tracing.looked_at < LOOKS_S


def answer(books: Books, worker: str) -> bytes:
    """What that worker has said, as it is on the wire.

    Raises:
        UsageError: nothing.
    """
    if books.tracing is None or worker not in books.tracing.answers:
        raise UsageError(f"{worker!r} has said nothing in the newest trace")
    return books.tracing.answers[worker]
