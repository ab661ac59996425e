"""How workers of one host come to share memory, and what keeps two from it: then the other transport is taken."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from farandole.collective import shm
from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.gloo import Rendezvous
from farandole.collective.shm import Meeting
from farandole.platform import output
from farandole.protocol.view import View
from tests.support.exchanging import DEADLINE_S, until
from tests.support.linking import by_host, rendezvous

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets, memfd_create(2)")

NAMES = ("a", "b", "c")
VIEW = View(number=1, members=NAMES, group=1)


def shared(memory: list[Memory] | None = None, view: View = VIEW) -> set[str]:
    """The pairs that share memory, and that messages get through between all."""
    links = by_host(view, memory or [Arena() for _ in NAMES], ["127.0.0.9"] * 3)
    pairs = [(x, y) for x in range(3) for y in range(3) if x != y]
    rooms = {pair: torch.zeros(3) for pair in pairs}
    receives = [links[y].receive(rooms[x, y], NAMES[x], 4) for x, y in pairs]
    sends = [links[x].send(torch.full((3,), 10.0 * x + y), NAMES[y], 4) for x, y in pairs]
    for pending in (*receives, *sends):
        pending.wait()
    assert all(bool((room == 10 * x + y).all()) for (x, y), room in rooms.items())
    found = {NAMES[x] + NAMES[y] for x, y in pairs if links[x].shares(NAMES[y])}
    assert found == {NAMES[x] + NAMES[y] for x, y in pairs if links[y].shares(NAMES[x])}, "both ends agree"
    for each in links:
        each.close()
    return found


@pytest.fixture(autouse=True)
def tells_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_warned", set())


def test_all_of_one_host_do_and_nothing_is_left_of_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    draw = shm.secrets.token_hex
    monkeypatch.setattr(shm.secrets, "token_hex", lambda size: names.append(draw(size)) or names[-1])
    assert shared() == {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert len(names) == 3
    until(lambda: not any(name in Path("/proc/net/unix").read_text() for name in names))


def test_those_of_another_host_do_not() -> None:
    assert shared(view=View(number=1, members=NAMES, group=1, hosts=("x", "y", "x"))) == {"ac", "ca"}


def test_who_has_none_to_share_exchanges_over_the_network() -> None:
    assert shared([Arena(), Ordinary(), Arena()]) == {"ac", "ca"}


def test_the_same_name_on_another_machine_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter("123456789")
    monkeypatch.setattr(shm, "boot_id", lambda: next(boots))
    assert shared() == set()


def test_a_machine_that_has_the_boot_id_of_another_has_no_such_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = iter(range(100))
    monkeypatch.setattr(shm.socket.socket, "bind", lambda self, _: _bind(self, f"\0elsewhere-{next(names)}"))
    assert shared() == set()
    assert any(f"[Errno {errno.ECONNREFUSED}]" in message for message in caplog.messages)


_bind: Callable[[socket.socket, str], None] = socket.socket.bind


@pytest.mark.failure(
    "External workers, pools and machines",
    "workers of one host can't share memory (a limit of file sizes, containers, two users)",
)
def test_another_users_process_is_sent_away(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shm, "_user", lambda _: os.getuid() + 1)
    assert shared() == set()
    assert caplog.messages
    assert not any("[Errno" in message for message in caplog.messages), "it is there, and would have answered"


def test_who_reads_something_else_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two kernels that hand over files and share no memory, as far as they can be played here."""
    monkeypatch.setattr(shm, "_PLACE", _Elsewhere("<IQ"))
    assert shared() == set()
    assert caplog.messages


class _Elsewhere(shm.struct.Struct):
    def unpack(self, packed: bytes) -> tuple[int, int]:  # type: ignore[override]
        number, offset = super().unpack(packed)
        return number, offset + 512


def test_who_does_not_hold_the_key_is_not_taken_and_keeps_nobody_waiting() -> None:
    """It connects first, under a member's name."""
    stores = rendezvous(NAMES)
    meetings = {
        name: Meeting(VIEW, name, NAMES, stores[name], b"key" if name != "b" else b"another", Arena()) for name in NAMES
    }
    with ThreadPoolExecutor(3) as pool:
        held = {name: pool.submit(meeting.hold) for name, meeting in meetings.items()}
        found = {name: set(future.result(DEADLINE_S)) for name, future in held.items()}
    assert found == {"a": {"c"}, "b": set(), "c": {"a"}}


def test_a_stranger_that_connects_and_says_nothing_keeps_nobody_waiting() -> None:
    stores = rendezvous(NAMES)
    a = Meeting(VIEW, "a", NAMES, stores["a"], b"key", Arena())
    with ThreadPoolExecutor(3) as pool:
        meeting = pool.submit(a.hold)
        until(lambda: "" in stores["b"].said("host a"))
        place = stores["b"].said("host a")[""].decode().split()[-1]
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        for stranger in strangers:
            stranger.connect(f"\0farandole-{place}")
        others = [pool.submit(Meeting(VIEW, n, NAMES, stores[n], b"key", Arena()).hold) for n in ("b", "c")]
        assert set(meeting.result(DEADLINE_S)) == {"b", "c"}
        assert [set(other.result(DEADLINE_S)) for other in others] == [{"a", "c"}, {"a", "b"}]
        for stranger in strangers:
            stranger.close()


def test_a_view_that_is_given_up_meanwhile_is_an_error() -> None:
    stores: dict[str, Rendezvous] = rendezvous(NAMES)
    meeting = Meeting(VIEW, "a", NAMES, stores["a"], b"key", Arena())
    raised: list[BaseException] = []

    def hold() -> None:
        try:
            meeting.hold()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    stores["a"].close()
    thread.join(DEADLINE_S)
    assert len(raised) == 1
