"""When a host of a hosts file is to be reached, to start its agent there: pure; times are the caller's, in seconds.

    absent     its agent is not connected: it is tried, at once and then later and later
    trying     somebody is on the way to it
    joined     its agent is connected
    leaving    its line is gone: its workers leave, then its agent ends

An agent whose connection breaks comes back by itself, if it can: so it has `ITSELF_S` before the host is tried. A host
that can't be reached is idle until it is back; that ends nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ITSELF_S = 3.0
FIRST_S, LONGEST_S = 1.0, 60.0


@dataclass(kw_only=True)
class Reached:
    state: str = "absent"
    at: float = 0.0  # not earlier
    failures: int = 0


class Reach:
    """Of all hosts, by name."""

    def __init__(self) -> None:
        self.hosts: dict[str, Reached] = {}

    def update(self, names: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """The file's hosts as they are. Returns those that are new, and those whose line is gone."""
        new = [name for name in names if name not in self.hosts or self.hosts[name].state == "leaving"]
        for name in new:
            joined = name in self.hosts
            self.hosts[name] = Reached(state="joined" if joined else "absent", at=now)
        gone = [name for name, host in self.hosts.items() if name not in names and host.state != "leaving"]
        for name in gone:
            self.hosts[name].state = "leaving"
        return new, gone

    def due(self, now: float) -> list[str]:
        """Who is to be tried; they are taken to be."""
        found = [name for name, host in self.hosts.items() if host.state == "absent" and now >= host.at]
        for name in found:
            self.hosts[name].state = "trying"
        return found

    def tried(self, name: str, now: float, *, failed: bool) -> bool:
        """Somebody has come back from it. Whether that is news: a first failure."""
        host = self.hosts.get(name)
        if host is None or host.state not in ("trying", "absent"):
            return False
        pause_s = min(FIRST_S * 2.0**host.failures, LONGEST_S)
        host.state, host.at = "absent", now + (pause_s if failed else ITSELF_S)
        host.failures += 1
        return failed and host.failures == 1

    def joined(self, name: str) -> bool:
        """Its agent is connected. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state in ("joined", "leaving"):
            return False
        host.state, host.failures = "joined", 0
        return True

    def lost(self, name: str, now: float) -> bool:
        """Its agent is not connected any more. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state != "joined":
            return False
        host.state, host.at = "absent", now + ITSELF_S
        return True

    def forget(self, name: str) -> None:
        self.hosts.pop(name, None)
