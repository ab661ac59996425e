"""Where a bug that few schedules catch is looked for first: a seed that caught it. `bugs.py` finds them."""

from __future__ import annotations

CAUGHT_BY = {
    "WordsBeforeLevel": 58,
    "LeavesTheFinishedWaiting": 322,
    "always_redoes": 229,
    "believes_any_report": 104,
    "hears_no_difference (3)": 39,
    "lets_the_returned_go_on": 25,
    "forgets_number": 27,
    "forgets_proposed": 38,
    "forgets_issued": 47,
    "forgets_ending": 36,
    "forgets_who_has_finished": 36,
    "by_rank_alone": 47,
    "keeps_the_journal_late": 36,
    "order: if isinstance(act, Send): > if False: # settles no slice a": 37,
    "order: heard=routes.heard, > heard=True, # overwrites what ": 891,
    "routes: for number, whose in enumerate > for number, whose in enumerate": 101,
    "order: self.serve[served:] > self.serve[served + 1 :]": 104,
    "session: or self._lease.over(now) > ": 105,
    "driver: self._idle = task.trains and l > self._idle = task.trains and v": 1045,
    "entering: driver.calls.enter() > ": 208,
    "checks: *((worker, (0,)) for worker in > ": 173,
    "checking: due(held, member.unproven, lin > due(held, (), lineage.again, a": 173,
    "driver: if self.checking.owed(): > if False:": 29,
    "drift: if view.number != self._view o > if step": 187,
}
