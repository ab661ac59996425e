"""Replicas that differ: seen in the control words or at the end, told apart, and the run's end.

All workers hold the same replica bit for bit; what a script does on one of them alone is not in any gradient, and so in
nobody's but this one's bits. Who knows what when:

1. Who holds the state digests it when a training step begins, before anything of the step, and a joiner when it has
   loaded the state of that moment. The digest goes with the round's control word. Nothing writes to a replica before
   the step's update, which comes after the round's end.
2. Whoever can end a round has all its words (R1), so everyone sees the same difference, in the same round, and nobody
   ends it (`Member.end_round`): they stand still, with what they have digested, and say `Differs`.
3. `Differs` is told before the answer to any later Stop, on one ordered connection, and said again on every new one
   before that answer. So when a stop is decided, nobody who has answered it has seen a difference that is not known
   here. Who had answered before the last word came has not looked: then the round is done again and its words are
   compared again, or it is committed and those of the next step are. What an odd one that died has added to the
   gradients stays, if nobody had all words.
4. The first `Differs` makes a failed ending, which the journal holds before anything is sent, and stops the view like
   any failure: who dies meanwhile is not waited for, and nobody trains any more once it is decided. A coordinator
   that comes back finds the ending, or hears `Differs` again, in either case before the answers to its stop.
5. Then everyone who holds the state is asked for digests of each value and tensor (`Compare`). What most have counts,
   in a tie what the longest-standing has. It names workers and tensors; and one of those with what counts saves it,
   as what was left between two steps, since nobody can tell for how long it has differed.

6. Whose replica is unlike the others' need not be the cause: the sums of a step are made by its members, each a part of
   them for all, and one that sends a wrong sum to one other makes that one the odd one. So each answer also has, for
   each member of a view, a digest of the elements whose gradients that member sums up (`PartDigests`), and one of all
   else. An update makes an element, and its moments, from the sums of that element. A difference that a wrong sum has
   made is therefore in the parts of who made it and nowhere else, for as long as it lasts: the differing worker's own
   gradients go into sums that all have alike. It is no older than the step digest's rotation, so the answers are about
   each view that has made an update since then.
7. The suspects are those who explain all that differs if they alone are wrong: a worker without which all answers are
   equal, and a member whose part is the only one that differs. Two workers explain each other's difference. With three
   or more, one odd replica that differs in one member's part leaves two suspects, and nobody can tell which is wrong;
   two that differ there leave the member. All suspects are named, with the odd ones, and the run ends: no replica is
   known to be right, and the checkpoints from before stay. Who lies in its answer is one of the suspects itself, since
   without it all are equal. A difference that is elsewhere too (clipping by a norm, an optimizer that mixes elements,
   buffers, members of a host that hand on what another host has sent) has no such suspect: the odd ones are named.

At the end the fingerprints of the finished workers are compared; if they differ, all is as in 5.

Under `--bits any` unlike machines are let in, and their replicas drift apart: nothing of this ends the run then. It is
told in the first step and each time that their number has doubled, and what the longest-standing worker has is saved.

    differ      the ending, and the event
    compared    asks, waits for the answers, and says once they are there what differs
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from farandole.membership import events
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.difference import first_unequal, outliers
from farandole.membership.records import Ending
from farandole.membership.testimony import MANY

T = TypeVar("T")


def differ(books: Books, odd: tuple[str, ...], where: str, told: str = "") -> None:
    """The replicas of `odd` are unlike the others', as `told` says, or all can see."""
    reason = f"{_whose(odd)} from the others' {where}"
    books.ending = Ending(code=1, reason=reason, failed=True, apart=True, odd=odd, where=where, told=told)
    books.record(events.ReplicasDiffer(workers=odd, first="", reason=reason))


def drifts(books: Books, message: m.Drifts) -> None:
    """Under `--bits any`; all members say so, and the first counts."""
    if books.settings.bits == "any" and message.step > books.drifted:
        books.drifted = message.step
        books.record(events.Drifting(workers=message.workers, step=message.step, times=message.times))


