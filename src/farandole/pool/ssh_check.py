"""Checks that the hosts of a file are ready for a run: asks each for its facts, and if it reaches the others.

    1. *reach*    connect to each host over SSH, all at once, and start `serve_checks` there
    2. *ask*      for its facts, and for its clock; the offset is known to half of the time that the answer took
    3. *connect*  each host opens a port as a worker would, and tries the ports of all others, and one on this machine

Everything is tried on real connections. What fails is a finding, and nothing here raises. `problems`, which is pure,
interprets the findings.
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
from typing import NamedTuple

import msgspec

from farandole import __version__
from farandole.platform import cpu
from farandole.platform.output import tell
from farandole.platform.process import within
from farandole.pool.ssh import LOCAL, REMEDIES, HostLine, RemoteCommand, failure_reason
from farandole.protocol import numeric_facts

# --- on the host ------------------------------------------------------------------------------------------------------
#
# The remote side of `farandole hosts check`: a host reports its facts and runs tests. `Visit` is the local side.
#
#     python -m farandole host
#
# It prints its facts, and then answers each line of its standard input, until that ends:
#
#     clock                      its Unix time
#     listen ADDRESS             opens a port there, as a worker would; answers its number
#     reach ADDRESS PORT         tests if data sent there comes back
#
# Each answer is one line of JSON after `MARK`, so that other output of a login shell does no harm.

MARK = "farandole-host "
PROBE = b"farandole\n"
REACH_S = 5.0


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one host.

    `without`: why no worker can run there, "" if one can. `address`: the address at which this host was reached over
    SSH, "" on the same machine. `numerics`: see `control/status.py`. `free_bytes`: on the disk of the agents' folders.
    `build`: what its torch was built for. `no_memory`: why its workers can't share memory, "" if they can.
    """

    python: str
    farandole: str
    cores: int
    free_bytes: int
    address: str = ""
    gpus: int = 0
    build: str = ""
    without: str = ""
    no_memory: str = ""
    numerics: dict[str, str] = {}


class PortAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one line: a number, or an error."""

    number: float = 0.0
    error: str = ""


def serve_checks() -> None:
    """Answer checks until standard input ends."""
    _print_answer(host_facts())
    for line in sys.stdin:
        _print_answer(_answer(line.split()))


def host_facts() -> HostFacts:
    numerics, gpus, build, without, no_memory = dict[str, str](), 0, "", "", ""
    try:
        cpu.set_for("same")
        from farandole.numerics import settings
        from farandole.training import run_state

        numerics, gpus, build = dict(run_state.local_facts(1, "same", {})), settings.devices(), settings.build()
        no_memory = _memory_error()
    except Exception as error:  # noqa: BLE001  a damaged installation of torch may raise anything
        without = str(error) or type(error).__name__
    home = Path.home()
    return HostFacts(
        python=platform.python_version(),
        farandole=__version__,
        cores=os.cpu_count() or 1,
        free_bytes=shutil.disk_usage(home).free if home.exists() else 0,
        address=_server_address(os.environ.get("SSH_CONNECTION", "")),
        gpus=gpus,
        build=build,
        without=without,
        no_memory=no_memory,
        numerics=numerics,
    )


def _memory_error() -> str:
    """Returns why a worker can't get memory that the others of its host can map, "" if it can."""
    from farandole.collective.arena import PAGE, SEGMENT_BYTES, Segment

    try:
        Segment(0, SEGMENT_BYTES).take(PAGE)
    except (OSError, AttributeError) as error:  # AttributeError: another system than Linux
        return str(error)
    return ""


def _server_address(connection: str) -> str:
    """The address of this host in SSH_CONNECTION: the client's address and port, then the host's."""
    fields = connection.split()
    return fields[2] if len(fields) == 4 else ""


def _print_answer(answer: HostFacts | PortAnswer) -> None:
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


def listen(address: str, port: int = 0) -> int:
    """Open a port at the address that echoes what it receives, until this process ends. Raises OSError."""
    server = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return server.getsockname()[1]


def _serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(REACH_S)
            try:
                peer.sendall(peer.recv(len(PROBE)))
            except OSError:
                continue


