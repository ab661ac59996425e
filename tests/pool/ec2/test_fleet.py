"""What is due of a fleet: pure, on a clock of the test's own."""

from __future__ import annotations

import itertools
from collections import Counter

from farandole.pool.base import HostPreempted, NothingToGive, WorkerStartFailed
from farandole.pool.ec2 import (
    ANOTHER,
    DOUBT_S,
    END_AGAIN_S,
    IDLE_S,
    JOIN_S,
    MISSING_S,
    SPOT,
    Fleet,
    FleetActions,
    InstanceRequest,
    ListedInstance,
    Market,
    Zone,
)

ZONES = [Zone(name="a", subnet="s-a", types=("small", "large")), Zone(name="b", subnet="s-b", types=("small",))]


def fleet(slots: int = 1, keep_failed_s: float = 0.0) -> Fleet:
    tokens = (f"t{n}" for n in itertools.count(1))
    return Fleet(Market(ZONES, [SPOT]), {"small": slots, "large": 2 * slots}, tokens, keep_failed_s)


def row(each: str, state: str = "running", *, request: str = "", tagged: bool = True) -> ListedInstance:
    return ListedInstance(id=each, state=state, type="small", zone="a", market=SPOT, tagged=tagged, request=request)


def failed(due: FleetActions) -> list[str]:
    return [event.worker for event in due.events if isinstance(event, WorkerStartFailed)]


def short(due: FleetActions) -> list[str]:
    return [event.worker for event in due.events if isinstance(event, NothingToGive)]


def asked(kept: Fleet, *workers: str, now: float = 0.0) -> InstanceRequest:
    for worker in workers:
        kept.start(worker)
    [request] = kept.take_actions(now).asks
    return request


def joined(kept: Fleet, each: str, now: float = 0.0, workers: int = 0) -> None:
    kept.agent(each, connected=True, state="ready", reason="", workers=workers, now=now)


def names(kept: Fleet) -> list[str]:
    return [host.name for host in kept.hosts()]


def test_starts_that_wait_share_the_slots_of_what_is_coming() -> None:
    kept = fleet(slots=2)
    request = asked(kept, "w1", "w2", "w3")
    assert request.number == 2, "two of two slots each"
    kept.start("w4")
    assert kept.take_actions(1).asks == [], "there is a slot for it on its way"
    kept.start("w5")
    assert [r.number for r in kept.take_actions(2).asks] == [1]
    kept.answered(request.token, [("i-1", "small"), ("i-2", "small")], 3)
    assert names(kept) == [ANOTHER]
    joined(kept, "i-2", 4)
    assert kept.take_actions(4).starts == [("w1", "i-2"), ("w2", "i-2")]
    assert names(kept) == ["i-2", ANOTHER]


def test_an_instance_is_counted_once_whoever_tells_of_it_first() -> None:
    ways = ("answer", "list", "agent")
    for order in itertools.permutations(ways):
        kept = fleet()
        request = asked(kept, "w1")
        for way in order:
            if way == "answer":
                kept.answered(request.token, [("i-1", "small")], 1)
            elif way == "list":
                kept.listed([row("i-1", request=request.token)], 1)
            else:
                joined(kept, "i-1", 1)
            assert kept.take_actions(1).asks == [], order
        assert list(kept.instances) == ["i-1"]
        assert kept.requests == {}
        assert kept.hosts()[0].slots == 1


def test_an_answer_that_was_lost_is_settled_by_the_list_or_by_time() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    kept.doubtful(request.token, 1)
    kept.listed([row("i-1", "pending", request=request.token)], 2)
    assert kept.requests == {}
    kept.start("w2")
    assert [r.number for r in kept.take_actions(2).asks] == [1], "what has come is not coming a second time"

    kept = fleet()
    request = asked(kept, "w1")
    kept.doubtful(request.token, 1)
    kept.doubtful(request.token, 50)
    assert failed(kept.take_actions(DOUBT_S)) == []
    assert failed(kept.take_actions(DOUBT_S + 2)) == ["w1"], "twice in doubt is not twice as long"
    kept.listed([row("i-9", request=request.token)], DOUBT_S + 3)  # after all
    assert kept.take_actions(DOUBT_S + 3).ends == []
    assert kept.take_actions(DOUBT_S + 4 + IDLE_S).ends == ["i-9"], "nobody waits for it any more"


