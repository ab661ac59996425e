"""Whether the hosts of a file are ready for a run: each is asked what it is, and whether it reaches the others.

    1. *reach*    each host over SSH, all at once; it begins section "examined" there
    2. *ask*      for its facts, and for its clock, whose offset is known to half of the time that the answer took
    3. *connect*  each host opens a port as a worker's would be, and tries those of all others, and one here

Everything is tried on real connections; what can't be is a finding, and nothing here raises. What findings mean is
`problems`, which is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from farandole import __version__
from farandole.errors import FarandoleError
from farandole.platform import cpu
from farandole.platform.output import tell
from farandole.platform.process import within
from farandole.pool.ssh import HostLine, RemoteCommand, why
from farandole.protocol import numeric_facts

# --- examined ---------------------------------------------------------------------------------------------------------
#
# What a host tells of itself, and tries, for `farandole hosts check`: the far end of section "survey".
#
#     python -m farandole host
#
# It says its facts, and then answers one line after the other of its standard input, until that ends:
#
#     clock                      its Unix time
#     listen ADDRESS             opens a port there, as a worker would; its number
#     reach ADDRESS PORT         whether something sent there comes back
#
# Each answer is one line of JSON behind `MARK`, so that whatever a login shell prints besides does no harm.

MARK = "farandole-host "
WORD = b"farandole\n"
REACH_S = 5.0


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`without`: why no worker could be there, "" where one could. `address`: at which this host was reached over SSH,
    "" on the same machine. `numerics`: see `control/status.py`. `free_bytes`: where agents have their folders.
    """

    python: str
    farandole: str
    cores: int
    free_bytes: int
    address: str = ""
    gpus: int = 0
    without: str = ""
    numerics: dict[str, str] = {}


class PortAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To one line: a number, or why not."""

    number: float = 0.0
    error: str = ""


def examine() -> None:
    """Until standard input ends."""
    _say(host_facts())
    for line in sys.stdin:
        _say(_answer(line.split()))


def host_facts() -> HostFacts:
    numerics, gpus, without = dict[str, str](), 0, ""
    try:
        cpu.set_for("same")
        from farandole.numerics import settings
        from farandole.training import run_state

        numerics, gpus = dict(run_state.here(1, "same", {})), settings.devices()
    except (ImportError, OSError, FarandoleError) as error:
        without = str(error)
    home = Path.home()
    return HostFacts(
        python=platform.python_version(),
        farandole=__version__,
        cores=os.cpu_count() or 1,
        free_bytes=shutil.disk_usage(home).free if home.exists() else 0,
        address=_reached_at(os.environ.get("SSH_CONNECTION", "")),
        gpus=gpus,
        without=without,
        numerics=numerics,
    )


def _reached_at(connection: str) -> str:
    """Of what sshd says: the client's address and port, then its own."""
    words = connection.split()
    return words[2] if len(words) == 4 else ""


def _say(answer: HostFacts | PortAnswer) -> None:
    tell(MARK + msgspec.json.encode(answer).decode())
    sys.stdout.flush()


def _answer(words: list[str]) -> PortAnswer:
    try:
        match words:
            case ["clock"]:
                return PortAnswer(number=time.time())
            case ["listen", address]:
                return PortAnswer(number=listen(address))
            case ["reach", address, port]:
                reach(address, int(port))
                return PortAnswer()
            case _:
                return PortAnswer(error=f"unknown question {' '.join(words)!r}")
    except (OSError, ValueError) as error:
        return PortAnswer(error=(error.strerror if isinstance(error, OSError) else "") or str(error) or "no answer")


def listen(address: str) -> int:
    """A port there that answers what it is sent; it is open as long as this process. Raises OSError."""
    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return server.getsockname()[1]


def _serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(REACH_S)
            try:
                peer.sendall(peer.recv(len(WORD)))
            except OSError:
                continue


def reach(address: str, port: int) -> None:
    """Raises OSError: nothing comes back from there."""
    with socket.create_connection((address, port), REACH_S) as peer:
        peer.sendall(WORD)
        if not peer.recv(len(WORD)):
            raise OSError("somebody else answers there")


# --- survey -----------------------------------------------------------------------------------------------------------

FACTS_S = 90.0  # for ssh, and to load torch on a slow disk
ANSWER_S = REACH_S + 5.0
LONGEST = 1 << 20  # characters of a line
CLOCK_S = 5.0  # off by more
DISK_BYTES = 1 << 30  # less is too little
SAID = 20  # lines of noise that are kept


@dataclass(kw_only=True)
class HostReport:
    """One host. `error`: why nothing is known of it. `ports`: why it does not reach that host, "" where it does; the
    run's own port has no name. `clock_s` is by how much it is ahead of here, `within_s` how well that is known.
    """

    line: HostLine
    error: str = ""
    facts: HostFacts | None = None
    clock_s: float = 0.0
    within_s: float = 0.0
    ports: dict[str, str] = field(default_factory=dict[str, str])


