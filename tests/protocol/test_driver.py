"""The driver by itself, where it looks late or is let go: what random schedules seldom tell apart."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from farandole.plan.shards import Position
from farandole.protocol.messages import RunTerms, Saved
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import Change, Driver, Instructions, Routine, Task, _join, join_view
from farandole.protocol.worker.state_machine import EVERY, Exit, WorkerStateMachine

ONE = View(number=1, members=("a", "b"), group=1)
TWO = View(number=2, members=("a",), group=1)
ORPHANED = Exit("no coordinator", 4, save=True)


class Left(Exception):
    """The script has ended."""


class Played:
    """A port, and the exchange of each view, that note what they are asked for."""

    def __init__(self, view: View | None = None, asked: list[str] | None = None) -> None:
        self.asked: list[str] = [] if asked is None else asked
        self.begun: list[str] = []
        self.view = view
        self.ended = True  # so that a call round before is over

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*_: Any) -> None:
            self.asked.append(f"{name} {self.view.number}" if self.view else name)

        return ask

    def open(self, view: View) -> Played:
        self.asked.append(f"open {view.number}")
        return Played(view, self.asked)

    def workers(self, _step: int, begun: int) -> int:
        return begun

    def save(self, between: bool) -> Saved:
        self.asked.append(f"save {between}")
        return Saved(between=not between)

    def leave(self, exit_: Exit) -> NoReturn:
        raise Left(exit_.reason)


def driving(shards: int = 2, **terms: float) -> tuple[Driver, Played, Instructions]:
    member, told, port = WorkerStateMachine("a"), Instructions(), Played()
    member.phase, member.view, member.synced = "member", ONE, True
    driver = Driver(member, told, port, RunTerms(**terms))  # pyright: ignore[reportArgumentType]
    assert play(driver.begin(Task(position=Position(), shards=lambda _: shards, is_step=True)))
    port.begun = list(port.asked)
    port.asked.clear()
    return driver, port, told


def play(script: Routine[Any]) -> bool:
    """Until it is done, or (False) waits for a change."""
    answer: Any = None
    try:
        while True:
            wanted = script.send(answer)
            if isinstance(wanted, Change):
                return False
            answer = wanted()
    except StopIteration:
        return True


def resumed(driver: Driver, round_: int) -> None:
    """The coordinator has said how it goes on: in view 2, in that round."""
    driver.state_machine.view, driver.state_machine.round = TWO, round_
    driver.state_machine.lineage = Lineage(sets=(("a", "b"), ("a",)))


def test_a_round_that_is_redone_goes_on_in_the_next_view_and_the_one_before_is_closed_and_its_peers_released() -> None:
    driver, port, _ = driving()
    assert driver.todo() == (0,)
    resumed(driver, driver.number)
    assert play(driver.sync())
    assert port.asked == ["open 2", "close 1", "release_peers 1", "start"]
    assert driver.todo() == (0, 1), "what the other one held is inherited"


def test_a_round_that_was_committed_meanwhile_is_not_begun_again_in_the_next_view() -> None:
    driver, port, _ = driving()
    resumed(driver, driver.number + 1)
    assert play(driver.sync())
    assert port.asked == []
    assert driver.exchange.view == ONE


@pytest.mark.parametrize(("fully_loaded", "saves"), [(True, ["save False", "save True"]), (False, [])])
def test_a_worker_saves_before_its_exit_only_a_fully_loaded_state(fully_loaded: bool, saves: list[str]) -> None:
    """A joiner that was given up in its first round may hold a torn state without knowing it."""
    driver, port, told = driving()
    driver.fully_loaded, told.save_before_exit, told.exit = fully_loaded, True, ORPHANED
    with pytest.raises(Left, match="no coordinator"):
        play(driver.handle_requests())
    assert port.asked == saves


def test_a_joiner_is_fully_loaded_when_it_has_ended_a_round_that_it_began_with_the_state() -> None:
    """It may end the round in which it got the state, although the others gave it up (docs/protocol.md, Joining 5)."""
    driver, _, _ = driving()
    assert not driver.fully_loaded
    driver.state_machine.synced = False
    task = Task(position=Position(), shards=lambda _: 2, is_step=True)
    for fully_loaded in (False, True):
        assert play(driver.begin(task))
        driver.state_machine.synced = True
        assert play(driver.wait_for_round_end())
        assert driver.fully_loaded == fully_loaded


def test_a_replica_that_was_replaced_is_fully_loaded_a_round_later() -> None:
    """As for a joiner: docs/protocol.md, Drift 3."""
    driver, port, _ = driving()
    port.receive = lambda _: SimpleNamespace(state=["another"])  # type: ignore[attr-defined]
    driver.fully_loaded = True
    assert play(driver._renew(ONE, View(number=1, members=("a", "b"), joining=("a",), group=1)))
    assert not driver.fully_loaded
    task = Task(position=Position(), shards=lambda _: 2, is_step=True)
    for fully_loaded in (False, True):
        assert play(driver.wait_for_round_end())
        assert driver.fully_loaded == fully_loaded
        assert play(driver.begin(task))


def test_who_has_a_deadline_leaves_nothing_of_what_is_between_two_steps() -> None:
    """It is none to go on from, and there is no time: others may go on, or the newest checkpoint is what is left."""
    driver, port, told = driving()
    driver.fully_loaded, told.save_before_exit = True, True
    told.exit = Exit("no coordinator", 0, save=True, within_s=2.0)
    with pytest.raises(Left, match="no coordinator"):
        play(driver.handle_requests())
    assert port.asked == ["save False"]
    assert not told.save_before_exit, "no other thread needs to"


def test_who_is_to_check_another_gives_no_word_before_it_has() -> None:
    driver, port, _ = driving(shards=4, audit=1.0)
    assert port.begun.index("withhold 1") < port.begun.index("start")
    first, second = driver.checking.checks_left()
    driver.checked(first, ("the loss",), (1,))
    assert port.asked == []
    driver.checked(second, ("the loss",), (2,))
    assert port.asked == ["release 1"]


def test_who_has_drifted_takes_the_state_over_before_it_computes_and_its_word_says_of_what() -> None:
    driver, port, _ = driving(bits="any")  # type: ignore[arg-type]
    member, view = driver.state_machine, msgspec.structs.replace(ONE, members=("b", "a"))
    assert member.drift
    member.view, member.round, member.lineage = view, 1, None
    member.drift.on_step(view, 5, {"a": 1, "b": 2})
    port.receive = lambda _: SimpleNamespace(state={})
    assert play(driver.begin(Task(position=Position(step=EVERY), shards=lambda _: 2, is_step=True)))
    asked = [what.partition(" ")[0] for what in port.asked]
    assert asked[asked.index("renew") :] == ["renew", "digest", "start"]
    assert "send_state" not in asked


@pytest.mark.parametrize("owed", [(), (0,)])
def test_a_joiner_that_holds_the_state_gives_its_word_unless_it_owes_a_proof(owed: tuple[int, ...]) -> None:
    view = View(number=2, members=("b", "a"), joining=("a",), group=2)
    member, port = WorkerStateMachine("a"), Played(view)
    member.pending, member.prepared = view, 2
    nothing = SimpleNamespace(checks_left=lambda: owed)
    arriving = SimpleNamespace(header=(3, Position(), []), state={})
    driver = SimpleNamespace(
        state_machine=member, exchange=port, checking=nothing, tell=lambda _: None, begin=still, obey=still,
        take_digest=still, pass_idle_rounds=still, until=there, port=SimpleNamespace(receive=lambda _: arriving),
    )  # fmt: skip
    entrance = SimpleNamespace(
        first=lambda *_: None, entered=lambda: None, load=lambda _: None, is_later=lambda _: False
    )
    assert play(_join(driver, entrance, view))  # type: ignore[arg-type]
    assert member.synced
    assert port.asked == ([] if owed else ["release 2"])


@pytest.mark.parametrize("save_before_exit", [True, False])
def test_who_begins_the_run_holds_its_state_from_the_first_round_on(save_before_exit: bool) -> None:
    """It has proved nothing yet, and need not: what it began with is the run's. So it can be saved before the exit."""
    driver, port, told = driving()
    member, first = WorkerStateMachine("a"), View(number=1, members=("a",), group=1)
    driver.state_machine, driver.fully_loaded = member, False
    member.phase, member.pending, member.prepared = "candidate", first, 1
    entrance = SimpleNamespace(
        restore=lambda _: Position(), entered=lambda: None, is_later=lambda _: False,
        first=lambda *_: Task(position=Position(), shards=lambda _: 2, is_step=True),
    )  # fmt: skip
    assert play(join_view(driver, entrance))  # type: ignore[arg-type]
    port.asked.clear()
    told.save_before_exit, told.exit = save_before_exit, ORPHANED
    with pytest.raises(Left, match="no coordinator"):
        play(driver.handle_requests())
    assert port.asked == (["save False", "save True"] if save_before_exit else [])


def there(*_: object) -> Routine[bool]:
    yield from ()
    return True


def still(*_: object) -> Routine[None]:
    """Nothing to wait for."""
    yield from ()


def test_what_is_inherited_was_dealt_to_another_first() -> None:
    """Its time is no first one: see `CLASSES` in protocol/values.py."""
    driver, _, _ = driving(shards=4)
    driver.lineage = Lineage(sets=(("a", "b"),))
    assert [driver.inherited(shard) for shard in range(4)] == [False] * 4
    driver.lineage = Lineage(sets=(("a", "b"), ("a",)))
    assert driver.todo() == (0, 1, 2, 3)
    assert [driver.inherited(shard) for shard in range(4)] == [False, False, True, True]
