"""Who holds the ticket sends lines of metrics that are not its to send, or none at all.

An external worker connects like any worker, never asks in, and puts into its heartbeats lines of steps, events that
never were, what steers a terminal, and things that no reader expects. A member, which may be rank 0, can say all of
this too, with a heartbeat that looks like its own. What is wrong in itself closes the connection; what is not its to
say is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from farandole.control.client import dial
from farandole.control.ticket import Ticket
from farandole.protocol import messages as m

MARK = "fabricated"  # in every text of theirs
LOSS = -666.25  # ... and every number
FAR = 10**6  # a step
STEERS = f"\x1b]0;{MARK}\x07\x1b[31m\u202e{MARK}"  # a title, a colour, the direction of writing
ANSWER_S = 20.0


def metrics(**fields: Any) -> list[Any]:
    """What a step's line holds, in its order on the wire; `fields` are other than they should be."""
    plausible = {
        "epoch": 0, "samples": 96, "loss": LOSS, "seconds": 0.1, "samples_per_s": 960.0, "view": 1, "workers": 2,
        "time": 1.0, "total": 60,
    }  # fmt: skip
    return list({**plausible, **fields}.values())


def line(step: int, index: int = 0, fields: Any = None) -> dict[str, Any]:
    return {"step": step, "index": index, "fields": metrics() if fields is None else fields}


def beat(*lines: Any, view: int = 1, step: int = FAR) -> bytes:
    """A heartbeat as it is on the wire, whatever it holds."""
    return msgspec.msgpack.encode({"type": "Heartbeat", "view": view, "round": step, "step": step, "lines": lines})


NOT_ITS_OWN = tuple(  # well-formed
    beat(line(step), line(step, 1, {"accuracy": LOSS, "note": f"{MARK} {STEERS}"}), view=view, step=step)
    for step in (1, 30, 59, FAR, 2**53)
    for view in (1, 2, 3)
)
NONE_AT_ALL = (
    beat(line(5, 1, {"event": "saved", "path": MARK, "whole": True})),
    beat(line(5, 1, {"event": "failed", "worker": "w1", "traceback": f"Traceback {STEERS}"})),
    beat(line(5, 1, {"time": LOSS})),
    beat(line(5, 1, {STEERS: LOSS})),
    beat(line(5, 1, {f"{MARK} {n}": LOSS for n in range(101)})),
    beat(line(5, 1, {MARK: {"nested": LOSS}})),
    beat(line(5, 1, metrics())),
    beat(line(5, 0, {"loss": LOSS})),
    beat(line(5, fields=metrics(loss=STEERS))),
    beat(line(5, fields=metrics(total=MARK))),
    beat(line(5, fields=metrics(samples=[LOSS]))),
    beat(line(5, fields=metrics(time=float("nan")))),
    beat(line(5, fields=metrics(seconds=-1.0))),
    beat(line(5, fields=[LOSS])),
    beat({"index": 0, "fields": metrics()}),
    beat({"step": MARK, "index": 0, "fields": metrics()}),
    beat(*[line(5)] * (m.MAX_LINES + 1)),
    beat(MARK),
)


async def say(ticket: Ticket, messages: Sequence[bytes], name: str) -> bool:
    """An external worker says Hello and then these; whether its connection was closed for it."""
    async with dial(ticket) as socket:
        await socket.send_bytes(m.encode(m.Hello(kind="worker", worker=name, host="elsewhere", session=name)))
        with contextlib.suppress(ConnectionError):
            for message in messages:
                await socket.send_bytes(message)
            await socket.send_bytes(m.encode(m.Heartbeat(number=m.HEARD_EVERY)))
        while True:
            answer = await asyncio.wait_for(socket.receive(), ANSWER_S)
            if answer.type is not aiohttp.WSMsgType.BINARY:
                return True
            if isinstance(m.decode_from_coordinator(answer.data), m.HeartbeatAnswer):
                return False


async def forge(ticket: Ticket) -> list[str]:
    """Everything, as external workers of many names. Returns what came of it otherwise than it should."""
    wrong = ["a heartbeat with lines closes a connection"] if await say(ticket, NOT_ITS_OWN, "liar") else []
    for number, message in enumerate(NONE_AT_ALL):
        if not await say(ticket, [message], f"scribbler-{number}"):
            wrong.append(f"lines that are none are taken: {message[:80]!r}")
    return wrong


def forged(written: bytes) -> bool:
    """Whether anything of it is in what was written."""
    return MARK.encode() in written or str(LOSS).encode() in written