def problems(found: HostReport, ours: HostFacts) -> list[str]:
    """Why no worker of this host could join a run of this machine, each with what to do; none: it can."""
    facts = found.facts
    if facts is None:
        return [found.error]
    told: list[str] = []
    if facts.without:
        told.append(f"no worker can be there ({facts.without}); install torch there, or name another Python")
    if facts.farandole != ours.farandole:
        told.append(f"farandole {facts.farandole} there, {ours.farandole} here: install the same version")
    if facts.numerics and ours.numerics:
        unlike = numeric_facts.numeric_differences(ours.numerics.items(), facts.numerics.items())
        if unlike.bits:
            what = "; ".join(unlike.words(numeric_facts.ELSEWHERE))
            told.append(f"other bits than here: a run with both takes --bits portable or any ({what})")
    if abs(found.clock_s) > CLOCK_S + found.within_s:
        told.append(f"its clock is {found.clock_s:+.0f} s off: tickets and notices go by it; set it by NTP")
    if facts.free_bytes < DISK_BYTES:
        told.append(f"{facts.free_bytes / 1e9:.1f} GB are free in its home folder: make room for code and logs")
    for other, error in found.ports.items():
        if error and not other:
            told.append(
                f"it does not reach this machine ({error}): open the run's port, and name an address with --listen"
            )
        elif error:
            told.append(f"it does not reach {other} ({error}): open all ports between hosts, or name interface=ADDRESS")
    return told


async def with_ours(lines: Sequence[HostLine], there: RemoteCommand) -> tuple[HostFacts, list[HostReport]]:
    """What this machine is, and all hosts. Where it has no torch, the first host's bits are what others are to have."""
    here, found = await asyncio.gather(asyncio.to_thread(host_facts), survey(lines, there))
    if here.without:
        numerics = next((each.facts.numerics for each in found if each.facts and each.facts.numerics), {})
        here = msgspec.structs.replace(here, numerics=numerics)
    return here, found


async def survey(lines: Sequence[HostLine], there: RemoteCommand) -> list[HostReport]:
    """All of them, in their order."""
    visits = [Visit(line, there) for line in lines]
    try:
        await asyncio.gather(*(visit.reach() for visit in visits))
        alive = [visit for visit in visits if visit.found.facts is not None]
        remote = next((v.found.facts.address for v in alive if v.found.facts and v.found.facts.address), "")
        await asyncio.gather(*(visit.listen(_own_address(remote)) for visit in alive))
        await asyncio.gather(*(visit.connect(alive) for visit in alive))
        return [visit.found for visit in visits]
    finally:
        await asyncio.gather(*(visit.end() for visit in visits))


class Visit:
    """The conversation with one host."""

    def __init__(self, line: HostLine, there: RemoteCommand) -> None:
        self.found = HostReport(line=line)
        self._command = there.farandole(line, "host")
        self._process: asyncio.subprocess.Process | None = None
        self._address, self._port, self._closed = "", 0, ""

    async def reach(self) -> None:
        """Phases 1 and 2."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, limit=LONGEST
            )
        except OSError as error:
            self.found.error = f"{self._command[0]}: {error.strerror}"
            return
        said: list[str] = []
        try:
            content = await within(FACTS_S, self._line(said))
            self.found.facts = msgspec.json.decode(content, type=HostFacts) if content else None
        except asyncio.TimeoutError:
            self.found.error = f"nothing came back within {FACTS_S:g} s"
        except msgspec.MsgspecError as error:
            self.found.error = f"its farandole is another version ({error}); install the same there"
        else:
            if not content:
                self.found.error = why("\n".join(said), await self._process.wait())
                return
            asked = time.time()
            answer = await self._ask("clock")
            back = time.time()
            self.found.clock_s, self.found.within_s = answer.number - (asked + back) / 2, (back - asked) / 2

    async def listen(self, here: str) -> None:
        """Phase 3, first half. `here`: this machine's address, as other hosts see it."""
        assert self.found.facts is not None
        self._address = self.found.line.interface or self.found.facts.address or here
        answer = await self._ask(f"listen {self._address}")
        self._port, self._closed = int(answer.number), answer.error

    async def connect(self, others: Sequence[Visit]) -> None:
        """Phase 3, second half."""
        assert self.found.facts is not None
        for other in others:
            if other is not self:
                self.found.ports[other.found.line.name] = (
                    f"{other._address} can't be listened at there: {other._closed}"
                    if other._closed
                    else (await self._ask(f"reach {other._address} {other._port}")).error
                )
        own = _own_address(self.found.facts.address)
        try:
            port = listen(own)
        except OSError as error:
            self.found.ports[""] = f"{own}: {error.strerror}"
            return
        self.found.ports[""] = (await self._ask(f"reach {own} {port}")).error

    async def end(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.communicate()

    async def _ask(self, question: str) -> PortAnswer:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n".encode())
            content = await within(ANSWER_S, self._line([]))
            return (
                msgspec.json.decode(content, type=PortAnswer) if content else PortAnswer(error="its connection is gone")
            )
        except (OSError, asyncio.TimeoutError, msgspec.MsgspecError) as error:
            return PortAnswer(error=str(error) or "no answer in time")

    async def _line(self, said: list[str]) -> str:
        """Its next answer, "" at the end; what else comes is `said`."""
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line beyond all limits
            while line := (await self._process.stdout.readline()).decode(errors="replace"):
                if line.startswith(MARK):
                    return line.removeprefix(MARK)
                said[:] = [*said[-SAID:], line]
        return ""


def _own_address(towards: str) -> str:
    """This machine's address on the way to that one."""
    if not towards:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return probe.getsockname()[0]
    return "127.0.0.1"
