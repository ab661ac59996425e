"""A coordinator comes back, and not everyone does; or it is killed once more."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.reconnection import Durable, KnownWorker, to_durable
from farandole.protocol.coordinator.state import (
    EXIT_BANNED,
    EXIT_EVICTED,
    RETURNS,
    CrashLoop,
    Departed,
    Ending,
    IssuedView,
)
from farandole.protocol.values import Newest
from tests.support.metric_lines import stepped
from tests.support.scene import SIGNATURE, Scene, trained, view_of

VIEWS = [view_of(number, "a", "b", group=1) for number in (7, 8, 9)]
EVERYTHING = Durable(
    number=9, stops=4, external_workers=2, pools=("p", "q"), fixed_targets={"p": 2, "q": 1}, shared_target=3,
    pool_capacity={"p": 4}, startup_failures={"": 1},
    crash_loop=CrashLoop(count=1, step=5, reason="why", joiners=2, since=4), not_finite=5, unpromised=6,
    signature=SIGNATURE, previous=VIEWS[0], view=VIEWS[1], proposed=VIEWS[2],
    issued=tuple(IssuedView(view=view, round=3, lineage=view.lineage(("a",))) for view in VIEWS), waited_for=("a", "b"),
    workers=tuple(
        KnownWorker(id=worker, host="h", pid=3, pool="p", session=f"s-{worker}", state=state, leaving=leaving,
        entered=5, unreached="why")
        for worker, state, leaving in (("a", "member", ""), ("b", "member", "SIGTERM"), ("c", "ready", ""))
    ),
    expelled={"b": "why"},
    departed={"d": Departed(session="s-d", reason="why", code=3, started=True, pool="p", entered=2)},
    dead=("e",), banned=("b", "d"), wrong_hosts=("h1", "h2"),
    ending=Ending(code=1, reason="why", failed=True, between=True, finished=True, stored=True, replicas_differ=True,
    differing=("b",), where="at step 5", reporter="a"),
    over=Ending(code=2, reason="why", failed=False), newest=Newest(step=5, path="p"), unrecorded=7,
)  # fmt: skip


@pytest.mark.parametrize("over", [True, False])
def test_all_that_was_kept_is_taken_over_and_kept_again(*, over: bool) -> None:
    """A field that is new, and forgotten on either way, shows here."""
    default = Durable(fixed_targets={})
    usual = [name for name in Durable.__struct_fields__ if getattr(EVERYTHING, name) == getattr(default, name)]
    assert usual == [], "each has to have another value than the usual one, here"
    known = EVERYTHING if over else msgspec.structs.replace(EVERYTHING, over=None)
    scene = Scene(msgspec.json.decode(msgspec.json.encode(known), type=Durable))
    asked = {"expelled": {}, "waited_for": ("a", "b")} if over else {"stops": known.stops + 1}
    assert to_durable(scene.coordinator) == msgspec.structs.replace(known, **asked)


def test_the_names_in_journals_stay() -> None:
    """Where a field of the journal has another name than the attribute."""
    aliases = {each.name: each.encode_name for each in msgspec.structs.fields(Durable) if each.name != each.encode_name}
    assert aliases == {
        "external_workers": "guests", "fixed_targets": "wants", "shared_target": "shared", "pool_capacity": "can",
        "crash_loop": "losses", "waited_for": "parts", "dead": "gone", "banned": "barred",
    }  # fmt: skip


@pytest.mark.parametrize("barred", [True, False])
def test_one_was_being_put_out(*, barred: bool) -> None:
    """... for what it did, or for what became of it, and the others had not all answered yet."""
    before = trained("a", "b", "c")
    if barred:
        before.say("b", m.Welcome(run="r", worker="b", folder="", terms=m.RunTerms(), lines=(-1, 0)))
    else:
        for _ in range(2 * RETURNS):
            before.back("b")
            if before.closed:
                break
            for worker in ("a", "b", "c"):
                before.report(worker, 7)
    assert before.closed == ["b"]
    scene = before.restarted()
    scene.back("a", "b", "c")
    scene.close("b")
    assert scene.kinds("b") == ["Goodbye"], "it is not asked in again, nor where it stands"
    assert scene.last("b", m.Goodbye).code == (EXIT_BANNED if barred else EXIT_EVICTED)
    for worker in ("a", "c"):
        scene.report(worker, 7)
    assert scene.members("a", "c") == ("a", "c")
    again = scene.restarted()
    again.back("b")
    assert again.kinds("b") == ["Goodbye"]
    assert again.last("b", m.Goodbye).code == (EXIT_BANNED if barred else EXIT_EVICTED), "nor by the next one"


def test_rank_0_of_the_view_before_still_says_what_it_has_to_say() -> None:
    """a leaves, and has the lines of the steps that it was in; b has gone on already."""
    before = trained("a", "b", "c")
    before.say("a", m.LeaveRequest(reason="SIGTERM"))
    view = before.last("b", m.Propose).view
    before.switch(view, 4, "b")
    scene = before.restarted()
    scene.back("a", "b", "c")
    scene.say("b", m.Heartbeat(view=view.number, round=4, step=4))
    scene.say("a", m.Heartbeat(view=1, round=4, step=4, lines=tuple(map(stepped, range(4)))))
    assert [line.step for line in scene.lines] == [0, 1, 2, 3]


def test_one_does_not_return() -> None:
    scene = trained("a", "b", "c").restarted()
    scene.back("a", "b")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.wait(5.0, "a", "b")
    assert "Resume" not in scene.kinds("a")
    scene.wait(0.5, "a", "b")
    assert scene.members("a", "b") == ("a", "b")


def test_one_had_died_meanwhile_and_its_pool_says_so() -> None:
    scene = trained("a", "b", "c").restarted()
    scene.back("a", "b")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.exit("c")
    assert scene.members("a", "b") == ("a", "b"), "no timeout"


def test_nobody_returns() -> None:
    scene = trained("a", "b", orphan_s=60.0).restarted()
    scene.wait(60.0)
    assert scene.events == ["coordinator back", "out of reach"], "they may train on for their lease"
    scene.wait(0.5)
    assert scene.events[-1] == "state lost"
    scene.ready("c", "d")
    assert scene.last("c", m.Propose).view.number == 2


def test_all_had_died_meanwhile() -> None:
    scene = trained("a", "b", orphan_s=60.0).restarted()
    scene.exit("a", "b")
    assert scene.events == ["coordinator back", "lost", "lost", "state lost"]


def test_who_was_still_starting_is_missed() -> None:
    """b froze before it was ready: its pool takes it for one that trains, so somebody has to say that it is gone."""
    before = Scene(minimum=2)
    before.ready("a")
    before.hello("b")
    scene = before.restarted()
    scene.ready("a")
    scene.wait(6.0, "a")
    assert scene.events == ["coordinator back", "ready", "lost"]
    assert scene.coordinator.roster().evicted == ("b",)


def test_an_evicted_worker_and_a_leaving_worker_are_still_known() -> None:
    before = trained("a", "b", "c")
    before.say("c", m.LeaveRequest(reason="SIGTERM"))
    before.switch(before.last("c", m.Propose).view, 4, "a", "b", "c")
    before.close("b", "c")
    before.wait(5.5, "a")
    before.report("a", 7)
    scene = before.restarted()
    scene.back("a", "b", "c")
    assert {w: scene.last(w, m.Goodbye).code for w in "bc"} == {"b": 3, "c": 0}
    assert scene.coordinator.roster().evicted == ("b",)
    assert scene.kinds("a") == ["Welcome", "Stop"]


# --- and once more -------------------------------------------------------------------------------------------------


def test_killed_again_and_again() -> None:
    scene = trained("a", "b", "c")
    for number in range(1, 4):
        scene = scene.restarted().restarted()
        scene.back("a", "b", "c")
        for worker in ("a", "b", "c"):
            scene.report(worker, 7)
        assert scene.last("a", m.Resume).view.number == number + 1
        assert scene.members("a", "b", "c") == ("a", "b", "c")


@pytest.mark.parametrize("seen", ["exit close", "close exit", "exit"])
def test_exits_that_are_told_again_count_once(seen: str) -> None:
    scene = Scene(wanted=2, startup_failures=100)
    for worker in ("a", "b", "c"):
        scene.ready(worker)
        for what in seen.split():
            getattr(scene, what)(worker)
        scene = scene.restarted()
        scene.exit(*"abc"[: "abc".index(worker) + 1])
    assert scene.coordinator.startup_failures == {"": 3}


def test_an_exit_that_is_told_again_is_not_its_successors() -> None:
    scene = trained("a", "b", "c")
    scene.exit("c")
    scene.close("c")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    scene.ready("d")
    scene = scene.restarted()
    scene.back("a", "b")
    scene.hello("d")
    scene.exit("c")
    for worker in ("a", "b"):
        scene.report(worker, 8)
    scene.report("d", 0, synced=False)
    assert scene.members("a", "b") == ("a", "b")
    scene.say("d", m.Ready(signature=SIGNATURE))
    assert scene.last("d", m.Propose).view.members == ("a", "b", "d")
    assert scene.coordinator.startup_failures == {}
