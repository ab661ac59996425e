"""What the training thread is in while its driver has it: of which class the time is that it waits or works there.

It waits for others at one place only, in the driver's shell. What a wait belongs to is read off the member and the
driver at that moment, and again after each change: so one wait may begin as the exchange of a step, go on as the pause
of a view that was stopped, and end as an exchange again.
"""

from __future__ import annotations

from farandole.membership.classes import TimeClass
from farandole.membership.driver import Driver


def class_of(driver: Driver, *, entered: bool, waits: bool, before: TimeClass) -> TimeClass:
    """What the training thread is in, while it `waits` or works for the driver. `before`: what it was in when it came;
    `entered`: its first step has begun.
    """
    member = driver.member
    if before == "end" or member.phase in ("left", "out"):
        return "end"
    if not entered:
        return "spare" if waits and member.phase == "waiting" and member.pending is None else "start"
    view = member.view
    if member.phase == "stopped" or view is None or view.number != driver.exchange.view.number:
        return "pause"
    if driver.idle:
        return "few"
    if member.first and (view.joining or not waits):
        return "pause"
    return "exchange" if waits else before