def test_no_capacity_is_tried_elsewhere_and_then_told() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    assert (request.offer.zone.name, request.offer.types) == ("a", ("small", "large"))
    kept.answered(request.token, [], 1, "InsufficientInstanceCapacity")
    assert short(kept.take_actions(1)) == ["w1"]
    second = asked(kept, "w2", now=2)
    assert second.offer.zone.name == "b", "nothing is in zone a yet: it costs nothing to go elsewhere"
    kept.answered(second.token, [], 3, "InsufficientInstanceCapacity")
    assert short(kept.take_actions(3)) == ["w2"]
    kept.start("w3")
    due = kept.take_actions(4)
    assert (due.asks, short(due)) == ([], ["w3"]), "all is cooling"
    assert asked(kept, "w4", now=40).offer.zone.name == "a"


def test_what_was_not_asked_for_yet_does_not_fail_with_what_was() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    kept.start("w2")
    kept.answered(request.token, [], 1, "none")
    due = kept.take_actions(1)
    assert short(due) == ["w1"]
    assert len(due.asks) == 1


def test_part_of_what_was_asked_for() -> None:
    kept = fleet()
    request = asked(kept, "w1", "w2", "w3")
    kept.answered(request.token, [("i-1", "small")], 1, "no more")
    assert short(kept.take_actions(1)) == ["w2", "w3"]
    joined(kept, "i-1", 2)
    assert kept.take_actions(2).starts == [("w1", "i-1")]


def test_what_nobody_waits_for_is_ended_again_and_again_until_aws_says_so() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    kept.answered(request.token, [("i-1", "small")], 1)
    assert kept.stop("w1")
    assert failed(kept.take_actions(1)) == ["w1"]
    assert kept.take_actions(IDLE_S).ends == []
    assert kept.take_actions(1 + IDLE_S).ends == ["i-1"]
    kept.listed([row("i-1", request=request.token)], 2 + IDLE_S)  # it is not listed as ended yet
    assert kept.take_actions(2 + IDLE_S).ends == []
    assert kept.take_actions(2 + IDLE_S + END_AGAIN_S).ends == ["i-1"]
    kept.start("w2")
    assert len(kept.take_actions(3 + IDLE_S + END_AGAIN_S).asks) == 1, "one that is being ended is no supply"
    kept.listed([row("i-1", "shutting-down", request=request.token)], 90)
    kept.take_actions(90)
    kept.listed([row("i-1", "running", request=request.token)], 91)  # an old list
    assert kept.take_actions(91).forget == []
    kept.agent("i-1", connected=True, state="ready", reason="", workers=0, now=91)
    assert kept.take_actions(91).forget == ["i-1"], "its last words are no words of a host"
    assert kept.instances == {}


def test_what_runs_on_one_that_shuts_down_has_gone_when_its_agent_has() -> None:
    kept = fleet()
    kept.listed([row("i-1")], 0)
    joined(kept, "i-1", workers=1)
    kept.listed([row("i-1", "shutting-down")], 1)
    assert (names(kept), kept.take_actions(1).forget) == ([ANOTHER], [])
    kept.agent("i-1", connected=False, state="ready", reason="", workers=1, now=2)
    kept.listed([row("i-1", "shutting-down")], 3)
    assert kept.take_actions(3).forget == ["i-1"]


def test_who_works_or_was_launched_by_others_is_not_in_excess() -> None:
    kept = fleet()
    joined(kept, "i-theirs")
    kept.listed([row("i-theirs"), row("i-ours", request="t0")], 0)
    joined(kept, "i-ours", workers=1)
    assert kept.take_actions(0).ends == []
    assert kept.take_actions(2 * IDLE_S).ends == []
    joined(kept, "i-ours", 2 * IDLE_S)
    kept.take_actions(2 * IDLE_S)
    assert kept.take_actions(3 * IDLE_S).ends == ["i-ours"]


