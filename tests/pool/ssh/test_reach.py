"""When a host of a hosts file is tried: at once, then later and later; and what is news."""

from __future__ import annotations

from farandole.pool.ssh import FIRST_S, ITSELF_S, LONGEST_S, Reach


def test_one_that_answers() -> None:
    reach = Reach()
    assert reach.update(["a"], 0.0) == (["a"], [])
    assert reach.take_hosts_to_try(0.0) == ["a"]
    assert reach.take_hosts_to_try(0.0) == [], "somebody is on the way"
    assert not reach.tried("a", 1.0, "")
    assert reach.connected("a", ready=True)
    assert not reach.connected("a", ready=True)
    assert reach.take_hosts_to_try(1000.0) == []


def test_one_that_does_not_is_told_once_and_tried_later_and_later() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    now, waits, told = 0.0, list[float](), 0
    for _ in range(10):
        assert reach.take_hosts_to_try(now) == ["a"]
        told += reach.tried("a", now, "refused")
        before = now
        while not (reach.hosts["a"].at <= now):
            now += 0.5
        waits.append(now - before)
    assert told == 1
    assert waits == [min(FIRST_S * 2**number, LONGEST_S) for number in range(10)]
    reach.take_hosts_to_try(now)
    assert reach.connected("a", ready=True)
    reach.mark_disconnected("a", now)
    reach.take_hosts_to_try(now + ITSELF_S)
    assert reach.tried("a", now + ITSELF_S, "refused"), "it had been there: that is news again"


def test_one_that_is_lost_is_tried_at_once() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.take_hosts_to_try(0.0)
    reach.connected("a", ready=True)
    assert reach.mark_disconnected("a", 10.0)
    assert not reach.mark_disconnected("a", 10.0)
    assert reach.take_hosts_to_try(10.0) == ["a"]
    assert not reach.tried("a", 11.0, "")
    assert reach.take_hosts_to_try(11.0) == [], "an agent that is there comes back by itself"
    assert reach.connected("a", ready=True)


def test_where_all_are_lost_they_come_back_by_themselves() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.take_hosts_to_try(0.0)
    reach.connected("a", ready=True)
    reach.mark_disconnected("a", 20.0, with_all=True)
    assert reach.take_hosts_to_try(20.0) == []
    assert reach.take_hosts_to_try(20.0 + ITSELF_S) == ["a"]


def test_one_whose_line_is_gone_is_not_tried_and_may_come_again() -> None:
    reach = Reach()
    reach.update(["a", "b"], 0.0)
    reach.take_hosts_to_try(0.0)
    reach.connected("a", ready=True)
    assert reach.update(["b"], 1.0) == ([], ["a"])
    assert reach.update(["b"], 2.0) == ([], [])
    assert not reach.connected("a", ready=True)
    assert reach.update(["a", "b"], 4.0) == (["a"], [])
    assert reach.hosts["a"].state == "there", "its agent is still there"
    reach.update(["b"], 5.0)
    reach.forget("a")
    assert reach.update(["a", "b"], 6.0) == (["a"], [])
    assert reach.take_hosts_to_try(6.0) == ["a"]


def test_one_that_was_never_there_is_tried_again_when_its_line_is_back() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.take_hosts_to_try(0.0)
    reach.tried("a", 1.0, "refused")
    reach.update([], 2.0)
    reach.update(["a"], 3.0)
    assert reach.take_hosts_to_try(3.0) == ["a"]


def test_one_that_is_being_prepared_is_not_tried() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.take_hosts_to_try(0.0)
    assert not reach.connected("a", ready=False)
    reach.tried("a", 0.1, "")
    assert reach.take_hosts_to_try(1000.0) == []
    assert reach.connected("a", ready=True)


def test_one_that_can_not_be_prepared_is_tried_again_later_and_each_reason_told_once() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    now, told = 0.0, list[bool]()
    for number, reason in enumerate(("no script", "no script", "no data")):
        assert reach.take_hosts_to_try(now) == ["a"]
        reach.connected("a", ready=False)
        told.append(reach.unfit("a", now, reason))
        assert not reach.unfit("a", now, reason), "said again, it is no news"
        reach.mark_disconnected("a", now)
        assert reach.take_hosts_to_try(now + FIRST_S * 2**number - 0.5) == []
        now += FIRST_S * 2**number
    assert told == [True, False, True]
    reach.take_hosts_to_try(now)
    assert reach.connected("a", ready=True)


def test_nothing_is_said_of_hosts_where_the_pool_itself_is_cut_off() -> None:
    reach = Reach()
    reach.update(["a"], 0.0)
    reach.take_hosts_to_try(0.0)
    reach.connected("a", ready=True)
    assert not reach.mark_disconnected("a", 1.0, with_all=True)
    assert not reach.connected("a", ready=True), "it had never gone"
    assert reach.mark_disconnected("a", 2.0)
