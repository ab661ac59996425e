"""The rates of the links between hosts, and which of them are slow. Pure.

A link is one direction from one host to another. Its rate is what the workers of the sender measured: the acknowledged
bytes, by the time in which they were queued or in flight (`collective/link_meter.py` says why that is the rate of the
network, and not of a slow worker). With several connections between two hosts it is the mean rate of one connection.

`LinkHistory` keeps the newest reports of each worker, and computes rates over the last `WINDOW_S` to twice that long.
`slow_links` compares them. A link is slow if all of these hold:

1. Its rate is at most 1/`SLOWER` of a reference. The reference is the median of the links of other pairs of hosts; or
   of the links without this link's sender, or without its receiver, if that is higher. So a host whose links are all
   slow is found too, also among three hosts, where they are the majority of all links. Links with less than
   `LEAST_BYTES` are left out. The way back between the same two hosts is no reference, because it is slowed down as
   well: its acknowledgements wait in the queue of the slow direction. With one way ten times slower than the other, the
   other was measured to be 2.6 times faster. Among two hosts it is all there is, and then `SLOWER_THAN_BACK` counts.
   For the same reason a link is not slow whose way back is, if it is `FASTER_THAN_BACK` times faster than that: it was
   measured at 1.7 MB/s where the way back had 1.25 and the others 18.
2. It was used for at least `LEAST_SENDING` of the time. A faster link is used for less.
3. Somebody waits for it: the receiver's workers waited for the sender's host for at least `LEAST_WAITED` of their time.
   So a delayed acknowledgement, after which nobody waited for bytes, makes no link slow.

A link that is used and waited for (2 and 3) is lossy if at least `LOSSY` of its bytes were sent again, and `SLOWER`
times the reference. A shared bottleneck drops packets of all links, so none of them stands out.

Two hosts whose link is equally slow both ways have no reference: then no link is named, and its rate is in `links`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from farandole.protocol.values import LinkUse

MICRO = 1_000_000
WINDOW_S = 20.0
SLOWER, SLOWER_THAN_BACK, FASTER_THAN_BACK = 10.0, 2.0, 1.25  # times
LOSSY = 0.005  # part of the bytes
LEAST_BYTES = 1_000_000
LEAST_SENDING = 0.05  # part of the time
LEAST_WAITED = 0.02  # part of the time


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the link from host `source` to host `target` in the last `seconds`, over all their connections.

    Attributes:
        sent_bytes: acknowledged bytes.
        bytes_per_s: the rate while it sent, None if it sent nothing.
        sending: the part of the time in which the busiest worker sent on it.
        resent: the part of its bytes that were sent again.
        rtt_ms: the newest round-trip time in milliseconds, None if unknown.
        waited: the part of its time for which the receiver's worker that waited longest waited for `source`.
        saved: the part of the bytes of rounds that compression saved.
    """

    source: str
    target: str
    seconds: float
    sent_bytes: int
    bytes_per_s: float | None
    sending: float
    resent: float
    rtt_ms: float | None
    waited: float
    saved: float = 0.0


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that is slow, and the median of the others. `is_lossy`: it is named for its losses, not for its rate."""

    link: LinkSpeed
    others_bytes_per_s: float
    others_resent: float
    is_lossy: bool


def slow_links(links: Sequence[LinkSpeed]) -> tuple[SlowLink, ...]:
    """Return the slow and lossy links, the slowest first."""
    measured = [link for link in links if link.bytes_per_s is not None and link.sent_bytes >= LEAST_BYTES]
    slow: list[SlowLink] = []
    for link in measured:
        if link.sending < LEAST_SENDING or link.waited < LEAST_WAITED:
            continue
        others = [each for each in measured if {each.source, each.target} != {link.source, link.target}]
        slower = SLOWER if others else SLOWER_THAN_BACK
        others = others or [each for each in measured if each is not link]
        if not others:
            continue
        rate = max(_medians(link, others, _rate))
        resent = min(_medians(link, others, lambda each: each.resent))
        is_slow = _rate(link) * slower <= rate
        is_lossy = link.resent >= max(LOSSY, resent * SLOWER)
        if is_slow or is_lossy:
            slow.append(
                SlowLink(link=link, others_bytes_per_s=rate, others_resent=resent, is_lossy=is_lossy and not is_slow)
            )
    rates = {(each.link.source, each.link.target): _rate(each.link) for each in slow if not each.is_lossy}

    def is_slowed_down(each: SlowLink) -> bool:
        back = rates.get((each.link.target, each.link.source))
        return back is not None and not each.is_lossy and _rate(each.link) > FASTER_THAN_BACK * back

    slow = [each for each in slow if not is_slowed_down(each)]
    return tuple(sorted(slow, key=lambda each: (_rate(each.link), each.link.source, each.link.target)))


def _rate(link: LinkSpeed) -> float:
    return link.bytes_per_s or 0.0


def _medians(link: LinkSpeed, others: Sequence[LinkSpeed], value: Callable[[LinkSpeed], float]) -> list[float]:
    """Return the medians of the others, and of those without the sender and without the receiver, if there are any."""
    groups = (
        others,
        [each for each in others if link.source not in (each.source, each.target)],
        [each for each in others if link.target not in (each.source, each.target)],
    )
    return [statistics.median(map(value, group)) for group in groups if group]


# --- history ----------------------------------------------------------------------------------------------------------


@dataclass
class _Reports:
    """The reports of one worker, in which the sums only grow: an old one, one that follows it, and the newest."""

    host: str
    old: tuple[float, dict[str, LinkUse]]
    next: tuple[float, dict[str, LinkUse]]
    newest: tuple[float, dict[str, LinkUse]]


class LinkHistory:
    """The reports of all workers that tell the recent rates of the links. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._workers: dict[str, _Reports] = {}

    def take(self, worker: str, host: str, links: Iterable[LinkUse], now: float) -> None:
        """Record what `worker` on `host` reports at `now`."""
        report = now, {use.host: use for use in links}
        kept = self._workers.get(worker)
        if kept is None or kept.host != host or now < kept.newest[0]:
            self._workers[worker] = _Reports(host, report, report, report)
            return
        kept.newest = report
        if now - kept.next[0] >= WINDOW_S:
            kept.old, kept.next = kept.next, report

    def forget(self, worker: str) -> None:
        """Drop the reports of a worker that is gone."""
        self._workers.pop(worker, None)

    def links(self) -> tuple[LinkSpeed, ...]:
        """Return the recent use of each link, by the names of its hosts."""
        used: dict[tuple[str, str], list[tuple[float, LinkUse, LinkUse]]] = {}
        waited: dict[tuple[str, str], float] = {}
        for reports in self._workers.values():
            (began, old), (ended, newest) = reports.old, reports.newest
            for host, use in newest.items():
                if ended > began:
                    before = old.get(host, LinkUse(host=host))
                    used.setdefault((reports.host, host), []).append((ended - began, before, use))
                    part = (use.waited_us - before.waited_us) / MICRO / (ended - began)
                    link = host, reports.host
                    waited[link] = max(waited.get(link, 0.0), part)
        return tuple(_speed(*pair, used[pair], waited.get(pair, 0.0)) for pair in sorted(used))


