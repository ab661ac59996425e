"""Who is there now, who comes and who goes, as events tell it."""

from __future__ import annotations

from typing import Any

from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.observe.text import Presence
from farandole.protocol import events
from farandole.protocol.metrics import Line
from tests.support.metric_lines import an


def seen(*lines: Line, by: Presence | None = None) -> tuple[list[str], list[str], list[str]]:
    presence = by or Presence()
    for line in lines:
        presence.take(line)
    return list(presence.members), presence.coming, presence.going


def view(*members: str) -> Line:
    return an(events.ViewEvent, members=members)


def starts(*workers: str) -> list[Line]:
    return [an(events.StartingEvent, worker=worker) for worker in workers]


def test_they_come() -> None:
    assert seen(*starts("w1", "w2")) == ([], ["w1", "w2"], [])
    ready = an(events.ReadyEvent, worker="w1")
    assert seen(*starts("w1", "w2"), ready, an(events.ProposedEvent, members=("w1",))) == ([], ["w1", "w2"], [])
    assert seen(*starts("w1", "w2"), ready, view("w1")) == (["w1"], ["w2"], [])


def test_they_go() -> None:
    both = [*starts("w1", "w2"), view("w1", "w2")]
    told = an(events.NoticeEvent, worker="w2")
    assert seen(*both, told) == (["w1", "w2"], [], ["w2"])
    assert seen(*both, an(events.ProposedEvent, members=("w1",))) == (["w1", "w2"], [], ["w2"]), "released"
    assert seen(*both, told, view("w1"), an(events.LeftEvent, worker="w2")) == (["w1"], [], [])
    assert seen(*both, told, an(events.LostEvent, worker="w2"), view("w1")) == (["w1"], [], [])


def test_who_does_not_come_in_after_all_is_not_coming() -> None:
    for kind in (
        events.ExitedEvent,
        events.RefusedEvent,
        events.StartFailedEvent,
        events.FailedEvent,
        events.LostEvent,
    ):
        assert seen(*starts("w1"), an(kind, worker="w1")) == ([], [], []), kind


def test_nobody_is_there_after_the_end() -> None:
    assert seen(*starts("w1", "w2"), view("w1"), an(events.OverEvent)) == ([], [], [])
    assert seen(*starts("w1"), view("w1"), an(events.StateLostEvent)) == ([], [], [])


def test_who_looks_on_from_the_middle_goes_by_the_status() -> None:
    def worker(name: str, rank: int | None, state: str) -> WorkerStatus:
        return WorkerStatus(id=name, host="h", pid=1, pool="", rank=rank, state=state)

    more: dict[str, Any] = {"reason": "", "code": None, "samples_per_s": None, "loss": None, "total": None}
    status = Status(
        run="r", coordinator=CoordinatorStatus(pid=9, address="a"), view=ViewStatus(number=3, size=2), step=57, epoch=2,
        wanted=3, minimum=1, maximum=None, state="training",
        workers=(worker("w2", 1, "leaving"), worker("w1", 0, "member"), worker("w3", None, "starting")), **more,
    )  # fmt: skip
    assert seen(by=Presence(status)) == (["w1", "w2"], ["w3"], ["w2"])
