"""How a worker comes in: it waits for a view, and for the state if others hold it.

1. A proposed view whose connections stand may come into force without this worker's doing. Who is `synced` in a first
   view begins the run, with the state that it finds; a joiner learns that the view is in force from the state's header,
   which the veterans send with the view's first round.
2. A joiner begins that round like everybody else, but for its word: the peers' threads need its part in the exchange,
   and the round can't end without its word (R1). So the veterans' state is still that of the round's beginning as long
   as it is under way.
3. It takes the state over, and its digest, which its word will carry, of what it has taken over. Then it asks the
   member whether the view still stands: `become_synced` refuses if not, and the state counts for nothing, since the
   others may have gone on to another one. Only then is the word given, and not before the proof where one is due in
   this round (`verdicts`).
4. A view that is given up at any point before means waiting for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from farandole.membership.driver import Demoted, Driver
from farandole.membership.generators import Change, Script, do
from farandole.membership.port import Task
from farandole.membership.view import View
from farandole.plan.shards import Position


class Entrance(Protocol):
    """What a worker does as it comes in; all of it without the lock."""

    def restore(self, view: View, /) -> Position | None:
        """Take the run's state up to begin `view` with it; None: others begin, or the run ends."""
        ...

    def first(self, position: Position, flags: Sequence[bool] | None, /) -> Task:
        """The step that this worker enters with. `flags`: of a header; None: it begins the run."""
        ...

    def entered(self) -> None:
        """That step has begun."""
        ...

    def load(self, state: Any, /) -> None:
        """Take over what has arrived, and with it the run that it is of."""
        ...


def enter(driver: Driver, entrance: Entrance) -> Script[None]:
    """Come in, and begin the first step."""
    member = driver.member
    while True:
        driver.calls.enter()
        view = yield from _proposed(driver)
        entered = _begin_run(driver, entrance, view) if member.worker in view.synced else _join(driver, entrance, view)
        try:
            if (yield from entered):
                return
        except Demoted:
            continue


def _begin_run(driver: Driver, entrance: Entrance, view: View) -> Script[bool]:
    position = yield from do(entrance.restore, view)
    if position is None:
        yield from driver.until(view, lambda: False)
        return False
    if not _adopt(driver, 0, position, view):
        return False
    driver.proven = True
    yield from driver.begin((yield from do(entrance.first, position, None)))
    yield from do(entrance.entered)
    return True


def _join(driver: Driver, entrance: Entrance, view: View) -> Script[bool]:
    member = driver.member
    arriving = yield from do(driver.port.receive, view)
    if not (yield from driver.until(view, lambda: arriving.header is not None)) or arriving.header is None:
        return False
    round_, position, flags = arriving.header
    if not _adopt(driver, round_, position, view):
        return False
    yield from driver.begin((yield from do(entrance.first, position, flags)))
    yield from do(entrance.entered)
    if not (yield from driver.until(view, lambda: arriving.state is not None)):
        return False
    exchange = driver.exchange
    yield from do(entrance.load, arriving.state)
    yield from driver.take_digest()
    synced = member.become_synced()
    if synced is None:
        return False
    driver.tell(synced)
    if not driver.checking.owed():
        exchange.release()
    yield from driver.pass_idle_rounds()
    return True


def _proposed(driver: Driver) -> Script[View]:
    """Wait for a proposed view whose connections stand."""
    member = driver.member
    while True:
        if member.phase == "waiting" and member.pending and member.prepared == member.pending.number:
            return member.pending
        yield from driver.obey()
        yield Change()


def _adopt(driver: Driver, round_: int, position: Position, view: View) -> bool:
    adopted = driver.member.adopt(round_, position.step, view=view.number)
    driver.tell(adopted or ())
    return adopted is not None