def _speed(source: str, target: str, uses: Sequence[tuple[float, LinkUse, LinkUse]], waited: float) -> LinkSpeed:
    """`uses`: for each worker of `source` the seconds, its use of the link before and after."""
    acknowledged = sum(max(0, new.acknowledged_bytes - old.acknowledged_bytes) for _, old, new in uses)
    resent = sum(max(0, new.resent_bytes - old.resent_bytes) for _, old, new in uses)
    sending_s = [max(0, new.sending_us - old.sending_us) / MICRO for _, old, new in uses]
    rtt_us = max(new.rtt_us for _, _, new in uses)
    saved = sum(max(0, new.saved_bytes - old.saved_bytes) for _, old, new in uses)
    exchanged = sum(max(0, new.exchange_bytes - old.exchange_bytes) for _, old, new in uses)
    return LinkSpeed(
        source=source, target=target, seconds=max(seconds for seconds, _, _ in uses), sent_bytes=acknowledged,
        bytes_per_s=acknowledged / sum(sending_s) if acknowledged and sum(sending_s) else None,
        sending=min(1.0, max(each / seconds for each, (seconds, _, _) in zip(sending_s, uses, strict=True))),
        resent=resent / acknowledged if acknowledged else 0.0,
        rtt_ms=rtt_us / 1000 if rtt_us else None, waited=min(1.0, max(0.0, waited)),
        saved=saved / (saved + exchanged) if saved else 0.0,
    )  # fmt: skip
