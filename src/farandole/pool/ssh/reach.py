"""When a host of a hosts file is to be reached, to start its agent there: pure; times are the caller's, in seconds.

    absent     its agent is not connected: it is tried, at once and then later and later
    trying     somebody is on the way to it
    there      its agent is connected; `joined` once the host is prepared
    leaving    its line is gone: its workers leave, then its agent ends

A host whose agent is lost is tried at once, for the agent may have ended; one that is still there is left alone. Where
all are lost, with the coordinator, they come back by themselves: so they have `ITSELF_S` before they are tried. A host
that can't be reached, or can't be prepared, is idle until it can: that ends nothing, and each reason is told once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ITSELF_S = 3.0
FIRST_S, LONGEST_S = 1.0, 60.0


@dataclass(kw_only=True)
class Reached:
    """`at`: not tried earlier. `connected`: its agent is. `told`: what was wrong, as was told last."""

    state: str = "absent"
    at: float = 0.0
    connected: bool = False
    joined: bool = False
    failures: int = 0
    told: str = ""


class Reach:
    """Of all hosts, by name."""

    def __init__(self) -> None:
        self.hosts: dict[str, Reached] = {}

    def update(self, names: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """The file's hosts as they are. Returns those that are new, and those whose line is gone."""
        new = [name for name in names if name not in self.hosts or self.hosts[name].state == "leaving"]
        for name in new:
            connected = name in self.hosts and self.hosts[name].connected
            state = "there" if connected else "absent"
            self.hosts[name] = Reached(state=state, at=now, connected=connected)
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

    def tried(self, name: str, now: float, reason: str) -> bool:
        """Somebody has come back from it, without success where there is a `reason`. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state != "trying":
            return False
        host.state, host.at = "absent", now + ITSELF_S  # for its agent to be heard of
        return bool(reason) and self._failed(host, now, reason)

    def connected(self, name: str, *, ready: bool) -> bool:
        """Its agent is connected, and the host `ready`. Whether that it is, is news."""
        host = self.hosts.get(name)
        if host is None:
            return False
        host.connected = True
        if host.state == "leaving":
            return False
        host.state = "there"
        news = ready and not host.joined
        if ready:
            host.joined, host.failures, host.told = True, 0, ""
        return news

    def unfit(self, name: str, now: float, reason: str) -> bool:
        """Its agent is connected, and could not prepare the host: it is to end. Whether that is news."""
        host = self.hosts.get(name)
        if host is None or host.state not in ("there", "trying"):
            return False
        host.state, host.joined = "absent", False
        return self._failed(host, now, reason)

    def lost(self, name: str, now: float, *, with_all: bool = False) -> bool:
        """Its agent is not connected any more. Whether that is news: not where the pool itself has no connection, and
        nothing is known of any.
        """
        host = self.hosts.get(name)
        if host is None:
            return False
        host.connected = False
        if host.state != "there":
            return False
        host.state, host.at = "absent", now + ITSELF_S * with_all
        news = host.joined and not with_all
        host.joined = host.joined and with_all
        return news

    def forget(self, name: str) -> None:
        self.hosts.pop(name, None)

    def _failed(self, host: Reached, now: float, reason: str) -> bool:
        host.at = now + min(FIRST_S * 2.0**host.failures, LONGEST_S)
        host.failures += 1
        host.joined = False
        before, host.told = host.told, reason
        return reason != before
