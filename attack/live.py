"""The run under attack, and what must hold after each attack and in the end.

After each: `farandole run` lives, its steps advance, its own workers are in the view, none was ever lost and nothing
begun again, the coordinator is the process that it was, and no secret of the run is in anything that a stranger got
hold of. In the end: exit code 0, the bits of a world of one, every sample once (chaos/verdict.py), no traceback shown,
and no secret in any file of the folder but those that are for secrets, nor on any command line or in any environment.
"""

from __future__ import annotations

import base64
import contextlib
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import psutil

from attack.base import Attack
from attack.stranger import Stranger
from chaos.launched import Launched
from chaos.trial import digits
from chaos.verdict import Reference, complaints
from farandole.control.run_folder import CERTIFICATE, TICKET, TICKETS
from farandole.control.ticket import Ticket, load
from farandole.platform import files
from farandole.protocol import events

WORKERS = 3
PACE_S = 0.2  # of a micro-batch: a step takes twice that
WORN = 90  # steps of 150: who comes now gets a new run
STEPS = 1  # that must be made after an attack
BEGIN_S, GO_ON_S, STRANGER_S = 60.0, 30.0, 60.0
PRIVATE = (TICKET, TICKETS, CERTIFICATE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # what no output may hold


def token(place: Path) -> Path:
    """That of `/metrics`, in a file of the owner's."""
    path = place / "metrics-token"
    if not path.exists():
        files.write(path, secrets.token_urlsafe(24).encode())
    return path


class Live:
    """A `farandole run` on the digits, as a context: on leaving it, nothing of it is alive.

    Attributes:
        run: started, watched and ended as the chaos runs are. place: a folder that everybody may enter.
        received: all that strangers have got hold of. ticket: the owner's.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.place = place
        self.run = Launched(
            place / name, digits(place),
            ["--workers", str(WORKERS), "--checkpoint-every", "50steps", "--metrics-token", str(token(place))],
            pace_s=PACE_S,
            environ={"FARANDOLE_SHARED_MEMORY": "0"},  # else workers of one host have no listeners to attack
        )  # fmt: skip
        self.received = b""
        self._tickets: list[Ticket] = []
        self._looked = 0  # lines of metrics that earlier attacks answer for

    def __enter__(self) -> Live:
        self.until(
            lambda: len(self.run.watch.members) == WORKERS and self.run.watch.step >= 1, BEGIN_S, "three workers"
        )
        self.ticket = load(str(self.folder / TICKET))
        self.honest = frozenset(self.run.watch.members)
        self._looked = len(self.run.watch.lines)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.__exit__(kind, error, trace)

    # --- what an attack may use ------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def address(self) -> tuple[str, int]:
        """Of the coordinator."""
        url = urlsplit(self.ticket.address)
        return str(url.hostname), url.port or 0

    @property
    def worn(self) -> bool:
        return self.run.over or self.run.watch.step >= WORN

    def known(self, ticket: Ticket) -> None:
        """One more whose secret must not come out."""
        self._tickets.append(ticket)

    def pids(self) -> dict[str, int]:
        """Of the run's own workers, by their names."""
        return {worker: pid for worker, pid in self.run.watch.pids.items() if worker in self.honest}

    def listeners(self) -> list[tuple[str, int]]:
        """Where the workers listen, which every local user reads in /proc/net/tcp, and a scanner finds."""
        found: list[tuple[str, int]] = []
        for pid in self.pids().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets = psutil.Process(pid).net_connections("tcp")
                found += [tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN]
        return found

    def descriptors(self) -> int:
        """Open in the worker that has most."""
        return max(psutil.Process(pid).num_fds() for pid in self.pids().values())

    @contextmanager
    def stranger(self, act: Callable[..., bytes], *arguments: object) -> Iterator[Stranger]:
        """It has to end by itself. What it got hold of is searched for secrets."""
        with Stranger(act, *arguments) as stranger:
            yield stranger
            self.received += stranger.got(STRANGER_S)

    def by_stranger(self, act: Callable[..., bytes], *arguments: object) -> bytes:
        """The same, waited for."""
        with self.stranger(act, *arguments) as stranger:
            pass
        return stranger.got(0)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """TimeoutError if it does not come true in time, or the run has ended before."""
        over = self.run.process
        self.run.until(lambda: condition() or over.poll() is not None, self.run.seconds + seconds)
        if not condition():
            why = f"the run ended with {over.returncode}" if over.poll() is not None else f"{seconds:g} s passed"
            raise TimeoutError(f"{why} before: {what}")

    def go_on(self, steps: int = STEPS) -> None:
        """See steps being made."""
        target = self.run.watch.step + steps
        self.until(lambda: self.run.watch.step >= target, GO_ON_S, f"step {target}")

    # --- verdicts --------------------------------------------------------------------------------------------

    def complaints(self, attack: Attack, coordinator: int | None) -> list[str]:
        """What of the above does not hold after it; `coordinator`: its process id before."""
        watch = self.run.watch
        found: list[str] = []
        try:
            self.go_on()
            self.until(lambda: self.honest <= set(watch.members), GO_ON_S, f"all of {sorted(self.honest)} in the view")
        except TimeoutError as error:
            found.append(str(error))
        new, self._looked = watch.lines[self._looked :], len(watch.lines)
        for line in new:
            if (
                isinstance(line, events.LostEvent | events.LeftEvent | events.FailedEvent)
                and line.worker in self.honest
            ):
                found.append(f"{line.worker}: {events.name_of(line)}")
            if isinstance(line, events.StateLostEvent | events.ResumedEvent | events.StalledEvent):
                found.append(events.name_of(line))
        if watch.coordinator() != coordinator and not attack.kills_coordinator:
            found.append("the coordinator is another process")
        found += [f"a stranger got {name}" for name, secret in self.secrets() if secret in self.received]
        return found

    def end(self, reference: Reference) -> list[str]:
        """Let the run come to its end; what of the above does not hold then."""
        told = self.tells()
        code = self.run.finish()
        lines, left = self.run.watch.lines, self.run.watch.processes()
        found = complaints(code, lines, self.folder / "ledger", left, reference) + self.run.troubles() + told
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name not in PRIVATE:
                content = path.read_bytes()
                found += [f"{name} is in {path.name}" for name, secret in self.secrets() if secret in content]
        said = self.run.output.read_text(errors="replace")
        found += [f"{name} is in the output" for name, secret in self.secrets() if secret in said.encode()]
        if CONTROL.search(said):
            found.append("the output steers its terminal")
        return found

    def secrets(self) -> list[tuple[str, bytes]]:
        """Names, and how each would look."""
        known: list[tuple[str, bytes]] = []
        for ticket, name in ((self.ticket, "the ticket's secret"), *((t, "an issued secret") for t in self._tickets)):
            raw = bytes.fromhex(ticket.secret)
            known += [(name, look) for look in (ticket.secret.encode(), raw, base64.b64encode(raw))]
        return [*known, ("the token of /metrics", token(self.place).read_bytes())]

    def tells(self) -> list[str]:
        """Processes with a secret on their command line or in their environment: anybody on the machine may look."""
        found: list[str] = []
        for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                found += [f"{name} is in {path}" for name, secret in self.secrets() if secret in content]
        return found


def open_place() -> Path:
    """A folder that others may enter and not write, so that what holds them off is what the run does about it."""
    place = Path(tempfile.mkdtemp(prefix="farandole-attack-"))
    place.chmod(0o755)
    return place