def test_one_that_is_not_listed_has_gone_only_after_a_while() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    kept.answered(request.token, [("i-1", "small")], 1)
    for now in (2.0, 1 + MISSING_S):
        kept.listed([], now)
        assert list(kept.instances) == ["i-1"]
    kept.listed([], 2 + MISSING_S)
    due = kept.take_actions(2 + MISSING_S)
    assert (kept.instances, due.forget, failed(due)) == ({}, ["i-1"], ["w1"])


def test_one_that_goes_before_it_joins_and_one_that_never_does() -> None:
    kept = fleet()
    request = asked(kept, "w1")
    kept.answered(request.token, [("i-1", "small")], 1)
    kept.listed([row("i-1", "terminated", request=request.token)], 2)
    assert failed(kept.take_actions(2)) == ["w1"]

    kept = fleet()
    request = asked(kept, "w1")
    kept.answered(request.token, [("i-1", "small")], 1)
    assert failed(kept.take_actions(1 + JOIN_S)) == []
    due = kept.take_actions(2 + JOIN_S)
    assert (failed(due), due.ends) == (["w1"], ["i-1"])


def test_a_failed_one_is_kept_for_a_look() -> None:
    for keep_s, ended in ((0.0, ["i-1"]), (300.0, list[str]())):
        kept = fleet(keep_failed_s=keep_s)
        kept.answered(asked(kept, "w1").token, [("i-1", "small")], 1)
        kept.agent("i-1", connected=True, state="failed", reason="no torch", workers=0, now=2)
        due = kept.take_actions(2)
        assert (due.ends, failed(due)) == (ended, ["w1"])
        assert "i-1" not in names(kept)
    assert kept.take_actions(2 + 300).ends == ["i-1"]


def test_without_its_tag_it_is_released_and_ends_with_its_agent() -> None:
    kept = fleet()
    kept.listed([row("i-1", request="t0")], 0)
    joined(kept, "i-1", workers=1)
    kept.take_actions(0)
    kept.listed([row("i-1", request="t0", tagged=False)], 1)
    kept.listed([row("i-1", request="t0", tagged=False)], 2)
    due = kept.take_actions(2)
    assert Counter(type(event) for event in due.events)[HostPreempted] == 1
    assert due.lets_go == [], "its worker is leaving"
    assert due.shown == {}, "what is released is not tagged any more"
    kept.agent("i-1", connected=True, state="ready", reason="", workers=0, now=3)
    due = kept.take_actions(3)
    assert (due.lets_go, due.ends) == (["i-1"], [])
    assert kept.take_actions(3 + END_AGAIN_S).ends == ["i-1"], "it should have ended itself"


def test_stopped_and_started_again_it_comes_back() -> None:
    kept = fleet()
    kept.listed([row("i-1")], 0)
    joined(kept, "i-1", workers=1)
    kept.agent("i-1", connected=False, state="ready", reason="", workers=1, now=1)
    kept.listed([row("i-1", "stopped")], 2)
    assert kept.take_actions(2).forget == ["i-1"]
    assert names(kept) == [ANOTHER]
    kept.listed([row("i-1", "running")], 500)
    assert kept.take_actions(500).shown == {"i-1": "queued"}
    joined(kept, "i-1", 510)
    assert names(kept) == ["i-1", ANOTHER]


def test_tags_show_each_state_once_they_are_listed_as_others() -> None:
    kept = fleet()
    kept.listed([row("i-1")], 0)
    assert kept.take_actions(0).shown == {"i-1": "queued"}
    kept.agent("i-1", connected=True, state="preparing", reason="", workers=0, now=1)
    assert kept.take_actions(1).shown == {"i-1": "preparing"}
    kept.listed([ListedInstance(id="i-1", state="running", type="small", zone="a", shown="preparing")], 2)
    assert kept.take_actions(2).shown == {}
    joined(kept, "i-1", 3)
    assert kept.take_actions(3).shown == {"i-1": "joined"}
    kept.leaves("i-1")
    assert kept.take_actions(4).shown == {"i-1": "leaving"}
