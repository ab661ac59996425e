"""What happens to the round in hand when a view is stopped: the decision, as a pure function.

Who knows what when:

1. A worker that has answered Stop neither ends its round nor switches views until it is told how to go on. So the
   reports describe a state that stands still; workers that died need not be considered, whatever they did last.
2. A control word is sent only by a holder of every reduced bucket, and a round ends only with all words (R1).
   So if anyone, dead or alive, has ended round r, every survivor holds round r. Hence the survivors' rounds differ by
   at most one, and a survivor that is behind holds the round that it has not ended: it *commits* it.
3. A view is applied only when all words of a round named it (R2), so if any survivor has applied view v+1, every
   member of both views has v+1's connections standing, and a member of v that is not in v+1 is a leaver whose
   part is done: everything that it computed is in a round that all survivors hold.
4. If all survivors are in round r and all hold it, they commit it. If one does not, all *redo* its exchange from
   their retained partial sums: the tree's order makes the redone sum equal, bit for bit, to the lost one.
5. The shards of a round in hand are dealt by its *lineage*: the first tuple of workers got the round's shards by the
   plan, in the shares of the view in which the round began, and each later tuple, a subset of the one before, inherits
   what the missing held. Coordinators issue recovery views one after the other, so the lineages of the survivors are
   prefixes of one another, and the longest keeps everything that anyone may have computed. If nobody who lives has
   begun the round under the newest view, nothing of it is computed, and the survivors are dealt it anew.

That holds of honest reports. Which ones are no such reports is found before: `issued` and `plausible`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farandole.membership.messages import Stopped
from farandole.membership.view import Lineage


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the survivors go on, the rounds after this one by `shares`.

    `dismissed` are leavers whose switch had been agreed; `unsynced` had no state yet.
    """

    members: tuple[str, ...]
    group: int
    shares: tuple[int, ...]
    round: int
    commit: bool
    lineage: Lineage
    dismissed: tuple[str, ...]
    unsynced: tuple[str, ...]


def decide(reports: Mapping[str, Stopped], *, again: bool = False) -> Outcome:
    """The survivors' way on, where at least one of them holds the state.

    `reports`: their answers, of views that were issued, no two of which contradict each other (`issued`, `plausible`).
    `again`: what all hold is not to be committed, since somebody has seen that the replicas differ in it.
    """
    synced = {worker: report for worker, report in reports.items() if report.synced}
    newest = max((report.view for report in synced.values() if report.view), key=lambda view: view.number)
    survivors = tuple(w for w in newest.members if w in synced)
    dismissed = tuple(w for w in synced if w not in newest.members)
    if not survivors:  # only leavers are left who had done their part: one of them takes the run up again
        dismissed = tuple(sorted(dismissed, key=lambda w: -synced[w].round))
        survivors, dismissed = dismissed[:1], dismissed[1:]
    last = max(synced[w].round for w in survivors)
    at_last = [synced[w] for w in survivors if synced[w].round == last]
    commit = not again and len(at_last) == len(survivors) and all(report.holds for report in at_last)
    lineages = [report.lineage for report in at_last if report.view == newest]
    longest = max(lineages, key=lambda lineage: len(lineage.sets), default=None)
    lineage = newest.lineage(survivors)  # dealt anew
    if longest and not commit:
        lineage = Lineage(sets=(*longest.sets, survivors), shares=longest.shares)
    return Outcome(
        members=survivors,
        group=newest.group,
        shares=newest.shares_of(survivors),
        round=last,
        commit=commit,
        lineage=lineage,
        dismissed=dismissed,
        unsynced=tuple(w for w in reports if w not in synced),
    )
