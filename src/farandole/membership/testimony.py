"""What all who hold the state see in the same step, so that one of several that says so alone is not believed.

Who knows what when: a loss is the same number everywhere, and words of a round that differ are the same words for all.
So what one honest worker says here, all say: nobody ends a round whose words differ (`replicas`, 2), nor goes on beyond
a loss that is to end the run, and each says so again on every new connection. Where three or more hold the state, it
therefore counts once two have said it of the same step. Until then

- nothing is stopped for it: a stop would keep the others from seeing what they are about to see;
- a round whose words differ, as one says, is not committed by any other stop: it is done again, and its words are
  compared again, or those of the round after it by whoever is ahead;
- a decision to go on forgets it: whoever sees it in the round that is done again says so again;
- where the run is to end anyway it counts: what differs is never saved as a checkpoint, and they are compared first;
- once the others are beyond that step it was wrong: nobody could have ended its round. So it was once one of them has
  answered a stop from beyond that round, and replicas of two rounds are not compared;
- whoever else could have said it may die: with fewer than three there is no majority to ask, and one word counts, but
  for one against the longest-standing: of two replicas that differ its own is right (`replicas`, 5).

The round in which a view took effect is such a thing too (R2), with the difference that whoever says another one than
two others have has contradicted both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.records import Claim, Shared

KEPT = 100
MANY = 3  # of whom one may be outvoted


def enough(workers: int) -> int:
    """How many of so many have to say the same."""
    return 2 if workers >= MANY else 1


def heard(books: Books, worker: str, message: Shared) -> None:
    """One of those who could see it says so."""
    claim = books.claims.setdefault(f"{type(message).__name__} {message.step}", Claim(message))
    claim.message = message
    claim.workers.add(worker)
    for oldest in list(books.claims)[:-KEPT]:
        del books.claims[oldest]


def confirmed(books: Books) -> list[tuple[list[str], Shared]]:
    """What has been said by enough, each once, with those who have said it."""
    holders = _holders(books)
    needed = enough(len(holders))
    found = list[tuple[list[str], Shared]]()
    seen = [(key, claim.message) for key, claim in books.claims.items() if not isinstance(claim.message, m.NotFinite)]
    denied = [key for key, message in seen if message.step < books.reached]
    for key in denied:
        del books.claims[key]
    for key, claim in list(books.claims.items()):
        said = [worker for worker in holders if worker in claim.workers]
        if len(said) >= needed and not _against_the_first(holders, claim.message):
            found.append((said, claim.message))
            del books.claims[key]
    return found


def _against_the_first(holders: list[str], message: Shared) -> bool:
    """Whether the replica of the longest-standing is said to be unlike that of one other: then the other's is odd."""
    if not isinstance(message, m.Differs):
        return False
    like = [worker for worker in holders if worker not in message.workers]
    return len(like) == 1 and like != holders[:1]


def stale(books: Books) -> None:
    """Those who have stood still go on, and compare their words anew."""
    books.claims = {key: claim for key, claim in books.claims.items() if isinstance(claim.message, m.NotFinite)}


def disputed(books: Books, reports: Mapping[str, m.Stopped]) -> tuple[list[str], m.Differs] | None:
    """What some of these say of a round whose words differ, if others have not said it yet. `reports`: the answers to a
    stop of all who hold the state. Of those who say so, whoever is behind another has been proved wrong by it.
    """
    last = max((report.round for report in reports.values()), default=0)
    for claim in books.claims.values():
        said = sorted(w for w in claim.workers if w in reports and reports[w].round == last)
        if isinstance(claim.message, m.Differs) and said:
            return said, claim.message
    return None


def agreed_round(said: dict[str, int], workers: int) -> int:
    """The round in which enough of `workers` say that a view took effect; -1 for none yet."""
    if not said:
        return -1
    round_, count = Counter(said.values()).most_common(1)[0]
    return round_ if count >= enough(workers) else -1


def _holders(books: Books) -> list[str]:
    """Leavers that the others may still wait for among them: they have seen the same rounds. A coordinator that is back
    may not have heard that the first view is in force.
    """
    before = books.previous.members if books.previous else ()
    inside = dict.fromkeys([*books.members(), *(worker for worker in before if worker in books.workers)])
    return [worker for worker in inside or books.participants() if worker not in books.unsynced]
