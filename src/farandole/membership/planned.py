"""Planned changes of the view: joins, leaves, an orderly end, shards dealt by other shares; agreed on in band (R2).

    next_view    the view that is due, when nothing is outstanding
    next_group   ... the same members over new connections, before the numbers of the views wrap in messages' tags
    next_shares  ... the same members with other shares, when nothing else is due
    propose      everyone concerned prepares it, and the control words agree on it without us
    switched     the first report puts the view in force; the last one closes the proposal, and leavers may go
    synced        the last joiner holds the state: the next view may be planned

New connections alone are no need: the members go on over those that stand while they are made, and if they do not come
about in time, the proposal is given up, and tried again later.

A loss of anyone concerned, at any point, is an unplanned change: the proposal is given up.
"""

from __future__ import annotations

import msgspec

from farandole.membership import calls, ending, events, issued, losses, saving, testimony, unplanned, verdicts
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.issued import Issued
from farandole.membership.records import Ending, Worker
from farandole.membership.speeds import WHOLE, stragglers
from farandole.membership.view import View

REGROUP_S = 600.0  # between two tries to connect the members anew


def plan(books: Books, now: float) -> None:
    """Propose the next view if one is due and nothing is outstanding; candidates that want to leave go at once."""
    for gone in [w for w in books.workers.values() if w.leaving and w.state in ("starting", "ready")]:
        if not books.has_part(gone.id):
            books.dismiss(gone.id, gone.leaving)
    finished = any(w.state == "finished" for w in books.workers.values())
    if _comes_to_nothing(books, now):
        unplanned.stop(books, "the members could not be connected anew")
    if books.stopping or books.proposed or books.savers or books.unsynced or finished:
        return
    if not all(books.workers[w].connected for w in books.participants()):
        return  # its return or its loss stops the view anyway
    due = next_view(books) or next_group(books, now) or next_shares(books)
    if due is not None:
        propose(books, *due, now)


