"""What pools say of their workers and hosts, and what follows.

    exited        a process has ended, for certain
    noticed       a host will go: its workers leave gracefully, those that have not come yet as soon as they do
    capacity      how many workers it can have: what it can't, other pools are asked for
    start_failed, no_capacity, advised, host_seen   are told to people: nobody was lost, and nobody has to leave
    host_priced   what a host costs is written down

A pool says the first two again to a coordinator that is back; what is known does nothing then. What it says of workers
of others is not heard.
"""

from __future__ import annotations

from farandole.membership import decision, events, going, losses, names, requests
from farandole.membership import messages as m
from farandole.membership.books import EVICTED, UNFED, Books


def hear(books: Books, pool: str, host: str, message: m.FromPool) -> None:
    """A message of `pool`, whose own process is on `host`."""
    match message:
        case m.Exited(worker=worker, reason=reason) if names.owns(books, pool, worker):
            exited(books, worker, pool, host, reason)
        case m.Noticed():
            for worker in message.workers:
                if names.owns(books, pool, worker):
                    _noticed(books, worker, message)
        case m.StartFailed(worker=worker) if names.owns(books, pool, worker):
            books.record(events.StartFailed(worker=worker, host=message.host, reason=message.reason))
        case m.NoCapacity():
            books.record(events.NoCapacity(pool=pool, reason=message.reason))
        case m.Capacity(workers=workers, gathers=gathers):
            mark = names.mark(books, pool)
            books.gather = (books.gather | {mark}) if gathers else books.gather - {mark}
            books.can = {
                **{m: n for m, n in books.can.items() if m != mark},
                **({} if workers is None else {mark: workers}),
            }
        case m.HostSeen():
            books.record(events.Host(pool=pool, host=message.host, state=message.state, reason=message.reason))
        case m.HostPriced(host=named, dollars=dollars, since=since, day=day):
            books.record(events.Priced(pool=pool, host=named, dollars=dollars, since=since, day=day))
        case m.Advised():
            books.record(events.Advice(pool=pool, host=message.host, reason=message.reason))
        case _:
            pass


def exited(books: Books, worker: str, pool: str, host: str, reason: str) -> None:
    """Its connection may not have closed yet. May be told again."""
    if worker in books.gone:
        return
    books.forget(worker, reason)
    known, departed = books.workers.get(worker), books.departed.get(worker)
    if known is not None and books.let_in(worker):
        if not known.connected:
            going.lost(books, known, reason)
    else:
        if known is None and departed is None:
            books.record(events.Exited(worker=worker, host=host, reason=reason))
        let_go = departed and (departed.started or departed.refused or departed.code in (0, UNFED))
        if pool and not let_go and not (known and known.leaving) and worker not in books.noticed:
            losses.startup_failed(books, worker, pool)
        if departed and departed.started and departed.code == EVICTED:  # its peers had seen it first
            losses.found_out(books, worker, reason, entered=departed.entered)
        if known is not None and not known.connected:
            going.lost(books, known, reason)
    decision.if_ready(books)


def arrived(books: Books, worker: str) -> None:
    """It has come. Its host may have had notice before."""
    if reason := books.noticed.pop(worker, ""):
        requests.notice(books, books.workers[worker], reason)


def _noticed(books: Books, worker: str, message: m.Noticed) -> None:
    reason = f"{message.host} goes within {message.within_s} s: {message.reason}"
    if known := books.workers.get(worker):
        requests.notice(books, known, reason)
        requests.deadline(books, known, message.within_s)
    elif worker not in books.departed and worker not in books.gone:
        books.expect(worker, reason)
