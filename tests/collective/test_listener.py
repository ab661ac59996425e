"""Who gets in at a listener: real sockets, the kernel's filter, Gloo's device, strangers in other processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from farandole.collective.gloo import PeerListener, Rendezvous, Socket, introductions, only, own_sockets
from tests.support.linking import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")

STRANGE = """
import socket, struct, sys
held = []
for _ in range(int(sys.argv[3])):
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    connection.send(struct.pack("<Q", len(held) % 4))
    held.append(connection)
print("connected", flush=True)
sys.stdin.read()
"""


def make() -> Any:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


@contextmanager
def strangers(end: str, count: int) -> Iterator[None]:
    """Another process that has so many connections there, as far as it can tell, and has said pairs' numbers."""
    command = [sys.executable, "-c", STRANGE, *end.split(" "), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "connected\n"
        yield
        process.stdin.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def of(python_socket: socket.socket) -> Socket:
    return Socket(python_socket.fileno())


def end(python_socket: socket.socket) -> str:
    return of(python_socket).near()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_who_is_named_gets_in_and_stays_when_the_door_is_shut(family: int, address: str) -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((address, 0), family=family))
        of(listening).attach(only(()))
        listening.settimeout(0.3)
        named, other = (stack.enter_context(socket.create_connection(listening.getsockname()[:2])) for _ in range(2))
        for connection in (named, other):
            connection.sendall(b"before")  # to nobody: the kernel keeps it
        with pytest.raises(TimeoutError):
            listening.accept()
        neighbours = [end(named).rpartition(" ")[0] + f" {port}" for port in range(20000, 20200)]
        of(listening).attach(only([*neighbours, "192.0.2.1 80", "2001:db8::1 80", end(named)]))
        listening.settimeout(10)
        inside, who = listening.accept()
        stack.enter_context(inside)
        assert who[:2] == named.getsockname()[:2]
        of(listening).attach(only(()))
        assert inside.recv(6) == b"before"
        named.sendall(b"after")
        inside.settimeout(5)
        assert inside.recv(5) == b"after", "what it inherited lets its own packets pass"
        of(inside).detach()
        named.sendall(b"later")
        assert inside.recv(5) == b"later"
        listening.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listening.accept()


@pytest.mark.parametrize("rubbish", ["", "127.0.0.1", "127.0.0.1 0", "127.0.0.1 65536", "here 80", "127.0.0.1 x"])
def test_what_is_no_end_is_not_let_in(rubbish: str) -> None:
    with pytest.raises(ValueError, match=r"port|address|base 10"):
        only([rubbish])


def test_strangers_cost_no_descriptor_and_take_no_place() -> None:
    listener = PeerListener(make, "127.0.0.1")
    before = descriptors()
    with strangers(listener.end, 300):
        assert descriptors() - before < 10, "those of the process that connects"
        assert not [own for own in own_sockets() if own.near() == listener.end and own.far()]
    listener.shut()


@pytest.mark.failure(
    "External workers, pools and machines",
    "a machine in the network answers instead of a worker, or a user of this machine connects to every new port first",
)
def test_a_listener_at_which_somebody_was_first_is_given_up() -> None:
    ends: list[str] = []
    before = descriptors()
    with ExitStack() as stack:

        def too_late() -> Any:
            known = {own.near() for own in own_sockets() if own.listens()}
            device = make()
            ends.extend(own.near() for own in own_sockets() if own.listens() and own.near() not in known)
            if len(ends) < 3:
                stack.enter_context(strangers(ends[-1], 5))
            return device

        listener = PeerListener(too_late, "127.0.0.1")
        assert len(ends) == 3
        assert listener.end == ends[-1]
        assert not [own for own in own_sockets() if own.near() in ends[:2]], "with all that it had accepted"
        listener.shut()
        del listener
    assert descriptors() == before


def test_a_listener_of_the_script_is_not_taken_for_ours() -> None:
    made: list[socket.socket] = []

    def meanwhile() -> Any:
        if not made:
            made.append(socket.create_server(("127.0.0.1", 0)))
        return make()

    listener = PeerListener(meanwhile, "127.0.0.1")
    with made[0], socket.create_connection(made[0].getsockname(), 5):
        made[0].settimeout(5)
        made[0].accept()[0].close()
    listener.shut()


def test_a_group_comes_about_while_strangers_are_at_every_listener_and_then_nobody_gets_in() -> None:
    """Members of three; each listener is crowded before its peers connect."""
    before = descriptors()
    with ExitStack() as stack:
        ends: list[str] = []
        lock = threading.Lock()
        make_one = Rendezvous.set

        def crowded(self: Rendezvous, key: str, value: str | bytes) -> None:
            if key.startswith("at "):
                with lock:
                    stack.enter_context(strangers(str(value), 40))
                    ends.append(str(value))
            make_one(self, key, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rendezvous, "set", crowded)
            groups = connect(["a", "b", "c"])
        own = [(own.near(), own.far()) for own in own_sockets()]
        assert len([near for near, far in own if near in ends and far]) == 3, "one for each pair"
        for listening in ends:
            host, port = listening.split(" ")
            with pytest.raises(TimeoutError):
                socket.create_connection((host, int(port)), 0.3)
        del groups
    assert descriptors() == before


def test_who_does_not_say_where_it_listens_is_waited_for_and_then_nobody_is_left_at_the_door() -> None:
    store = Rendezvous(lambda *_: None)
    listener = PeerListener(make, "127.0.0.1")
    threading.Timer(0.2, store.close).start()
    with pytest.raises(RuntimeError, match="rendezvous"), introductions(listener, "a", ("a", "b"), store):
        pass
    assert listener.device is None