def reach(address: str, port: int) -> None:
    """Send data to the port and wait for its echo. Raises OSError: none comes back."""
    with socket.create_connection((address, port), REACH_S) as peer:
        peer.sendall(PROBE)
        if not peer.recv(len(PROBE)):
            raise OSError("another program answers there")


# --- on this machine --------------------------------------------------------------------------------------------------

FACTS_S = 90.0  # for ssh, and to load torch on a slow disk
ANSWER_S = REACH_S + 5.0
LONGEST = 1 << 20  # characters of a line
CLOCK_S = 5.0  # a larger clock offset is a problem
DISK_BYTES = 1 << 30  # less free space is a problem
KEPT_LINES = 20  # lines of other output that are kept


@dataclass(kw_only=True)
class HostReport:
    """The findings on one host.

    `error`: why nothing is known of it. `ports`: why it does not reach each host, "" if it does; the run's own port has
    the name "". `clock_s`: how far its clock is ahead of this machine's, `within_s`: the uncertainty of that.
    """

    line: HostLine
    error: str = ""
    facts: HostFacts | None = None
    clock_s: float = 0.0
    within_s: float = 0.0
    ports: dict[str, str] = field(default_factory=dict[str, str])


class HostProblem(NamedTuple):
    """A reason why no worker of a host could join a run of this machine, and what to do."""

    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}: {self.remedy}"


def problems(report: HostReport, own: HostFacts) -> list[HostProblem]:
    """The reasons why no worker of this host could join a run of this machine; empty: it can."""
    facts = report.facts
    if facts is None:
        remedy = next((each for each in REMEDIES.values() if report.error.endswith(f": {each}")), "")
        return [
            HostProblem(report.error.removesuffix(f": {remedy}"), remedy or f"try `ssh {report.line.name}` by hand")
        ]
    found: list[HostProblem] = []
    if facts.without:
        found.append(
            HostProblem(f"no worker can run there ({facts.without})", "install torch there, or name another Python")
        )
    if facts.farandole != own.farandole:
        found.append(
            HostProblem(f"farandole {facts.farandole} there, {own.farandole} here", "install the same version")
        )
    if facts.numerics and own.numerics:
        unlike = numeric_facts.numeric_differences(own.numerics.items(), facts.numerics.items())
        if unlike.bits:
            details = "; ".join(unlike.words(numeric_facts.ELSEWHERE))
            found.append(
                HostProblem(
                    f"its results differ from here ({details})", "install the same there, or use --bits portable or any"
                )
            )
    if abs(report.clock_s) > CLOCK_S + report.within_s:
        found.append(
            HostProblem(f"its clock is {report.clock_s:+.0f} s off", "set it by NTP: tickets and notices depend on it")
        )
    if facts.free_bytes < DISK_BYTES:
        found.append(
            HostProblem(f"{facts.free_bytes / 1e9:.1f} GB are free in its home folder", "make room for code and logs")
        )
    for other, error in report.ports.items():
        if error and not other:
            found.append(
                HostProblem(
                    f"it does not reach this machine ({error})",
                    "open the run's port, and name an address with --listen",
                )
            )
        elif error:
            found.append(
                HostProblem(
                    f"it does not reach {other} ({error})", "open all ports between hosts, or name interface=ADDRESS"
                )
            )
    return found


Listen = tuple[str, int]  # an address of this machine, and a port; "" and 0: any


async def survey_with_local(
    lines: Sequence[HostLine], remote_command: RemoteCommand
) -> tuple[HostFacts, list[HostReport]]:
    """The facts of this machine, and all reports."""
    local, reports = await asyncio.gather(local_facts(remote_command), survey(lines, remote_command))
    return with_reference(local, reports), reports


def with_reference(local: HostFacts, reports: Sequence[HostReport]) -> HostFacts:
    """The facts of this machine. If it has no torch, the first host's numerics are the reference."""
    if not local.without:
        return local
    numerics = next((each.facts.numerics for each in reports if each.facts and each.facts.numerics), {})
    return msgspec.structs.replace(local, numerics=numerics)


