"""Ticket holders that are no members: external workers that connect, send messages of others, and never ask in."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Sequence

import aiohttp
import msgspec

from attack import lines
from attack.base import HOLDER, Attack, NotMade, Succeeded
from attack.live import Live
from chaos.launched import FARANDOLE
from farandole.control.client import dial
from farandole.control.run_folder import METRICS, RECORD, TICKET
from farandole.control.ticket import Ticket, load
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View

FAR = 10**6
ANSWER_S, COMMAND_S = 5.0, 30.0


def forging(live: Live) -> str:
    """Lines of steps and events that never were, and what no reader expects: see `metric_lines.py`."""
    wrong = asyncio.run(lines.forge(live.ticket))
    live.go_on()
    if lines.forged((live.folder / METRICS).read_bytes()):
        raise Succeeded("forged lines are in metrics.jsonl")
    if wrong or _command(live, "status") != 0:
        raise Succeeded("; ".join(wrong) or "`farandole status` failed")
    return f"{len(lines.NOT_ITS_OWN)} heartbeats left out, {len(lines.NONE_AT_ALL)} connections closed"


def speaking(live: Live) -> str:
    """An external worker in no view reports rounds and views, accuses all, and fails with a traceback that steers
    terminals.
    """
    view = live.run.watch.events(events.ViewEvent)[-1].view
    everyone = tuple(sorted(live.honest))
    forged = View(number=FAR, members=everyone, group=FAR)
    said: list[m.Message] = [m.Heartbeat(view=view, round=FAR, step=FAR, shards_computed=FAR, at_step_start=True)]
    for number in (view, FAR):
        said += [m.Prepared(view=number), m.Switched(view=number, round=FAR, step=FAR), m.Synced(view=number)]
        said += [m.Suspect(view=number, peer=peer, reason=lines.STEERS) for peer in everyone * 10]
    said += [
        m.Stopped(
            stop=n, view=forged, round=FAR, step=FAR, has_result=True, synced=True, lineage=Lineage(sets=(everyone,))
        )
        for n in range(3)
    ]
    said += [m.WorkerProcessExited(worker=peer, reason="ended") for peer in everyone]
    said += [m.Finished(fingerprint="f", view=view, round=FAR, step=FAR), m.NotFinite(step=1, loss="nan")]
    said += [m.Saved(path=lines.STEERS), m.ScriptFailed(traceback=f"Traceback {lines.STEERS}")]
    answers = asyncio.run(_say_each(live.ticket, said))
    live.go_on(3)  # what is heard counts when the next one speaks
    return f"{len(said)} messages, each of a guest of its own; {answers} answers"


def squatting(live: Live) -> str:
    """A second pool of the same name, and Hellos in the names of live workers."""
    hellos = [m.Hello(kind="worker", worker=each, pool="local", session="s", attempt=9) for each in sorted(live.honest)]
    hellos += [m.Hello(kind="worker", worker=each, synced=True) for each in sorted(live.honest)]
    hellos += [m.Hello(kind="pool", pool="local"), m.Hello(kind="pool", pool="")]
    asyncio.run(
        _say_hello(
            live.ticket, hellos, [m.WorkerProcessExited(worker=each, reason="ended") for each in sorted(live.honest)]
        )
    )
    return f"{len(hellos)} Hellos in others' names"


def issued(live: Live) -> str:
    """A ticket of another: it does not steer, and once it is revoked, opens nothing."""
    theirs = live.place / "issued"
    theirs.mkdir(mode=0o700)
    if _command(live, "ticket", "new", "--name", "bob", "--out", str(theirs / TICKET)) != 0:
        raise NotMade("no ticket was issued")
    shutil.copy(live.folder / RECORD, theirs / RECORD)
    live.known(load(str(theirs / TICKET)))
    for verb in (("stop",), ("scale", "1"), ("release", sorted(live.honest)[0])):
        if _at(live, theirs, *verb) == 0:
            raise Succeeded(f"`farandole {verb[0]}` by an issued ticket")
    if _at(live, theirs, "status") != 0:
        raise NotMade("the issued ticket opens nothing")
    if _command(live, "ticket", "revoke", "bob") != 0:
        raise NotMade("the ticket was not revoked")
    if _at(live, theirs, "status") == 0:
        raise Succeeded("a revoked ticket reads the status")
    external_worker = live.run.start([sys.executable, "-m", "farandole", "join", str(theirs / TICKET), *live.run.job])
    live.until(lambda: external_worker.poll() is not None, COMMAND_S, "an end of who joins by a revoked ticket")
    shutil.rmtree(theirs)
    if external_worker.returncode == 0 or len(live.run.watch.members) != len(live.honest):
        raise Succeeded("a revoked ticket let a worker join")
    return "steered nothing; revoked, it reads nothing and lets nobody join"


async def _say_each(ticket: Ticket, said: Sequence[m.Message]) -> int:
    counts = await asyncio.gather(*(_conversation(ticket, [_hello(n), each]) for n, each in enumerate(said)))
    return sum(counts) + await _conversation(ticket, [_hello(len(said)), *said])


async def _say_hello(ticket: Ticket, hellos: Sequence[m.Hello], more: Sequence[m.Message]) -> None:
    for hello in hellos:
        await _conversation(ticket, [hello, *more])


def _hello(number: int) -> m.Hello:
    return m.Hello(kind="worker", worker=f"teller-{number}", host="elsewhere", session=f"s{number}", attempt=1)


async def _conversation(ticket: Ticket, said: Sequence[m.Message]) -> int:
    """Say it, and hear how many answers come until the connection is closed or nothing comes any more."""
    heard = 0
    with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.MsgspecError):
        async with dial(ticket) as socket:
            for each in said:
                await socket.send_bytes(m.encode(each))
            while (await asyncio.wait_for(socket.receive(), ANSWER_S)).type is aiohttp.WSMsgType.BINARY:
                heard += 1
    return heard


def _command(live: Live, *arguments: str) -> int | None:
    command = live.run.command(*arguments)
    live.until(lambda: command.poll() is not None, COMMAND_S, f"the end of `farandole {arguments[0]}`")
    return command.returncode


def _at(live: Live, folder: object, *arguments: str) -> int | None:
    command = live.run.start([*FARANDOLE, *arguments, "--run", str(folder)])
    live.until(lambda: command.poll() is not None, COMMAND_S, f"the end of `farandole {arguments[0]}`")
    return command.returncode


ATTACKS = (
    Attack(name="holder: forged lines of metrics", who=HOLDER, act=forging, short=True),
    Attack(name="holder: tales of a guest in no view", who=HOLDER, act=speaking),
    Attack(name="holder: names of others", who=HOLDER, act=squatting),
    Attack(name="holder: an issued ticket, and then revoked", who=HOLDER, act=issued),
)
