"""Bugs for shards that two compute: who computes which, what is said of it, and what follows where two differ."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.membership import checking, decision, driver, entering, member, planned, unplanned, verdicts, view
from farandole.plan import checks

ERRS: dict[str, Any] = {"errs": True}

CHECKING: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (
    # who computes what
    (checks, "*((worker, (0,)) for worker in unproven), ", "", ERRS),
    (checks, "*(again or ())", "", ERRS),
    (checks, "if asked or again is not None else audited", "if asked else audited", ERRS),
    (checks, "away) % count", "away + 1) % count", {}),
    (checks, "if holder != checker:", "if True:", {}),
    # what a worker computes, and says
    (checking, "        self._mine, self._others = {}, {}\n", "", {}),
    (checking, "if shard not in self._others) if mine", ") if mine", {}),
    (checking, "due(held, member.unproven, lineage.again, audited)", "due(held, (), lineage.again, audited)", ERRS),
    (checking, "if not shards or any(shard not in found for shard in shards):", "if not shards or not found:", {}),
    (driver, "if self.checking.owed():", "if False:", ERRS),
    (driver, "if self.member.synced and not self.checking.owed():", "if self.member.synced:", ERRS),
    (driver, "member.trains = self.trains", "member.trains = True", ERRS),
    (entering, "    if not driver.checking.owed():\n        exchange.release()\n", "    exchange.release()\n", ERRS),
    (view, "0 < holder.held != checker.checked > 0", "False", ERRS),
    (view, "0 < holder.held != checker.checked > 0", "holder.held != checker.checked", {}),
    (member, "if self.apart or self.unlike:", "if self.apart:", ERRS),
    (member, "return [m.Unlike(step=self.step)] if self.unlike else []", "return []", ERRS),
    (member, "(), ()\n        self._proving = True", "(), ()", ERRS),
    (member, "self._proving = self._proving and not self.trains", "self._proving = False", ERRS),
    (member, "self.agreed, None, True, None\n            self._proving = True", "self.agreed, None, True, None", ERRS),
    # what follows
    (unplanned, "books.stopping is None and not books.savers and any(books.has_part", "any(books.has_part", ERRS),
    (decision, "disputed = verdict.again is not None or", "disputed =", ERRS),
    (decision, "again=None if outcome.commit else verdict.again", "again=None", ERRS),
    (decision, "        synced.discard(worker)\n    return verdict", "    return verdict", ERRS),
    (
        decision,
        "unproven=verdicts.unproven({w: reports[w] for w in outcome.members}, commit=outcome.commit),",
        "",
        ERRS,
    ),
    (verdicts, "        for worker in _new(here, holder, found):", "        for worker in ():", ERRS),
    (verdicts, "        differ = True\n", "", ERRS),
    (verdicts, "if holder in new:", "if False:", ERRS),
    (verdicts, "for worker in (*checkers, third)", "for worker in checkers", ERRS),
    (verdicts, '        books.evict(worker, f"it computes wrong: {why}")\n', "", ERRS),
    (verdicts, "if here[worker].unproven]", "if False]", ERRS),
    (planned, "unproven=(*verdicts.carried(books, stay), *joiners),", "unproven=joiners,", ERRS),
)
