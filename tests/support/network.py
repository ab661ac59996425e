"""Two machines for a test: network namespaces of this process's own, joined by a cable. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
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