def compared(books: Books) -> bool:
    """Whether it is known what differs; if not, those of `savers` who have not been asked are."""
    assert books.ending is not None
    if books.ending.compared:
        return True
    for worker in books.savers:
        if worker not in books.asked:
            ask(books, worker)
    if any(worker not in books.digests for worker in books.savers):
        return False
    _tell(books, books.ending)
    return True


def ask(books: Books, worker: str) -> None:
    books.asked.add(worker)
    books.send(worker, m.Compare())


def by_standing(books: Books, found: Mapping[str, T]) -> dict[str, T]:
    """`found`, the longest-standing worker first."""
    members = books.view.members if books.view else ()
    ranks = {worker: rank for rank, worker in enumerate(members)}
    return {worker: found[worker] for worker in sorted(found, key=lambda w: (ranks.get(w, len(ranks)), w))}


def _tell(books: Books, ending: Ending) -> None:
    """Everyone who is left has answered."""
    answers = {w: books.digests[w] for w in books.savers}
    found = by_standing(books, {w: tuple(zip(a.names, a.digests, strict=False)) for w, a in answers.items()})
    odd = outliers(found)
    suspects = suspects_of(by_standing(books, answers))
    like = [worker for worker in found if worker not in odd]
    first = first_unequal(found[like[0]], found[odd[0]]) if odd else ""
    if odd:
        others = f"{like[0]}'s" if len(like) == 1 else "the others'"
        ending.odd, ending.reason = odd, f"{_whose(odd)} from {others} {ending.where}, first in {first}"
        ending.reason += _blame(odd, suspects) if len(answers) >= MANY else ""
        books.record(events.ReplicasDiffer(workers=odd, first=first, reason=ending.reason, suspects=suspects))
    else:
        equal = bool(ending.told) and set(ending.odd) <= set(answers)
        ending.reason = f"{ending.told} said that {ending.reason}" if ending.told else ending.reason
        ending.reason += ", and they are all equal" if equal else ", and it was gone before it could be asked in what"
    ending.compared = ending.between = True
    books.savers = like


def suspects_of(answers: Mapping[str, m.Digests]) -> tuple[str, ...]:
    """Those who explain all that differs if they alone are wrong; empty if nobody does. See 7."""
    values = {worker: (answer.names, answer.digests) for worker, answer in answers.items()}
    if len(set(values.values())) < 2:
        return ()
    alone = [w for w in values if len({value for other, value in values.items() if other != w}) == 1]
    return tuple(dict.fromkeys((*alone, *_makers(answers, values))))


def _makers(answers: Mapping[str, m.Digests], values: Mapping[str, Hashable]) -> Iterator[str]:
    """The members whose part is the only one that differs, of each view that the answers are about.

    Who was not in that view has the state of somebody who was.
    """
    rests = {answer.rest for answer in answers.values()}
    if len(rests) > 1 or 0 in rests:
        return
    of_view: dict[tuple[int, int, tuple[str, ...]], dict[str, tuple[int, ...]]] = {}
    for worker, answer in answers.items():
        for part in answer.parts:
            of_view.setdefault((part.view, part.cut, part.members), {})[worker] = part.digests
    for (_, _, members), digests in of_view.items():
        inside = {values[worker] for worker in digests}
        if all(value in inside for value in values.values()):
            unequal = [member for member, *each in zip(members, *digests.values(), strict=False) if len(set(each)) > 1]
            if len(unequal) == 1:
                yield unequal[0]


def _blame(odd: tuple[str, ...], suspects: tuple[str, ...]) -> str:
    """Who is wrong, where it need not be `odd`; "" where nothing else is known."""
    if not suspects or set(suspects) == set(odd):
        return ""
    if len(suspects) == 1:
        return f", only in what {suspects[0]} sums up: {suspects[0]} sends wrong sums"
    makers = " or ".join(suspect for suspect in suspects if suspect not in odd)
    return f", only in what {makers} sums up: one of {', '.join(suspects)} is wrong, and nobody can tell which"


def _whose(odd: tuple[str, ...]) -> str:
    if len(odd) == 1:
        return f"{odd[0]}'s replica differs"
    return f"the replicas of {', '.join(odd[:-1])} and {odd[-1]} differ" if odd else "a replica differs"
