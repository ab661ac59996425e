"""Recovery as truth tables: what the survivors report, and how they go on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from farandole.protocol.coordinator.disputes import convict
from farandole.protocol.coordinator.recovery import decide
from farandole.protocol.messages import Stopped
from farandole.protocol.view import Lineage, View

Sets = tuple[tuple[str, ...], ...]

V1 = View(number=1, members=("a", "b", "c"), group=1)
JOIN = View(number=2, members=("a", "b", "c", "d"), joining=("d",), group=2)
LEAVE = View(number=2, members=("a", "b"), group=1)
SWAP = View(number=2, members=("a", "b", "d"), joining=("d",), group=2)
AGAIN = View(number=3, members=("a", "b"), group=1)  # a recovery view of V1, when c had died
ABC: Sets = (("a", "b", "c"),)

UNEVEN = View(number=1, members=("a", "b", "c"), group=1, shares=(1000, 500, 250))
EVENED = View(number=2, members=("a", "b", "c"), group=1, shares=(1000, 1000, 250))


def at(
    round_: int, *, view: View | None = V1, has_result: bool = False, synced: bool = True, lineage: Sets = ABC,
    shares: tuple[int, ...] = (),
) -> Stopped:  # fmt: skip
    return Stopped(
        stop=1,
        view=view,
        round=round_,
        step=0,
        has_result=has_result,
        synced=synced,
        lineage=Lineage(sets=lineage, shares=shares),
    )


WAITS = at(0, view=None, synced=False, lineage=())  # a candidate in the proposed view


@dataclass(frozen=True, kw_only=True)
class Case:
    remark: str
    reports: dict[str, Stopped]
    members: str = ""
    round: int
    commit: bool = False
    lineage: Sets
    dealt: tuple[int, ...] = ()  # the lineage's shares
    shares: tuple[int, ...] = ()  # from the next round on
    group: int = 1
    dismissed: str = ""
    unsynced: str = ""


CASES = (
    Case(
        remark="c died, nobody holds the round: its shards are dealt out",
        reports={"a": at(5), "b": at(5)},
        members="ab", round=5, lineage=(("a", "b", "c"), ("a", "b")),
    ),
    Case(
        remark="all hold it: c may have ended it, so it is committed",
        reports={"a": at(5, has_result=True), "b": at(5, has_result=True)},
        members="ab", round=5, commit=True, lineage=(("a", "b"),),
    ),
    Case(
        remark="one does not hold it: nobody can have ended it, so it is redone",
        reports={"a": at(5, has_result=True), "b": at(5)},
        members="ab", round=5, lineage=(("a", "b", "c"), ("a", "b")),
    ),
    Case(
        remark="a has ended it, b holds it and commits it; round 6 is dealt with c's part",
        reports={"a": at(6), "b": at(5, has_result=True)},
        members="ab", round=6, lineage=(("a", "b", "c"), ("a", "b")),
    ),
    Case(
        remark="a has ended it and holds the next, which b can't: nobody has ended that one",
        reports={"a": at(6, has_result=True), "b": at(5, has_result=True)},
        members="ab", round=6, lineage=(("a", "b", "c"), ("a", "b")),
    ),
    Case(
        remark="nobody died (a broken pair whose accused went away): the same members, a new number",
        reports={"a": at(5), "b": at(5), "c": at(5)},
        members="abc", round=5, lineage=(("a", "b", "c"), ("a", "b", "c")),
    ),
    Case(
        remark="one is left, rank order does not matter",
        reports={"c": at(5)},
        members="c", round=5, lineage=(("a", "b", "c"), ("c",)),
    ),
    Case(
        remark="a second death in a redone round: what b inherited stays with it",
        reports={"b": at(5, view=AGAIN, lineage=(("a", "b", "c"), ("a", "b")))},
        members="b", round=5, lineage=(("a", "b", "c"), ("a", "b"), ("b",)),
    ),
    Case(
        remark="the round after a redone one: a begins afresh, the longer lineage of b is of the round before",
        reports={
            "a": at(6, view=AGAIN, lineage=(("a", "b"),)),
            "b": at(5, view=AGAIN, has_result=True, lineage=(("a", "b", "c"), ("a", "b"))),
        },
        members="ab", round=6, lineage=(("a", "b"), ("a", "b")),
    ),
    # --- a view on its way ---
    Case(
        remark="a join that nobody has applied: d waits for the next one",
        reports={"a": at(5), "b": at(5), "d": WAITS},
        members="ab", round=5, lineage=(("a", "b", "c"), ("a", "b")), unsynced="d",
    ),
    Case(
        remark="a join that a has applied: d has no state yet and waits; the view's group is the new one",
        reports={
            "a": at(6, view=JOIN), "b": at(5, has_result=True), "c": at(6, view=JOIN),
            "d": at(6, view=JOIN, synced=False),
        },
        members="abc", round=6, lineage=(("a", "b", "c"), ("a", "b", "c")), group=2, unsynced="d",
    ),
    Case(
        remark="d is synced: it is one of the survivors, and may inherit",
        reports={"a": at(6, view=JOIN), "d": at(6, view=JOIN)},
        members="ad", round=6, lineage=(("a", "b", "c"), ("a", "d")), group=2,
    ),
    Case(
        remark="only d is left, and synced: the run goes on",
        reports={"d": at(6, view=JOIN)},
        members="d", round=6, lineage=(("a", "b", "c"), ("d",)), group=2,
    ),
    Case(
        remark="a leave that a has applied: c's part is done, b commits and follows",
        reports={
            "a": at(6, view=LEAVE, lineage=(("a", "b"),)), "b": at(5, has_result=True), "c": at(5, has_result=True),
        },
        members="ab", round=6, lineage=(("a", "b"), ("a", "b")), dismissed="c",
    ),
    Case(
        remark="a leave that only the leaver has applied: the others hold the round and commit it",
        reports={
            "a": at(5, has_result=True), "b": at(5, has_result=True), "c": at(6, view=LEAVE, lineage=(("a", "b"),)),
        },
        members="ab", round=5, commit=True, lineage=(("a", "b"),), dismissed="c",
    ),
    Case(
        remark="the same, a having ended the round: nobody has begun the next one in its view, it is dealt afresh",
        reports={"a": at(6), "b": at(5, has_result=True), "c": at(6, view=LEAVE, lineage=(("a", "b"),))},
        members="ab", round=6, lineage=(("a", "b"),), dismissed="c",
    ),
    Case(
        remark="a leave that nobody has applied: the leaver goes on as a member",
        reports={"a": at(6), "b": at(6), "c": at(5, has_result=True)},
        members="abc", round=6, lineage=(("a", "b", "c"), ("a", "b", "c")),
    ),
    Case(
        remark="only the leaver is left: it takes the run up again",
        reports={"c": at(6, view=LEAVE, lineage=(("a", "b"),))},
        members="c", round=6, lineage=(("a", "b"), ("c",)),
    ),
    Case(
        remark="a leaver and a joiner without state are left: the leaver takes the run up, the joiner waits",
        reports={"c": at(6, view=SWAP, lineage=(("a", "b"),)), "d": at(6, view=SWAP, synced=False)},
        members="c", round=6, lineage=(("a", "b"), ("c",)), group=2, unsynced="d",
    ),
    Case(
        remark="c dies in a round that was dealt by speed: the survivors keep what they have of it",
        reports={"a": at(5, view=UNEVEN, shares=UNEVEN.shares), "b": at(5, view=UNEVEN, shares=UNEVEN.shares)},
        members="ab", round=5, lineage=(("a", "b", "c"), ("a", "b")), dealt=(1000, 500, 250), shares=(1000, 500),
    ),
    Case(
        remark="... and b, which is left alone, needs no shares any more",
        reports={"b": at(5, view=UNEVEN, shares=UNEVEN.shares)},
        members="b", round=5, lineage=(("a", "b", "c"), ("b",)), dealt=(1000, 500, 250),
    ),
    Case(
        remark="other shares had been agreed on: b has begun a round by them, a has to end the one before",
        reports={
            "a": at(5, view=UNEVEN, has_result=True, shares=UNEVEN.shares),
            "b": at(6, view=EVENED, shares=EVENED.shares),
        },
        members="ab", round=6, lineage=(("a", "b", "c"), ("a", "b")), dealt=(1000, 1000, 250),
    ),
    Case(
        remark="other shares had been agreed on, and nobody who lives has begun a round by them: it is dealt anew",
        reports={
            "a": at(6, view=UNEVEN, shares=UNEVEN.shares),
            "c": at(5, view=EVENED, has_result=True, shares=UNEVEN.shares),
        },
        members="ac", round=6, lineage=(("a", "c"),), dealt=(1000, 250), shares=(1000, 250),
    ),
    Case(
        remark="a round that all hold is committed: the next one is dealt by the view's shares",
        reports={w: at(5, view=UNEVEN, has_result=True, shares=UNEVEN.shares) for w in "ac"},
        members="ac", round=5, commit=True, lineage=(("a", "c"),), dealt=(1000, 250), shares=(1000, 250),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.remark)
def test_decide(case: Case) -> None:
    outcome = decide(case.reports)
    assert outcome.members == tuple(case.members)
    assert (outcome.round, outcome.commit) == (case.round, case.commit)
    assert outcome.lineage == Lineage(sets=case.lineage, shares=case.dealt)
    assert outcome.shares == case.shares
    assert outcome.group == case.group
    assert outcome.dismissed == tuple(case.dismissed)
    assert outcome.unsynced == tuple(case.unsynced)
    if not case.commit:
        held = outcome.lineage.assign(7)
        assert sorted(shard for mine in held.values() for shard in mine) == list(range(7))
        assert set(held) == set(outcome.members)


def test_the_order_of_the_reports_does_not_matter() -> None:
    reports = {"a": at(6), "b": at(5, has_result=True), "c": at(6)}
    backwards = dict(reversed(reports.items()))
    assert decide(reports) == decide(backwards)


@pytest.mark.parametrize(
    ("accusations", "evicted", "remark"),
    [
        ("", "", "nobody accuses"),
        ("ab", "b", "one word against one other: who came later goes"),
        ("ab ba", "b", "both accuse: the same"),
        ("ba", "b", "only b accuses: the same, or whoever came could put out who was there"),
        ("ac bc", "c", "one breaks with several: it goes alone"),
        ("ca cb", "c", "the same, whoever of them speaks"),
        ("ab ac", "a", "it accuses several who have no complaint of one another"),
        (
            "ab cb ac",
            "bc",
            "all three pairs are broken: of equal ones who came later, then the pair (a, b) is still broken",
        ),
        ("ab bc", "b", "b is in both pairs: without it none is left"),
        ("ax", "", "the accused is gone already"),
        ("xa", "", "the accuser is gone already: nobody is left who can't reach a"),
        ("aa", "", "nonsense"),
        ("da", "d", "d holds no state: it goes, although it accuses"),
        ("ad", "d", "d holds no state and is accused"),
        ("da db ad", "d", "nor can it cost the run two"),
        ("de", "e", "neither holds the state"),
    ],
)
def test_convict(accusations: str, evicted: str, remark: str) -> None:
    pairs = [(pair[0], pair[1]) for pair in accusations.split()]
    assert sorted(each.worker for each in convict(pairs, tuple("abcde"), "abc")) == sorted(evicted), remark


@pytest.mark.parametrize(
    ("witnesses", "spent", "evicted", "remark"),
    [
        ({"a": "c"}, "", "a", "c waits for a as well"),
        ({"a": "b"}, "", "b", "b has said so already: one voice"),
        ({"a": "a"}, "", "a", "it hangs, by its own heartbeats"),
        ({}, "a", "a", "its word has counted too often"),
        ({"b": "c"}, "a", "b", "but c confirms it"),
    ],
)
def test_convict_by_what_others_say(witnesses: dict[str, str], spent: str, evicted: str, remark: str) -> None:
    found = {worker: set(others) for worker, others in witnesses.items()}
    assert [each.worker for each in convict([("b", "a")], tuple("abc"), "abc", found, spent)] == [evicted], remark
