"""Of which class a moment in the driver's hands is: a truth table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from farandole.protocol.values import TimeClass
from farandole.protocol.view import View
from farandole.protocol.worker.driver import Driver, class_of
from farandole.protocol.worker.state_machine import WorkerStateMachine

ONE = View(number=1, members=("a", "b"), group=1)
TWO = View(number=2, members=("a", "b", "c"), joining=("c",), group=2)


def occupied(
    *, entered: bool = True, waits: bool = True, before: TimeClass = "compute", view: View | None = ONE,
    of: View = ONE, idle: bool = False, **member: Any,
) -> TimeClass:  # fmt: skip
    """`of`: the view of the exchange in hand."""
    its = WorkerStateMachine("a")
    its.phase, its.view = "member", view
    for name, value in member.items():
        setattr(its, name, value)
    driver = SimpleNamespace(state_machine=its, exchange=SimpleNamespace(view=of), in_idle_round=idle)
    return class_of(cast("Driver", driver), entered=entered, waits=waits, before=before)


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        (occupied(), "exchange", "it waits for the others of a step"),
        (occupied(waits=False), "compute", "it works for what it came for"),
        (occupied(waits=False, before="exchange"), "exchange", "it adds up what has come"),
        (occupied(phase="stopped"), "pause", "its view is stopped"),
        (occupied(phase="stopped", waits=False), "pause", ""),
        (occupied(view=TWO), "pause", "the exchange of the next view is opened"),
        (occupied(view=TWO, of=TWO, first=True), "pause", "a joiner takes the state over"),
        (occupied(view=ONE, of=ONE, first=True, waits=False), "pause", "a view takes effect"),
        (occupied(view=ONE, of=ONE, first=True), "exchange", "nobody has joined"),
        (occupied(idle=True), "few", "too few are there"),
        (occupied(idle=True, phase="stopped"), "pause", "a stop comes first"),
        (occupied(entered=False, view=None, phase="candidate"), "spare", "nobody has proposed a view"),
        (occupied(entered=False, view=None, phase="candidate", pending=TWO), "start", "one is on its way"),
        (occupied(entered=False, view=None, phase="candidate", waits=False), "start", "it loads"),
        (occupied(entered=False, view=TWO), "start", "it takes the state over"),
        (occupied(phase="left"), "end", "it has left"),
        (occupied(phase="out", entered=False), "end", "it was let go"),
        (occupied(before="end", phase="stopped"), "end", "its script has ended"),
    ],
)
def test_each_moment_has_one_class(found: TimeClass, expected: TimeClass, why: str) -> None:
    assert found == expected, why
