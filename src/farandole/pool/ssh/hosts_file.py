"""The hosts file of an SSH pool: a line for each host, read again whenever it changes.

    # comment
    node1 slots=8
    ann@node2.lab:2222 slots=4 interface=10.0.0.2 python=/opt/ml/bin/python
    localhost slots=2

The first word is a host's name, all of it: one address with two ports is two hosts. `slots`: room for so many workers,
1 if left out. `interface`: the host's address for the data plane, where that is not the one that leads to the
coordinator. `python`: the interpreter there that has farandole. `localhost` is this machine, without SSH.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import UsageError
from farandole.platform.files import open_regular
from farandole.platform.output import LONGEST_NAME, is_name
from farandole.pool.base import Host

LOCAL = "localhost"
MOST_SLOTS = 1000
_HOST = re.compile(r"(?:(?P<user>[^@:\s]+)@)?(?P<address>\[[0-9a-fA-F:.]+\]|[^@:\s\[\]]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One host. `name` is what stands in the file; `address` has its user; `port` 0: SSH's own choice."""

    name: str
    address: str
    port: int = 0
    slots: int = 1
    interface: str = ""
    python: str = ""

    @property
    def host(self) -> Host:
        return Host(name=self.name, slots=self.slots)

    @property
    def local(self) -> bool:
        return self.address == LOCAL and not self.port


def read(path: Path) -> dict[str, Line]:
    """Its hosts by name, in its order.

    Raises:
        UsageError: it can't be read, is no regular file, or a line is none; names it. Nothing of it counts then.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"hosts file {path}: {why}") from None
    return parse(text, str(path))


def parse(text: str, where: str = "hosts file") -> dict[str, Line]:
    """See `read`."""
    found: dict[str, Line] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _line(words)
        except ValueError as error:
            raise UsageError(f"{where}, line {number}: {error}") from None
        if host.name in found:
            raise UsageError(f"{where}, line {number}: {host.name} is there twice; give it one line with all its slots")
        found[host.name] = host
    return found


def _line(words: list[str]) -> Line:
    name, options = words[0], _options(words[1:])
    match = _HOST.fullmatch(name)
    if not match or name.startswith("-") or match["address"].startswith("-") or not is_name(name):
        raise ValueError(f"{name[:LONGEST_NAME]!r} is no host; write HOST, USER@HOST or USER@HOST:PORT")
    port = int(match["port"] or 0)
    if port > 65535:
        raise ValueError(f"{name}: port {port} is beyond 65535")
    user, address = match["user"], match["address"].strip("[]")
    return Line(
        name=name,
        address=f"{user}@{address}" if user else address,
        port=port,
        slots=_slots(options.get("slots", "1")),
        interface=options.get("interface", ""),
        python=options.get("python", ""),
    )


def _options(words: list[str]) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("slots", "interface", "python") or not equals or not value:
            raise ValueError(f"{word!r} is none of slots=NUMBER, interface=ADDRESS, python=PATH")
        if key in options:
            raise ValueError(f"{key} is there twice")
        options[key] = value
    return options


def _slots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"slots={text}: a whole number from 1 to {MOST_SLOTS}")
    return int(text)


def changes(before: Mapping[str, Line], now: Mapping[str, Line]) -> Iterator[tuple[str, str]]:
    """What has become of the lines of hosts that were there and still are, in words."""
    for name, line in now.items():
        old = before.get(name, line)
        if line.slots != old.slots:
            yield name, f"{line.slots} slots, it had {old.slots}"
        for option in ("interface", "python"):
            value = getattr(line, option)
            if value != getattr(old, option):
                yield name, f"{option}={value or 'none'} counts when its agent begins anew: delete the line for a while"


class Watched:
    """The file as it was read last. What is a mistake changes nothing, and is told once.

    Attributes:
        lines: its hosts.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError: see `read`; or there is no host in it."""
        self._path = path
        self.lines = read(path)
        if not self.lines:
            raise UsageError(f"hosts file {path}: no host is in it; write a line HOST slots=NUMBER for each")
        self._seen = self._settled = self._stamp()
        self._told = ""

    def again(self) -> str | None:
        """Look at it; what is wrong with it, "" once it has changed, None where nothing is new.

        An edit counts when the file has been the same for two looks: who writes may not be at the end yet.
        """
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            return None
        if stamp == self._settled:
            return None
        self._settled = stamp
        try:
            lines = read(self._path)
            if not lines:
                raise UsageError(
                    f"hosts file {self._path}: no host is in it any more; that is taken for a mistake, and nobody "
                    f"leaves. `farandole stop` ends the run"
                )
        except UsageError as error:
            told, self._told = self._told, str(error)
            return None if told == self._told else f"{error}; the hosts that were there stay"
        self._told = ""
        changed = lines != self.lines
        self.lines = lines
        return "" if changed else None

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size, stat.st_mode
