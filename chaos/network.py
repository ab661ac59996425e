"""Hosts on one machine: network namespaces on a bridge, whose links can be pulled, slowed and cut in one direction.

    10.77.0.1 h0 ---.
    10.77.0.2 h1 ----- bridge      every host and the bridge is a namespace; the machine's own network is not touched
    10.77.0.3 h2 ---'

Namespaces are called farandole-chaos-PID-NUMBER-NAME after the process that made them. They go with the context; those
of a process that is no more are removed by the next one. Needs root, `ip` and `tc`.

What breaks how: a pulled cable is the bridge's port going down. A slow link is a token bucket (tbf) on both ends. A
direction is cut by a neighbour entry with an address that nobody has: frames leave and reach no one, and neither
side's kernel is told.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType

PREFIX = "farandole-chaos-"
NUMBER = itertools.count()
NOBODY = "02:00:00:00:00:fe"


def missing() -> str:
    """Why there can be no namespaces here; "" if there can."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"network namespaces need {' and '.join(tools)} (iproute2)"
    name = f"{PREFIX}{os.getpid()}-{next(NUMBER)}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces need root: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


class Network:
    """`hosts` hosts, numbered from 0. A context."""

    def __init__(self, hosts: int) -> None:
        self.hosts = range(hosts)
        self._mine = f"{PREFIX}{os.getpid()}-{next(NUMBER)}-"

    def __enter__(self) -> Network:
        _remove([name for name in _names() if not Path(f"/proc/{_maker(name)}").exists()])
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove([name for name in _names() if name.startswith(self._mine)])

    def _build(self) -> None:
        bridge = self._bridge()
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host in self.hosts:
            name, port = self._name(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("link", "add", "name", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def within(self, host: int) -> list[str]:
        """What a command is put behind to run on the host; the process is the command's own."""
        return ["ip", "netns", "exec", self._name(host)]

    # --- what is done to links -----------------------------------------------------------------------------------

    def pull(self, host: int) -> None:
        _ip("-n", self._bridge(), "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        _ip("-n", self._bridge(), "link", "set", f"port{host}", "up")

    def slow(self, host: int, kbit: int) -> None:
        for name, device in self._ends(host):
            bucket = ["rate", f"{kbit}kbit", "burst", "16kb", "latency", "400ms"]
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def hurry(self, host: int) -> None:
        for name, device in self._ends(host):
            _run("tc", "-n", name, "qdisc", "delete", "dev", device, "root")

    def cut(self, host: int, to: int) -> None:
        """Nothing more arrives from `host` at `to`; the other way, everything does."""
        entry = [self.address(to), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
        _ip("-n", self._name(host), "neighbour", "replace", *entry)

    def mend(self, host: int, to: int) -> None:
        _ip("-n", self._name(host), "neighbour", "delete", self.address(to), "dev", "eth0")

    def _ends(self, host: int) -> list[tuple[str, str]]:
        return [(self._name(host), "eth0"), (self._bridge(), f"port{host}")]

    def _name(self, host: int) -> str:
        return f"{self._mine}h{host}"

    def _bridge(self) -> str:
        return f"{self._mine}bridge"


def _names() -> list[str]:
    listed = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    return [name for name in listed if re.fullmatch(rf"{PREFIX}\d+-\d+-\w+", name)]


def _maker(name: str) -> int:
    return int(name.removeprefix(PREFIX).split("-")[0])


def _remove(names: list[str]) -> None:
    """With whatever still runs in them."""
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
