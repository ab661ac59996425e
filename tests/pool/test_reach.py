"""When a host of a hosts file is tried: at once, then later and later; and what is news."""

from __future__ import annotations

from farandole.pool.reach import FIRST_S, ITSELF_S, LONGEST_S, Reach


def test_one_that_answers() -> None:
    reach = Reach()
    assert reach.update(["a"], 0.0) == (["a"], [])
    assert reach.due(0.0) == ["a"]
    assert reach.due(0.0) == [], "somebody is on the way"
    assert not reach.tried("a", 1.0, failed=False)
    assert reach.joined("a")
    assert not reach.joined("a")
    assert reach.due(1000.0) == []


def test_one_that_does_not_is_told_once_and_tried_later_and_later() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    now, waits, told = 0.0, list[float](), 0
    for _ in range(10):
        assert reach.due(now) == ["a"]
        told += reach.tried("a", now, failed=True)
        before = now
        while not (reach.hosts["a"].at <= now):
            now += 0.5
        waits.append(now - before)
    assert told == 1
    assert waits == [min(FIRST_S * 2**number, LONGEST_S) for number in range(10)]
    reach.due(now)
    assert reach.joined("a")
    reach.lost("a", now)
    reach.due(now + ITSELF_S)
    assert reach.tried("a", now + ITSELF_S, failed=True), "it had been there: that is news again"


def test_an_agent_comes_back_by_itself_if_it_can() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.due(0.0)
    reach.joined("a")
    assert reach.lost("a", 10.0)
    assert not reach.lost("a", 10.0)
    assert reach.due(10.0) == []
    assert reach.joined("a")
    assert reach.lost("a", 20.0)
    assert reach.due(20.0 + ITSELF_S) == ["a"]


def test_one_whose_line_is_gone_is_not_tried_and_may_come_again() -> None:
    reach = Reach()
    reach.update(["a", "b"], 0.0)
    reach.due(0.0)
    reach.joined("a")
    assert reach.update(["b"], 1.0) == ([], ["a"])
    assert reach.update(["b"], 2.0) == ([], [])
    assert not reach.lost("a", 3.0)
    assert reach.update(["a", "b"], 4.0) == (["a"], [])
    assert reach.hosts["a"].state == "joined", "its agent is still there"
    reach.update(["b"], 5.0)
    reach.forget("a")
    assert reach.update(["a", "b"], 6.0) == (["a"], [])
    assert reach.due(6.0) == ["a"]