async def local_facts(remote_command: RemoteCommand) -> HostFacts:
    """The facts of this machine, from a process of its own: a damaged torch may end the process that loads it."""
    visit = Visit(HostLine(name=LOCAL, address=LOCAL), remote_command)
    try:
        await visit.reach()
    finally:
        await visit.end()
    return visit.report.facts or HostFacts(
        python=platform.python_version(),
        farandole=__version__,
        cores=os.cpu_count() or 1,
        free_bytes=0,
        without=visit.report.error,
    )


async def survey(lines: Sequence[HostLine], remote_command: RemoteCommand, own: Listen = ("", 0)) -> list[HostReport]:
    """The reports on all hosts, in their order. `own`: where the hosts are to reach this machine."""
    visits = [Visit(line, remote_command) for line in lines]
    opened: dict[Listen, int | str] = {}
    try:
        await asyncio.gather(*(visit.reach() for visit in visits))
        alive = [visit for visit in visits if visit.report.facts is not None]
        ssh_address = next((v.report.facts.address for v in alive if v.report.facts and v.report.facts.address), "")
        await asyncio.gather(*(visit.listen(_own_address(ssh_address)) for visit in alive))
        await asyncio.gather(*(visit.connect(alive, own, opened) for visit in alive))
        return [visit.report for visit in visits]
    finally:
        await asyncio.gather(*(visit.end() for visit in visits))


class Visit:
    """The session with one host."""

    def __init__(self, line: HostLine, remote_command: RemoteCommand) -> None:
        self.report = HostReport(line=line)
        self._command = remote_command.farandole(line, "host")
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
            self.report.error = f"{self._command[0]}: {error.strerror}"
            return
        output: list[str] = []
        try:
            content = await within(FACTS_S, self._line(output))
            self.report.facts = msgspec.json.decode(content, type=HostFacts) if content else None
        except asyncio.TimeoutError:
            self.report.error = f"no answer within {FACTS_S:g} s"
        except msgspec.MsgspecError as error:
            self.report.error = f"its farandole is another version ({error}); install the same there"
        else:
            if not content:
                self.report.error = failure_reason("\n".join(output), await self._process.wait())
                return
            sent_at = time.time()
            answer = await self._ask("clock")
            received_at = time.time()
            self.report.clock_s, self.report.within_s = (
                answer.number - (sent_at + received_at) / 2,
                (received_at - sent_at) / 2,
            )

    async def listen(self, own_address: str) -> None:
        """Phase 3, first half. `own_address`: this machine's address, as other hosts see it."""
        assert self.report.facts is not None
        self._address = self.report.line.interface or self.report.facts.address or own_address
        answer = await self._ask(f"listen {self._address}")
        self._port, self._closed = int(answer.number), answer.error

    async def connect(self, others: Sequence[Visit], own: Listen, opened: dict[Listen, int | str]) -> None:
        """Phase 3, second half. `opened`: the ports of this machine that are open, or why one can't be."""
        assert self.report.facts is not None
        for other in others:
            if other is not self:
                self.report.ports[other.report.line.name] = (
                    f"{other._address} can't be listened at there: {other._closed}"
                    if other._closed
                    else (await self._ask(f"reach {other._address} {other._port}")).error
                )
        host, port = own
        address = _own_address(self.report.facts.address) if host in ("", "0.0.0.0", "::") else host
        place = (host or address, port)
        if place not in opened:
            try:
                opened[place] = listen(*place)
            except OSError as error:
                opened[place] = f"{place[0]}: {error.strerror}"
        at = opened[place]
        self.report.ports[""] = at if isinstance(at, str) else (await self._ask(f"reach {address} {at}")).error

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

    async def _line(self, output: list[str]) -> str:
        """The next answer, "" at the end. Other lines go to `output`."""
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line longer than the limit
            while line := (await self._process.stdout.readline()).decode(errors="replace"):
                if line.startswith(MARK):
                    return line.removeprefix(MARK)
                output[:] = [*output[-KEPT_LINES:], line]
        return ""


def _own_address(towards: str) -> str:
    """This machine's address on the route to that address."""
    if not towards:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return probe.getsockname()[0]
    return "127.0.0.1"
