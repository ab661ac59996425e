"""What a worker counts of its sends to other hosts, and what it reads of its connections."""

from __future__ import annotations

import struct

import pytest
import torch

from farandole.collective.compression import Compressed
from farandole.collective.fake import Fake, FakeLinks, FakeNetwork
from farandole.collective.link_meter import LinkMeter, Metered, Transfer, transfer_of
from farandole.collective.schedule import COMMIT, OTHER, PARTIAL, REDUCED, STATE, kind_of, of_round, place
from farandole.protocol.values import LinkUse
from farandole.protocol.view import View


def info(acknowledged: int, busy_us: int, full_us: int = 0, resent: int = 0, rtt_us: int = 0, size: int = 232) -> bytes:
    """A `struct tcp_info` as Linux 6 lays it out."""
    packed = bytearray(232)
    struct.pack_into("=I", packed, 68, rtt_us)
    struct.pack_into("=Q", packed, 120, acknowledged)
    struct.pack_into("=QQ", packed, 168, busy_us, full_us)
    struct.pack_into("=Q", packed, 208, resent)
    return bytes(packed[:size])


class Wire:
    """A connection whose kernel says `info`."""

    def __init__(self, info: bytes) -> None:
        self.info = info
        self.port = 1

    def near(self) -> str:
        return f"10.0.0.1 {self.port}"

    def far(self) -> str:
        return "10.0.0.2 5"

    def tcp_info(self) -> bytes:
        return self.info


VIEW = View(number=1, members=("w1",), group=1)  # of the fake network: nobody to meet
HOSTS = {"w2": "b", "w3": "b", "w4": "c"}


def metered(meter: LinkMeter, **wires: Wire) -> Metered:
    links: FakeLinks = Fake(FakeNetwork()).connect(VIEW, "w1")
    return meter.metered(links, HOSTS, lambda peer: [wires[peer]] if peer in wires else [])


def tag(kind: int) -> int:
    return of_round(View(number=300, members=("w1",), group=1), 3, OTHER) | place(kind, 255, 511)


def floats(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.float32)


@pytest.mark.parametrize("kind", [PARTIAL, REDUCED, COMMIT, STATE])
def test_a_tag_has_its_kind(kind: int) -> None:
    assert kind_of(tag(kind)) == kind


def test_what_is_sent_is_counted_by_host() -> None:
    meter = LinkMeter()
    links = metered(meter)
    links.send(floats(10), "w2", tag(COMMIT))
    links.lend(floats(100), "w3", tag(PARTIAL))
    links.lend(floats(7), "w4", tag(REDUCED))
    links.send(floats(1000), "w2", tag(STATE))
    links.send(floats(5), "w9", tag(PARTIAL))  # on this host
    links.receive(floats(50), "w2", tag(PARTIAL))
    expected = (LinkUse(host="b", exchange_bytes=440, state_bytes=4000), LinkUse(host="c", exchange_bytes=28))
    assert meter.said({}) == expected
    assert meter.said({}) == expected, "a look changes nothing"


def test_it_is_counted_after_compression() -> None:
    meter = LinkMeter()
    Compressed(metered(meter), torch.float32).lend(floats(100_000), "w2", tag(PARTIAL))._sending.result()  # type: ignore[attr-defined]
    (use,) = meter.said({})
    assert 0 < use.exchange_bytes < 0.9 * 400_000


def test_the_sums_go_on_over_groups() -> None:
    meter = LinkMeter()
    first = metered(meter, w2=Wire(info(100, 50, rtt_us=9)), w4=Wire(info(1, 1)))
    first.send(floats(1), "w2", tag(PARTIAL))
    second = metered(meter, w2=Wire(info(1000, 500, resent=3, rtt_us=4)), w3=Wire(info(10, 5)))
    second.send(floats(1), "w2", tag(PARTIAL))
    for _ in range(2):
        b, c = meter.said({})
        assert (b.exchange_bytes, b.acknowledged_bytes, b.sending_us, b.resent_bytes) == (8, 1110, 555, 3)
        assert c.acknowledged_bytes == 1
        first.close()
    assert b.rtt_us == 4, "of an open connection"


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    meter, wire = LinkMeter(), Wire(info(100, 50))
    links = metered(meter, w2=wire)
    assert meter.said({})[0].acknowledged_bytes == 100
    wire.port, wire.info = 2, info(7_000_000, 9)
    assert meter.said({})[0].acknowledged_bytes == 100
    links.close()
    assert meter.said({})[0].acknowledged_bytes == 100


def test_waits_are_added_up_by_host() -> None:
    meter = LinkMeter()
    metered(meter)
    b, c = meter.said({"w2": 1_500_000, "w3": 500_000, "w4": 1000, "w9": 10**9})
    assert (b.host, b.waited_us, c.host, c.waited_us) == ("b", 2000, "c", 1)


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (info(10, 500, 100, 7, 1500), Transfer(10, 400, 7, 1500)),
        (info(10, 100, 500), Transfer(10, 0, 0, 0)),  # read at two moments
        (info(10, 500, 100, 7, 1500, size=192), Transfer(10, 400, 0, 1500)),  # before Linux 4.19
        (info(10, 500, 100, 7, 1500, size=104), Transfer()),  # before Linux 4.10
        (b"", Transfer()),
    ],
)
def test_a_receiver_that_does_not_read_is_no_slow_link(packed: bytes, expected: Transfer) -> None:
    assert transfer_of(packed) == expected
