"""What can be fed arbitrary bytes, as one table: a name, seeds that are nearly right, and a function that takes bytes.

A target returns whatever the bytes are, or raises what its module promises; anything else is a bug. Both the property
tests (`test_arbitrary_bytes.py`) and the coverage-guided harness (`harness.py`) run this table.
"""

from __future__ import annotations

import contextlib
import io
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from farandole.checkpoint.reach import listed
from farandole.cli.reproduce import history_of
from farandole.collective.gloo import _JUMP, _RETURN, MOST_SOURCES, only
from farandole.collective.state_transfer import encode, restore
from farandole.control import ticket as tickets
from farandole.control.run_folder import METRICS
from farandole.control.security import CHALLENGE, Examination, IssuedTicket, TicketProof, Tickets, ticket_id
from farandole.control.status import samples_per_s
from farandole.control.ticket import Ticket
from farandole.coordinator import listener
from farandole.coordinator.journal import Journal
from farandole.coordinator.listener import parse
from farandole.coordinator.rest import Release, ScaleRequest, StopRequest
from farandole.errors import CoordinatorUnreachable, ProtocolError, UsageError
from farandole.observe.live import PlainDisplay
from farandole.observe.past import past
from farandole.observe.summary import pauses
from farandole.observe.tables import past_table
from farandole.observe.text import describe
from farandole.protocol import messages as m
from farandole.protocol.metrics import StepLine, as_written, metrics_line, parse_line, parse_lines
from tests.fuzz import files
from tests.fuzz.wire import REQUESTS, SECRET, Wire, frame
from tests.support.metric_lines import KINDS, an
from tests.support.scene import trained

LONGEST_FILTER = 4096  # instructions that Linux takes


@dataclass(frozen=True)
class Target:
    feed: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


LINES = (
    m.Line(
        step=3, index=0,
        fields=m.Metrics(
            epoch=0, samples=10, loss=0.5, seconds=0.1, samples_per_s=100.0, view=1, workers=2, time=9.0, total=7,
        ),
    ),
    m.Line(step=3, index=1, fields={"accuracy": 0.5, "n": 1, "s": "x"}),
)  # fmt: skip
MESSAGES: tuple[m.Message, ...] = (
    m.Hello(kind="worker", worker="w1", host="here", pid=1, pool="local"),
    m.Hello(kind="pool", pool="local"),
    m.Hello(kind="observer"),
    m.Ready(signature=m.Signature(facts=(("torch", "2"), ("weight", "3x4 float32")))),
    m.Heartbeat(view=1, round=2, step=3, lines=LINES),
    m.LeaveRequest(reason="SIGTERM"),
    m.Publish(group=1, key="0/1", value=b"\x00" * 16),
    m.Prepared(view=1),
    m.Switched(view=1, round=1, step=0),
    m.Synced(view=1),
    m.Suspect(view=1, peer="w2", reason="gone"),
    m.ScriptFailed(traceback="Traceback"),
    m.Saved(path="there"),
    m.Finished(fingerprint="f"),
    m.Spans(number=1, wall_us=9, steps=((1, 0, 9),), spans=((3, 0, 9),), peers=("w2",), waits=((0, 0, 9),)),
)
ENCODED = tuple(m.encode(message) for message in MESSAGES)


