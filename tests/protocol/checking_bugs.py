"""Bugs for shards that two compute: who computes which, what is said of it, and what follows where two differ."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.plan import shards
from farandole.protocol import view
from farandole.protocol.coordinator import disputes, recovery
from farandole.protocol.worker import driver
from farandole.protocol.worker import state_machine as checking

DRIFTS: dict[str, Any] = {"drift": True, "bits": "any"}
ERRS: dict[str, Any] = {"errs": True}

CHECKING: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (
    # who computes what
    (shards, "*((worker, (0,)) for worker in unchecked), ", "", ERRS),
    # what a worker computes, and says
    (checking, "        self._mine, self._others = {}, {}\n", "", {}),
    (checking, "if shard not in self._others) if mine", ") if mine", {}),
    (
        checking,
        "select_checks(held, machine.unchecked, lineage.rechecks, audited)",
        "select_checks(held, (), lineage.rechecks, audited)",
        ERRS,
    ),
    (
        checking,
        "if not shards or any(shard not in digests_of for shard in shards):",
        "if not shards or not digests_of:",
        {},
    ),
    (disputes, "if message.step < passed]", "if message.step < state.reached]", ERRS),
    (disputes, "        begun = trains or (", "        begun = (", {"drift": True}),
    (disputes, "or not at_last.keys() >= set(report.compared)", "", ERRS),
    (driver, "if self.checking.checks_left():", "if False:", ERRS),
    (view, "0 < owner.own_results != checker.check_results > 0", "False", ERRS),
    (checking, "if self.differing or self.unlike:", "if self.differing:", ERRS),
    (checking, "return [m.ShardsDiffer(step=self.step)]", "return []", ERRS),
    (
        checking,
        "self.agreed, None, True, None\n            self._admission_pending = True",
        "self.agreed, None, True, None",
        ERRS,
    ),
    # what follows
    (disputes, "if differ or refused or failed else None", "if differ else None", {"drift": True}),
    (
        disputes,
        "if differ or refused or failed else None",
        "if differ or refused else None",
        {"drift": True},
    ),
    (recovery, "dispute is not None or verdict.rechecks is not None", "dispute is not None", ERRS),
    (recovery, "rechecks=None if outcome.commit else verdict.rechecks", "rechecks=None", ERRS),
    (recovery, "        synced.discard(worker)\n    return verdict", "    return verdict", ERRS),
    (disputes, "        for worker in _new(at_last, owner, results):", "        for worker in ():", ERRS),
    (disputes, "        differ = True\n", "", {**ERRS, "focus": ("mistake",)}),
    (disputes, "for worker in (*checkers, third)", "for worker in checkers", ERRS),
    (disputes, "if at_last[worker].unchecked]", "if False]", ERRS),
    # replicas that may drift
    (checking, "if view.number != self._view or step", "if step", DRIFTS),
    (
        driver,
        "yield from self._renew(view, renewal)\n        yield from self._start(lineage)",
        "yield from self._start(lineage)\n            yield from self._renew(view, renewal)",
        DRIFTS,
    ),
)
