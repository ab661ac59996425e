"""A pair's end takes whatever comes over its connection for a message, or gives the peer up."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farandole.collective.arena import Arena
from farandole.collective.shm import HEAD, INLINE, LENT, LONG, SEGMENT, Pair
from farandole.collective.transport import PeerLost, ReceiveBuffer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SOCK_SEQPACKET, memfd_create(2)")

TAG = 5
ARENA = Arena() if sys.platform == "linux" else None
NUMBERS = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 4, 8, 4096, 64 << 20, 1 << 40, 1 << 63])
HEADS = st.builds(
    lambda kind, dtype, segment, offset, size, body: HEAD.pack(kind, dtype, TAG, segment, offset, size) + body,
    st.integers(0, 5), st.integers(0, 15), st.integers(0, 2), NUMBERS, NUMBERS, st.binary(max_size=40),
)  # fmt: skip


def ends() -> tuple[socket.socket, Pair]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert ARENA is not None
    return far, Pair("peer", near, ARENA)


@settings(deadline=None, max_examples=300)
@given(st.lists(HEADS | st.binary(min_size=1, max_size=80), max_size=4), st.booleans())
@example([HEAD.pack(LONG, 0, TAG, 0, 0, 1 << 40)], False)
@example([HEAD.pack(INLINE, 0, TAG, 0, 0, 3) + b"four"], False)
@example([HEAD.pack(SEGMENT, 0, 0, 0, 0, 4096), HEAD.pack(LENT, 0, TAG, 0, 0, 8)], True)
def test_any_packets_are_a_message_or_cost_the_peer(packets: list[bytes], file: bool) -> None:
    far, pair = ends()
    borrowing = pair.receive(ReceiveBuffer.of(torch.zeros(1, dtype=torch.float64)), TAG, borrows=True)
    with far, suppress(PeerLost):
        for packet in packets:
            if file:
                socket.send_fds(far, [packet], [far.fileno()])
            else:
                far.send(packet)
        far.shutdown(socket.SHUT_WR)
        assert borrowing.wait().shape == (1,)


def test_files_that_come_with_other_packets_are_not_kept() -> None:
    far, pair = ends()
    before = len(os.listdir("/proc/self/fd"))
    with far:
        for _ in range(8):
            receiving = pair.receive(ReceiveBuffer.of(torch.zeros(1, dtype=torch.float64)), TAG)
            socket.send_fds(far, [HEAD.pack(INLINE, 8, TAG, 0, 0, 8) + struct.pack("d", 2.5)], [far.fileno()])
            receiving.wait()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_process_holds_no_end_of_it_open() -> None:
    far, pair = ends()
    child = os.fork()
    if child == 0:
        try:
            pair.connection.getpeername()
        except OSError:
            os._exit(0)
        os._exit(1)
    with far:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pair.close()
        assert far.recv(1) == b""


def test_what_was_sent_before_it_was_closed_is_read_and_then_the_end() -> None:
    far, pair = ends()
    assert ARENA is not None
    other = Pair("other", far, ARENA)
    sent, room, nothing = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64), torch.zeros(1)
    pair.send(sent, TAG)  # more than the socket takes at once
    pair.close()
    first, second = other.receive(ReceiveBuffer.of(room), TAG), other.receive(ReceiveBuffer.of(nothing), TAG)
    first.wait()
    assert room.equal(sent)
    with pytest.raises(PeerLost) as caught:
        second.wait()
    assert caught.value.peer == "other"