def message(data: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        decoded = m.decode_from_worker(data)
        assert m.encode(m.decode_from_worker(m.encode(decoded))) == m.encode(decoded)


def answer(data: bytes) -> None:
    """What a worker may get from whoever answers for the coordinator."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        m.decode_from_coordinator(data)


_folder = tempfile.TemporaryDirectory(prefix="farandole-fuzz-")


def lines(data: bytes) -> None:
    """The lines of a heartbeat, from rank 0 and from an external worker: what is written of them is read again."""
    beat: m.Message | None = None
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        beat = m.decode_from_worker(b"\x84\xa4type\xa9Heartbeat\xa4view\x01\xa4step\x0c\xa5lines" + data)
    if beat is None:
        return
    scene = trained("a", "b")
    scene.say("b", m.Heartbeat(view=1, step=9))
    scene.say("guest", beat)
    assert not scene.lines
    scene.say("a", beat)
    for line in scene.lines:
        assert line.step <= 9, "beyond what b has said"
        written = as_written(metrics_line(line))
        assert parse_line(written), f"written, and damaged: {written!r}"


SAID = tuple(
    msgspec.msgpack.encode(each) for each in ((), LINES, LINES[:1] * 3, [{"step": 1, "index": 1, "fields": {}}])
)


def metrics(data: bytes) -> None:
    """A whole metrics.jsonl, for everyone who reads it."""
    folder = Path(_folder.name)
    path = folder / METRICS
    path.write_bytes(data)
    listed(path)
    past_table(past("r", data.splitlines(keepends=True)))
    found, damaged = parse_lines(data.split(b"\n")[:-1])
    assert len(found) + damaged == data.count(b"\n")
    pauses(found)
    with contextlib.suppress(UsageError):
        history_of(found, folder)
    samples_per_s([line for line in found if isinstance(line, StepLine)])
    display = PlainDisplay(io.StringIO())
    for line in found:
        m.decode_from_coordinator(m.encode(m.Note(line=as_written(line))))
        if not isinstance(line, StepLine):
            describe(line)
        display.line(line)
    with contextlib.closing(Journal(folder)) as journal:
        journal.last_line()


WRITTEN = (
    *(metrics_line(line) for line in LINES),
    *(an(kind) for kind in KINDS.values()),
)
FILES = tuple(b"".join(map(as_written, WRITTEN[at : at + 4])) for at in range(0, len(WRITTEN), 4))


def ticket(data: bytes) -> None:
    path = Path(_folder.name) / "ticket"
    path.write_bytes(data)
    loaded: Ticket | None = None
    with contextlib.suppress(UsageError):
        loaded = tickets.load(str(path))
    if loaded is None:
        return
    assert loaded.address.startswith(("http://", "https://"))
    assert len(bytes.fromhex(loaded.secret)) == tickets.SECRET_BYTES
    assert loaded.address.startswith("https://") == bool(loaded.fingerprint)


TICKETS = tuple(
    msgspec.json.encode(Ticket(address=address, secret=SECRET, run="r", fingerprint=pin))
    for address, pin in (
        ("http://127.0.0.1:4000", ""),
        ("https://node1:1", "f" * 64),
        ("https://[fd00::5]:65535", SECRET),
    )
)


def issued(data: bytes) -> None:
    """FOLDER/tickets: whatever is in it, the owner gets in, and who is let in is not over."""
    path = Path(_folder.name) / "tickets"
    path.write_bytes(data)
    known = Tickets(SECRET, path)
    with contextlib.suppress(UsageError):
        known.reread()
    assert known.secrets_by_id[ticket_id(SECRET)] == SECRET
    for each in known.secrets_by_id:
        assert known.owners(each) or known.forbids(each, "/api/stop")
        assert not known.revoked(each) or known.over(each)


ISSUED = tuple(
    msgspec.json.encode(
        tuple(IssuedTicket(name=f"t{n}", secret=f"{n:064x}", expires=n, revoked=n == 2) for n in range(count))
    )
    for count in (0, 1, 3)
)


def listen(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        parse(data.decode(errors="replace"))


def body(data: bytes) -> None:
    for kind in (ScaleRequest, Release, StopRequest):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            msgspec.json.decode(data, type=kind)


def state(data: bytes) -> None:
    payload = torch.zeros(data[0] * 8 if data else 0, dtype=torch.uint8)
    with contextlib.suppress(ProtocolError):
        restore(data[1:], payload)


def ends(data: bytes) -> None:
    """Where a member of a new group says that its connections come from: a program for the kernel is made of it."""
    with contextlib.suppress(ValueError):
        program = only(data.decode("ascii").split("\n")[:MOST_SOURCES])
        assert len(program) <= LONGEST_FILTER
        for at, (code, if_true, if_false, operand) in enumerate(program):
            struct.pack("HBBI", code, if_true, if_false, operand)
            assert at + 1 + max(if_true, if_false, operand if code == _JUMP else 0) < len(program) or code == _RETURN


SKELETONS = tuple(
    bytes([8]) + encode(nested)[0]
    for nested in ({"w": torch.zeros(2, 3), "n": [1, 2.0, None, "x"]}, [torch.zeros(4, dtype=torch.bool), {"a": (1,)}])
)


OPENING = TicketProof(Ticket(address="http://127.0.0.1:1", secret=SECRET, run="r")).opening
HEADS = tuple(
    f"GET /control HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()
    for header in (f"Authorization: {OPENING}", f"authorization:Farandole proof={SECRET}", "Expect: foo", "X: \xff")
)


def knock(data: bytes) -> None:
    """A stranger's request, as the door reads it, and what came back to a client, if that was it."""
    examination = Examination({ticket_id(SECRET): SECRET})
    with contextlib.suppress(ValueError):
        given = listener.read_authorization(data)
        if given is not None and (challenge := examination.challenge(given)):
            assert CHALLENGE.fullmatch(challenge)
        assert not examination.passed(given or "")
    with contextlib.suppress(CoordinatorUnreachable):
        TicketProof(Ticket(address="http://127.0.0.1:1", secret=SECRET, run="r")).answer(data.decode("latin-1"))


def targets(wire: Wire) -> dict[str, Target]:
    """`wire` serves the last four."""
    frames = tuple(b"".join(frame(each) for each in ENCODED[:n]) for n in (1, 5))
    return {
        "message": Target(message, ENCODED),
        "answer": Target(answer, ENCODED),
        "ticket": Target(ticket, TICKETS),
        "tickets": Target(issued, ISSUED),
        "listen": Target(listen, (b"10.0.0.5:4000", b"[fd00::5]:1", b"node1")),
        "body": Target(body, (b'{"wanted":2}', b'{"name":"w1"}', b'{"reason":"x","code":1}')),
        "state": Target(state, SKELETONS),
        "ends": Target(ends, (b"127.0.0.1 4000", b"10.0.0.5 1\nfd00::5 65535\n10.0.0.6 2")),
        "head": Target(knock, HEADS),
        "stranger": Target(wire.stranger, (*HEADS, *REQUESTS)),
        "lines": Target(lines, SAID),
        "metrics": Target(metrics, FILES),
        **{name: Target(*target) for name, target in files.FILES.items()},
        "request": Target(wire.request, REQUESTS),
        "frames": Target(wire.frames, (*frames, b"\x81\x80\0\0\0\0", b"\x88\x80\0\0\0\0", b"\x89\x81\0\0\0\0x")),
        "hello": Target(wire.hello, ENCODED),
    }
