"""Which links are slow, and the rates that follow from what workers report."""

from __future__ import annotations

from itertools import permutations

import pytest

from farandole.protocol.link_speed import (
    LEAST_BYTES,
    LEAST_SENDING,
    LEAST_WAITED,
    LOSSY,
    SLOWER,
    SLOWER_THAN_BACK,
    WINDOW_S,
    LinkHistory,
    LinkSpeed,
    slow_links,
)
from farandole.protocol.values import LinkUse

MB = 1_000_000


def link(
    source: str, target: str, rate: float | None = 100.0 * MB, *, resent: float = 0.0, waited: float = 0.5,
    sending: float = 0.5, sent: int = 50 * MB,
) -> LinkSpeed:  # fmt: skip
    return LinkSpeed(
        source=source, target=target, seconds=20.0, sent_bytes=sent, bytes_per_s=rate, sending=sending, resent=resent,
        rtt_ms=1.0, waited=waited,
    )  # fmt: skip


def mesh(hosts: str, *others: LinkSpeed) -> list[LinkSpeed]:
    """All links between `hosts`, equal but for `others`."""
    given = {(each.source, each.target): each for each in others}
    return [given.get(pair, link(*pair)) for pair in permutations(hosts, 2)]


def named(links: list[LinkSpeed]) -> list[tuple[str, str, bool]]:
    return [(each.link.source, each.link.target, each.is_lossy) for each in slow_links(links)]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (mesh("abc"), []),
        (mesh("abc", link("a", "b", 10 * MB)), ["ab"]),  # one way
        (mesh("abc", link("a", "b", 10 * MB + 1)), []),  # not SLOWER times
        (mesh("abc", link("a", "b", 10 * MB), link("b", "a", 30 * MB)), ["ab"]),  # acknowledgements that are late
        (mesh("abc", link("a", "b", 5 * MB), link("b", "a", 6 * MB)), ["ab", "ba"]),  # both ways, the slowest first
        (mesh("abc", link("a", "b", 5 * MB), link("b", "a", 7 * MB)), ["ab"]),  # the way back is slowed down by it
        (mesh("abc", link("a", "b", 9 * MB), link("a", "c", 9 * MB)), ["ab", "ac"]),  # what a host sends
        (mesh("abc", *(link(*p, 9 * MB) for p in ("ab", "ac", "ba", "ca"))), ["ab", "ac", "ba", "ca"]),  # all of a host
        (mesh("abcd", *(link(*p, 9 * MB) for p in ("ac", "bc", "dc"))), ["ac", "bc", "dc"]),  # what it receives
        (mesh("abcdefgh", link("a", "b", 1 * MB)), ["ab"]),
        (mesh("ab"), []),
        (mesh("ab", link("a", "b", 50 * MB)), ["ab"]),  # beside the way back
        (mesh("ab", link("a", "b", 51 * MB)), []),
        (mesh("ab", link("a", "b", 1 * MB), link("b", "a", 1 * MB)), []),  # nothing to compare with
        ([link("a", "b", 1 * MB)], []),
        ([], []),
    ],
)  # fmt: skip
def test_a_link_is_slow_beside_those_of_other_hosts(links: list[LinkSpeed], expected: list[str]) -> None:
    assert named(links) == [(*pair, False) for pair in expected]


@pytest.mark.parametrize(
    ("changed", "is_named"),
    [
        ({}, True),
        ({"waited": LEAST_WAITED}, True),
        ({"waited": LEAST_WAITED / 2}, False),  # nobody waits for it
        ({"sending": LEAST_SENDING / 2}, False),  # hardly used
        ({"sent": LEAST_BYTES}, True),
        ({"sent": LEAST_BYTES - 1}, False),
        ({"rate": None, "sent": 0}, False),  # unknown
    ],
)
def test_a_slow_link_is_used_and_waited_for(changed: dict[str, float], is_named: bool) -> None:
    figures: dict[str, object] = {"rate": 1.0 * MB, **changed}
    assert bool(named(mesh("abc", link("a", "b", **figures)))) == is_named  # type: ignore[arg-type]


def test_a_fast_link_that_takes_little_time_is_a_reference() -> None:
    others = [link(*pair, sending=0.001, waited=0.0) for pair in ("ac", "bc", "ca", "cb", "ba")]
    assert named([link("a", "b", 1 * MB), *others]) == [("a", "b", False)]


