"""A trace at the coordinator: who is asked, what is kept, what becomes of who says too much; it decides nothing."""

from __future__ import annotations

import msgspec
import pytest

from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.protocol.coordinator import accounting
from farandole.protocol.messages import MOST_PEERS, MOST_SPANS, MOST_TAKEN, Traced
from farandole.protocol.values import MAX_MESSAGE_BYTES
from tests.support.scene import Scene, trained


def asked(scene: Scene, steps: int = 5, number: int = 77) -> None:
    accounting.start_trace(scene.coordinator, steps, number, scene.now)
    scene.look()


def look(scene: Scene) -> Traced:
    return accounting.trace_answers(scene.coordinator, scene.now)


def test_every_member_is_asked_and_what_it_says_is_kept() -> None:
    scene = trained("a", "b")
    assert look(scene) == Traced()
    asked(scene)
    for worker in ("a", "b"):
        assert scene.sent[worker] == [m.Trace(number=77, steps=5, most=MOST_SPANS)]
    told = m.Spans(number=77, steps=((4, 0, 9),), spans=((3, 0, 9),), peers=("a",), waits=((0, 0, 9),))
    scene.say("b", told)
    assert look(scene) == Traced(number=77, steps=5, asked=("a", "b"), answered=("b",), owed=("a",))
    assert msgspec.msgpack.decode(accounting.trace_answer(scene.coordinator, "b"), type=m.Spans) == told
    with pytest.raises(UsageError, match="'a'"):
        accounting.trace_answer(scene.coordinator, "a")
    assert scene.events == [], "it is nothing of the run's"


def test_it_changes_no_decision_and_is_in_no_journal() -> None:
    """The same inputs, with a trace and without: all else that is sent, and the state, are the same."""
    seen = []
    for traced in (True, False):
        scene = trained("a", "b", wanted=3)
        if traced:
            asked(scene)
        scene.ready("c")
        if traced:
            scene.say("a", m.Spans(number=77))
        scene.lose("b")
        seen.append((
            {w: [s for s in said if not isinstance(s, m.Trace)] for w, said in scene.sent.items()},
            scene.events,
            scene.journal,
        ))  # fmt: skip
    assert seen[0] == seen[1]


def test_one_at_a_time_and_one_that_nobody_looks_at_is_dropped() -> None:
    scene = trained("a", "b")
    asked(scene)
    with pytest.raises(UsageError, match=r"\ba\b.*\bb\b"):
        asked(scene, number=78)
    scene.now += accounting.LEASE_S - 1
    look(scene)
    scene.now += accounting.LEASE_S - 1
    with pytest.raises(UsageError, match=r"\ba\b.*\bb\b"):
        asked(scene, number=78)
    scene.now += 1
    asked(scene, number=78)
    scene.say("a", m.Spans(number=77), m.Spans(number=78))
    scene.say("b", m.Spans(number=78))
    assert look(scene).owed == ()
    asked(scene, number=79)
    assert look(scene).answered == (), "all have answered: another may begin at once"


def test_who_is_gone_owes_nothing_any_more() -> None:
    scene = trained("a", "b", "c", minimum=1)
    asked(scene)
    scene.say("c", m.Spans(number=77))
    scene.lose("b")
    scene.lose("c")
    assert look(scene) == Traced(number=77, steps=5, asked=("a", "b", "c"), answered=("c",), gone=("b",), owed=("a",))
    scene.ready("d")
    scene.say("d", m.Spans(number=77))
    assert look(scene).answered == ("c",), "who came later was not asked"


def test_who_is_back_on_another_connection_is_asked_again() -> None:
    scene = trained("a", "b")
    asked(scene)
    scene.forget()
    scene.close("b")
    scene.back("b")
    assert scene.last("b", m.Trace).number == 77
    scene.say("b", m.Spans(number=77))
    scene.forget()
    scene.close("b")
    scene.back("b")
    assert "Trace" not in scene.kinds("b")


def test_at_its_end_those_who_owe_it_are_asked_for_what_they_have_once() -> None:
    scene = trained("a", "b")
    accounting.end_trace(scene.coordinator)
    asked(scene)
    scene.say("a", m.Spans(number=77))
    scene.forget()
    for _ in range(2):
        accounting.end_trace(scene.coordinator)
    scene.look()
    assert "a" not in scene.sent
    assert scene.sent["b"] == [m.Trace(number=77, steps=0)]


def test_a_run_that_is_stopped_ends_it_and_has_no_other() -> None:
    scene = trained("a", "b")
    asked(scene)
    scene.coordinator.request_end("enough", 0, scene.now)
    scene.look()
    assert scene.last("a", m.Trace).steps == 0
    scene.now += accounting.LEASE_S  # the one before is in nobody's way
    with pytest.raises(UsageError):
        asked(scene, number=78)


def test_where_nobody_trains_there_is_nothing_to_trace() -> None:
    with pytest.raises(UsageError, match="farandole status"):
        asked(Scene())


def test_many_workers_have_less_room_each() -> None:
    names = tuple(f"w{n}" for n in range(100))
    scene = trained(*names)
    asked(scene)
    [trace] = scene.sent["w7"]
    assert isinstance(trace, m.Trace)
    assert trace.most * 2 * len(names) == accounting.TOTAL


def test_who_tells_of_more_than_it_may_is_put_out() -> None:
    scene = trained(*(f"w{n}" for n in range(20)), minimum=1)
    asked(scene)
    most = scene.last("w3", m.Trace).most
    assert most < MOST_SPANS
    for worker, spans in (("w3", {"spans": ((1, 0, 1),) * most}), ("w4", {"waits": ((0, 0, 1),) * (most + 1)})):
        scene.say(worker, m.Spans(number=77, **spans))
    assert look(scene).answered == ("w3",)
    assert scene.closed == ["w4"]


def test_the_fullest_honest_answer_can_be_sent_and_a_larger_one_can_not_be_read() -> None:
    hour = 3600 * 10**6
    full = m.Spans(
        number=2**53, wall_us=2**53, peers=tuple(f"worker-{n}" for n in range(MOST_PEERS)), full=True,
        steps=((2**40, hour, hour),) * MOST_TAKEN, spans=((9, hour, hour),) * MOST_SPANS,
        waits=((999, hour, hour),) * MOST_SPANS,
    )  # fmt: skip
    assert len(m.encode(full)) < MAX_MESSAGE_BYTES / 2
    assert m.decode_from_worker(m.encode(full)) == full
    for more in (
        {"spans": (*full.spans, (0, 0, 0))}, {"waits": (*full.waits, (0, 0, 0))}, {"steps": (*full.steps, (0, 0, 0))},
        {"peers": (*full.peers, "x")}, {"spans": ((10, 0, 0),)}, {"spans": ((0, -1, 0),)}, {"steps": ((2**60, 0, 0),)},
    ):  # fmt: skip
        with pytest.raises(msgspec.ValidationError):
            m.decode_from_worker(m.encode(msgspec.structs.replace(full, **more)))