def next_view(books: Books) -> tuple[View, str] | None:
    """The view that is due and why; None when there is nothing to change.

    Leavers leave only while somebody who holds the state stays; if everyone is leaving, joiners enter first (for that
    one view above the maximum, if need be). A run on its way out goes to the empty view; if no member could save there
    and somebody who is ready can, by way of a view with that one.
    """
    view = books.view
    if books.ending:
        if view is None or not view.members or books.ending.failed:
            return None
        number = books.next_number()
        if helper := saving.helper(books):
            members = (*view.members, helper)
            return View(
                number=number,
                members=members,
                joining=(helper,),
                group=number,
                hosts=books.hosts_of(members),
                unproven=(helper,),
            ), f"{helper} joins, to save: no member reaches the store"
        return View(number=number, members=(), group=view.group), books.ending.reason
    ready = [w.id for w in books.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    if books.clock < books.meet_at:
        ready = []  # a stranger was in the last connections: see `strangers`
    maximum = books.settings.maximum
    if view is None:
        if len(ready[:maximum]) < books.settings.minimum:
            return None
        first = saving.first(books, ready)[:maximum]
        if not first:
            _give_up(books)
            return None
        number = books.next_number()
        hosts = books.hosts_of(first)
        return View(
            number=number, members=first, joining=first[1:], group=number, hosts=hosts, unproven=first
        ), "first view"
    leavers = [w for w in view.members if books.workers[w].leaving]
    room = len(ready) if maximum is None else maximum - len(view.members) + len(leavers)
    joiners = tuple(ready[: max(room, 0)])
    if len(leavers) == len(view.members):
        leavers = []
    if not joiners and not leavers:
        return None
    stay = tuple(w for w in view.members if w not in leavers)
    causes = [f"{w} joins" for w in joiners] + [f"{w} leaves ({books.workers[w].leaving})" for w in leavers]
    number = books.next_number()
    group = number if joiners else view.group
    shares = view.shares_of(stay)
    if shares:  # a joiner counts as the median until it has been measured
        shares = (*shares, *(sorted(shares)[len(shares) // 2] for _ in joiners))
    members = (*stay, *joiners)
    return View(
        number=number,
        members=members,
        joining=joiners,
        group=group,
        shares=shares,
        hosts=books.hosts_of(members),
        unproven=(*verdicts.carried(books, stay), *joiners),
    ), ", ".join(causes)


def _give_up(books: Books) -> None:
    """Nobody may begin a first view: the run ends if nobody ever will."""
    if why := saving.hopeless(books):
        books.ending = Ending(code=1, reason=why, failed=True)
        ending.end(books)


def next_group(books: Books, now: float) -> tuple[View, str] | None:
    """The view in force over connections of its own, when those that it uses have served many views."""
    view = books.view
    if view is None or view.size < 2 or books.ending or now < max(books.regroup_at, books.meet_at):
        return None
    if books.number + 1 - view.group < books.settings.views_per_group:
        return None
    books.regroup_at = now + REGROUP_S
    number = books.next_number()
    unproven = verdicts.carried(books, view.members)
    return msgspec.structs.replace(view, number=number, joining=(), group=number, unproven=unproven), "new connections"


def _comes_to_nothing(books: Books, now: float) -> bool:
    view = books.proposed
    if view is None or view.joining or view.group != view.number or books.view is view or books.stopping:
        return False
    return now - books.proposed_at > books.settings.prepare_timeout_s


def next_shares(books: Books) -> tuple[View, str] | None:
    """The view in force with shares that suit the speeds better (`speeds`), and why; None if they do as they are."""
    view = books.view
    if view is None or books.ending or not books.settings.by_speed:
        return None
    shares = books.speeds.due(view)
    if shares is None:
        return None
    slow = stragglers(books.speeds.relative())
    cause = ", ".join(f"{worker} at {speed:.2f} of the fastest's speed" for worker, speed in slow.items())
    unproven = verdicts.carried(books, view.members)
    view = msgspec.structs.replace(view, number=books.next_number(), joining=(), shares=shares, unproven=unproven)
    return view, cause or "the workers are about equally fast"


def propose(books: Books, view: View, cause: str, now: float) -> None:
    books.proposed, books.proposed_at, books.cause = view, now, cause
    books.issued.append(Issued(view=view))
    books.record(events.Proposed(view=view.number, members=view.members, cause=cause))
    message = m.Propose(view=view, newest=m.Newest() if books.view else books.newest)
    for worker in books.participants():
        books.send(worker, message)


def publish(books: Books, worker: str, message: m.Publish) -> None:
    """A member of the proposed view tells the others, or the one it names, how to connect to it."""
    view = books.proposed
    if view and view.group == message.group and worker in view.members:
        for peer in view.members:
            if peer != worker and peer in books.workers and message.to in ("", peer):
                books.send(peer, m.Published(group=message.group, key=message.key, value=message.value))


def switched(books: Books, worker: Worker, message: m.Switched) -> None:
    """The worker goes on in a view. While a stop is outstanding, the reports say the same."""
    calls.switched(books, worker.id, message)
    view = books.proposed
    if books.stopping or view is None or message.view != view.number:
        return
    if books.view is not view:
        _in_force(books, view, worker, message)
    _compare_rounds(books, view, worker, message)
    if books.stopping or books.proposed is not view:
        return  # one of them is expelled: all who were to leave are still there to answer
    books.unswitched.discard(worker.id)
    if books.unswitched:
        return
    before = books.previous.members if books.previous else ()
    concerned = books.participants()
    books.proposed = books.previous = None
    issued.keep(books, [view])
    if not view.members:
        books.savers = [w for w in before if w in concerned]
        ending.save(books)
        return
    for leaver in [w for w in before if w not in view.members]:
        books.dismiss(leaver, "left gracefully")


def _compare_rounds(books: Books, view: View, worker: Worker, message: m.Switched) -> None:
    """All say the same (R2): who does not is put out, if two others do."""
    books.switches[worker.id] = message.round
    if books.applied < 0:
        books.applied = testimony.agreed_round(books.switches, len(books.participants()))
    for odd in [w for w, said in books.switches.items() if said != books.applied >= 0 and w in books.workers]:
        books.bar(odd)
        unplanned.expel(
            books, odd, f"it says that view {view.number} took effect in round {books.switches[odd]}, "
            f"and others in round {books.applied}",
        )  # fmt: skip


def _in_force(books: Books, view: View, worker: Worker, message: m.Switched) -> None:
    before = books.view
    books.previous, books.view, books.applied = before, view, -1
    books.switches, books.beyond = {}, {}
    books.unsynced = set(view.joining)
    books.unswitched = set(books.participants())
    unchanged = before is not None and view.members == before.members
    dealt_anew = unchanged and before is not None and view.shares != before.shares
    books.unfed = 0
    if not view.joining and not unchanged:
        losses.joined(books, view.members)
    losses.reached(books, worker.id, message.step)
    for member in view.members:
        books.workers[member].state = "member"
    if before is None:
        books.founder = view.members[0]
    for joiner in view.joining if before else ():
        books.workers[joiner].entered = message.step
    if view.group == view.number:
        books.strangers = 0
    books.began = message.step
    books.record(events.View(view=view.number, members=view.members, round=message.round, step=message.step,
        cause=books.cause))  # fmt: skip
    saving.appoint(books)
    if dealt_anew:
        shares = dict(zip(view.members, view.shares or (WHOLE,) * view.size, strict=True))
        books.record(events.Shares(view=view.number, step=message.step, shares=shares, reason=books.cause))


def synced(books: Books, worker: str, message: m.Synced) -> None:
    if books.view and message.view == books.view.number:
        books.unsynced.discard(worker)
        if not books.unsynced:
            losses.joined(books, books.view.joining)
            saving.appoint(books)


def late(books: Books, now: float) -> list[str]:
    """Joiners who hold up a proposed view beyond its limit: those not connected, or all where only members are not.

    Of a first view anyone may be to blame.
    """
    view = books.proposed
    if view is None or books.stopping or now - books.proposed_at <= books.settings.prepare_timeout_s:
        return []
    slow = [w for w in view.members if w in books.workers and books.workers[w].prepared < view.number]
    if not slow or books.view is None:
        return slow
    return [w for w in slow if w in view.joining] or list(view.joining)