def test_a_slow_worker_makes_no_link_slow() -> None:
    """Its peers wait for it nearly always, and it sends seldom, at the rate of the others."""
    slow = [link("a", target, waited=0.95, sending=0.06) for target in "bc"]
    assert named(mesh("abc", *slow)) == []


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (mesh("abc", link("a", "b", 60 * MB, resent=0.01)), [("a", "b", True)]),
        (mesh("abc", link("a", "b", 60 * MB, resent=LOSSY / 2)), []),
        (mesh("abc", link("a", "b", 5 * MB, resent=0.01)), [("a", "b", False)]),  # slow says more
        (mesh("abc", link("a", "b", resent=0.01, waited=0.0)), []),
        ([link(*pair, resent=0.01) for pair in permutations("abc", 2)], []),  # all alike
        (mesh("ab", link("a", "b", resent=0.01)), [("a", "b", True)]),
    ],
)  # fmt: skip
def test_a_lossy_link_is_one_that_loses_more_than_others(
    links: list[LinkSpeed], expected: list[tuple[str, str, bool]]
) -> None:
    assert named(links) == expected


def test_it_is_shown_beside_the_median_of_the_others() -> None:
    (slow,) = slow_links(mesh("abc", link("a", "b", 2 * MB, resent=0.02), link("b", "a", 30 * MB)))
    assert (slow.others_bytes_per_s, slow.others_resent) == (100.0 * MB, 0.0)
    (slow,) = slow_links(mesh("ab", link("a", "b", 2 * MB)))
    assert slow.others_bytes_per_s == 100.0 * MB
    assert SLOWER > SLOWER_THAN_BACK > 1


# --- history ----------------------------------------------------------------------------------------------------------


def use(host: str, sent: int, sending_us: int, **others: int) -> LinkUse:
    return LinkUse(host=host, acknowledged_bytes=sent, sending_us=sending_us, **others)


def test_rates_follow_from_two_reports() -> None:
    history = LinkHistory()
    history.take("w1", "a", [use("b", 7 * MB, 100_000, waited_us=1_000_000, exchange_bytes=MB, saved_bytes=MB)], 10.0)
    assert history.links() == (), "one report is no rate"
    history.take("w2", "b", [use("a", 0, 0)], 10.0)
    newest = use(
        "b", 27 * MB, 2_100_000, resent_bytes=MB, rtt_us=1500, waited_us=2_000_000, exchange_bytes=4 * MB,
        saved_bytes=2 * MB,
    )  # fmt: skip
    history.take("w1", "a", [newest], 14.0)
    history.take("w2", "b", [use("a", 0, 0, waited_us=3_000_000)], 14.0)
    there, back = history.links()
    assert there == LinkSpeed(
        source="a", target="b", seconds=4.0, sent_bytes=20 * MB, bytes_per_s=10.0 * MB, sending=0.5, resent=0.05,
        rtt_ms=1.5, waited=0.75, saved=0.25,
    )  # fmt: skip
    assert back.saved == 0.0
    assert (back.source, back.target, back.bytes_per_s, back.rtt_ms, back.waited) == ("b", "a", None, None, 0.25)


def test_workers_of_one_host_are_added_up() -> None:
    history = LinkHistory()
    for now, part in ((0.0, 0), (10.0, 1)):
        history.take("w1", "a", [use("b", part * 30 * MB, part * 2_000_000)], now)
        history.take("w2", "a", [use("b", part * 10 * MB, part * 6_000_000)], now)
    (only,) = history.links()
    assert (only.bytes_per_s, only.sending, only.sent_bytes) == (5.0 * MB, 0.6, 40 * MB)


def test_old_reports_are_dropped() -> None:
    """A link that was fast, and has been slow for two windows, is slow."""
    history, sent, now = LinkHistory(), 0, 0.0
    for rate, until in ((100 * MB, 100.0), (MB, 100.0 + 2 * WINDOW_S + 1)):
        while now < until:
            now, sent = now + 1.0, sent + rate
            history.take("w1", "a", [use("b", sent, round(1e6 * now))], now)
    (only,) = history.links()
    assert only.bytes_per_s == pytest.approx(MB)
    assert WINDOW_S <= only.seconds <= 2 * WINDOW_S


def test_a_worker_that_is_gone_or_another_of_its_name_begins_anew() -> None:
    history = LinkHistory()
    history.take("w1", "a", [use("b", 50 * MB, 1_000_000)], 0.0)
    history.forget("w1")
    history.take("w1", "c", [use("b", MB, 1_000_000)], 5.0)
    assert history.links() == ()
    history.take("w1", "d", [use("b", 2 * MB, 2_000_000)], 6.0)
    assert history.links() == ()
