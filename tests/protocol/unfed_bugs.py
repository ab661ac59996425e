"""Bugs for workers whose host can't get them the data: a place in the shipped file, and what is put there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.protocol.coordinator import coordinator, failures
from farandole.protocol.worker import session

STARVES: dict[str, Any] = {"starves": True}
RESETS: dict[str, Any] = {**STARVES, "focus": ("resets", "coordinator")}
SAID_AGAIN = "repeats = isinstance(message, REPEATED)"
HEIRS = "heirs = {*views}.intersection(newest.members if newest else ()).difference(without_data, failed)"

UNFED_BUGS: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (
    (failures, "if views and not heirs:", "if False:  # lets the last go", STARVES),
    (failures, "if views and not heirs:", "if views:  # ends the run for any", STARVES),
    (failures, HEIRS, HEIRS.replace(".difference(without_data, failed)", ""), STARVES),
    (failures, HEIRS, "heirs = {*reports}.difference(without_data, failed)  # without the state", STARVES),
    (failures, "    for worker in without_data:\n        release_without_data(state, worker)\n", "", STARVES),
    (failures, "state.record(events.StoppingEvent(reason=reason))  # the journal", "# not in the journal:", STARVES),
    (session, SAID_AGAIN, f"{SAID_AGAIN} and not isinstance(message, m.Unfed)", RESETS),
    (coordinator, "elif reason := failures.stop_for_data(self):", "elif reason := '':", STARVES),
)
