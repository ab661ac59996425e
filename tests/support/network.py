"""Two machines for a test: network namespaces of this process's own, joined by a cable. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import combinations, permutations
from types import TracebackType

AVAILABLE = os.geteuid() == 0 and shutil.which("ip") is not None
WHY_NOT = "network namespaces need root and iproute2"


class Machines:
    """`here` and `there`, each a namespace and its address on the cable; gone with the context."""

    def __init__(self) -> None:
        self.names = [f"farandole-{os.getpid()}-{side}" for side in ("a", "b")]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def __enter__(self) -> Machines:
        for name in self.names:
            ip("netns", "add", name)
        a, b = self.names
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address, other in zip(self.names, self.addresses, reversed(self.addresses), strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "route", "add", "default", "via", other)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def on(self, number: int) -> list[str]:
        """What to put before a command."""
        return ["ip", "netns", "exec", self.names[number]]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Switched:
    """Some machines at one switch, each a namespace with an address there; gone with the context."""

    def __init__(self, count: int) -> None:
        self.names = [f"farandole-{os.getpid()}-{number}" for number in range(count)]
        self.addresses = [f"10.78.0.{number + 1}" for number in range(count)]
        self.switch = f"farandole-{os.getpid()}-switch"

    def __enter__(self) -> Switched:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{number}"
            ip("netns", "add", name)
            ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", self.switch, "link", "set", port, "master", "switch")
            ip("-n", self.switch, "link", "set", port, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.names, self.switch):
            ip("netns", "del", name)

    def unplug(self, number: int) -> None:
        """Nothing gets to that machine or from it any more; its processes know nothing of it."""
        ip("-n", self.switch, "link", "set", f"port{number}", "down")

    def on(self, number: int) -> list[str]:
        """What to put before a command."""
        return ["ip", "netns", "exec", self.names[number]]


class Mesh:
    """Some machines with a cable between each two, so that each direction has a rate; gone with the context."""

    def __init__(self, count: int) -> None:
        self.names = [f"farandole-{os.getpid()}-{number}" for number in range(count)]
        self.addresses = [f"10.79.0.{number + 1}" for number in range(count)]

    def __enter__(self) -> Mesh:
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/32", "dev", "lo")
        for a, b in combinations(range(len(self.names)), 2):
            peer = ("peer", "name", f"to{a}", "netns", self.names[b])
            ip("link", "add", f"to{b}", "netns", self.names[a], "type", "veth", *peer)
            for here, there in ((a, b), (b, a)):
                ip("-n", self.names[here], "link", "set", f"to{there}", "up")
        for a, b in permutations(range(len(self.names)), 2):
            route = (self.addresses[b], "dev", f"to{b}", "src", self.addresses[a])
            ip("-n", self.names[a], "route", "add", *route)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def limit(self, here: int, there: int, mbit: int) -> None:
        """Packets from one machine to the other are sent at this rate from now on."""
        rate = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms"]
        command = [*self.on(here), "tc", "qdisc", "replace", "dev", f"to{there}", "root", *rate]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def on(self, number: int) -> list[str]:
        """What to put before a command."""
        return ["ip", "netns", "exec", self.names[number]]
