"""Issued tickets: what they open, what they do not, and what becomes of who came in by one that is over."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from farandole.control.api import Api
from farandole.control.client import subscribe
from farandole.control.run_folder import JOURNAL, TICKETS
from farandole.control.security import IssuedTicket, Tickets, read_tickets, write_tickets
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import NotTheCoordinator, Refused, UsageError
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import EXIT_BANNED
from farandole.protocol.events import TicketIssuedEvent, TicketRevokedEvent
from farandole.settings import Settings
from farandole.worker.connection import Connected
from tests.support.stage import Stage, play
from tests.support.trainer import Board, Trainer

pytestmark = pytest.mark.timeout(60)


async def issue(scene: Stage, *tickets: IssuedTicket) -> Ticket:
    """As `farandole ticket` does it; the last one as its holder gets it."""
    write_tickets(scene.folder / TICKETS, tickets)
    await asyncio.to_thread(scene.api.reread_tickets)
    return msgspec.structs.replace(scene.ticket, secret=tickets[-1].secret)


def declined(ticket: Ticket, why: str) -> None:
    """A worker that comes by it is not let in."""
    with pytest.raises(Refused, match=why):
        Connected(ticket, Settings(worker="late", host="here")).close()


async def stranger_told(scene: Stage, reason: str) -> None:
    await scene.until(lambda: reason in [event["reason"] for event in scene.events("stranger")])


def test_it_lets_a_worker_join_and_reads_and_does_not_steer(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = await issue(scene, IssuedTicket(name="bob", secret=new_secret()))
        scene.worker("w1")
        trainer = scene.worker("w2", pool="")
        trainer.ticket = bob
        await scene.in_view("w1", "w2")
        api = Api(bob)
        assert (await asyncio.to_thread(api.status)).run == "r"
        await asyncio.to_thread(api.alive)
        assert (await asyncio.to_thread(api.numerics)).run == "r"
        for ask in (
            lambda: api.scale(3),
            lambda: api.release("w1"),
            lambda: api.stop("bob", 0),
            api.reread_tickets,
            lambda: api.trace(5),
            api.traced,
            api.end_trace,
            lambda: api.spans("w1"),
            lambda: api._ask("GET", "/api/nothing", None, dict),
        ):
            with pytest.raises(UsageError, match="FOLDER/ticket"):
                await asyncio.to_thread(ask)
        async with subscribe(bob, m.Hello(kind="observer")) as observer:
            assert isinstance(await observer.receive(), m.Note)
        async with subscribe(bob, m.Hello(kind="pool", pool="local")) as pool:
            answer = await pool.receive()
            assert isinstance(answer, m.JoinRefused)
            assert "FOLDER/ticket" in answer.reason
        assert scene.server.coordinator.wanted == 1
        await scene.until(lambda: scene.events("ticket issued"))
        assert [event["ticket"] for event in scene.events("ticket issued")] == ["bob"]
        told = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.name != TICKETS)
        assert bob.secret.encode() not in told

    play(tmp_path, scenario)


@pytest.mark.failure(
    "External workers, pools and machines",
    "an issued ticket has expired",
    seen="an external worker that joins with it gets an error",
    outcome="its exit code is 1; workers that have joined stay",
)
def test_an_expired_one_lets_nobody_new_in_and_keeps_who_is(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = IssuedTicket(name="bob", secret=new_secret(), expires=time.time() + 3600)
        ticket = await issue(scene, bob)
        trainer = await asyncio.to_thread(Trainer, ticket, Board(), "w1")
        try:
            await scene.in_view("w1")
            await issue(scene, msgspec.structs.replace(bob, expires=time.time() - 1))
            before = scene.server._workers["w1"]
            before.abort()
            await scene.until(lambda: scene.server._workers.get("w1") not in (None, before))
            step = trainer.step
            await scene.until(lambda: trainer.step > step + 3)
            assert trainer.client.instructions.exit is None
            why = r"\bbob\b"
            await asyncio.to_thread(declined, ticket, why)
            with pytest.raises(UsageError, match=why):
                await asyncio.to_thread(Api(ticket).status)
            async with subscribe(ticket, m.Hello(kind="observer")) as observer:
                refused = await observer.receive()
            assert isinstance(refused, m.JoinRefused)
            assert re.search(why, refused.reason)
            await stranger_told(scene, refused.reason)
            assert list(scene.server.coordinator.workers) == ["w1"]
        finally:
            await asyncio.to_thread(trainer.stop)

    play(tmp_path, scenario)


def test_who_watches_by_one_that_expires_goes_on_and_by_one_that_is_revoked_does_not(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = IssuedTicket(name="bob", secret=new_secret(), expires=time.time() + 3600)
        eve = IssuedTicket(name="eve", secret=new_secret())
        ticket = await issue(scene, eve, bob)
        hers = msgspec.structs.replace(scene.ticket, secret=eve.secret)
        watching = m.Hello(kind="observer")
        async with subscribe(ticket, watching) as by_bob, subscribe(hers, watching) as by_eve:
            await scene.until(lambda: len(scene.server._observers._connections) == 2)
            await issue(
                scene,
                msgspec.structs.replace(eve, revoked=True),
                msgspec.structs.replace(bob, expires=time.time() - 1),
            )
            while await asyncio.wait_for(by_eve.receive(), 20) is not None:
                pass  # until it is closed
            async with subscribe(ticket, watching) as late:
                assert isinstance(await late.receive(), m.JoinRefused)
                assert await asyncio.wait_for(late.receive(), 20) is None
            await asyncio.to_thread(scene.api.scale, 3)
            lines: list[bytes] = []
            while not any(b'"event":"scale"' in line for line in lines):
                note = await asyncio.wait_for(by_bob.receive(), 20)
                assert isinstance(note, m.Note)
                lines.append(note.line)

    play(tmp_path, scenario)


def test_a_revoked_one_puts_out_who_came_by_it_for_good(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob, eve = (IssuedTicket(name=name, secret=new_secret()) for name in ("bob", "eve"))
        write_tickets(scene.folder / TICKETS, (eve,))
        ticket = await issue(scene, eve, bob)
        hers = msgspec.structs.replace(scene.ticket, secret=eve.secret)
        scene.worker("w1", stay=True)
        scene.worker("w2", stay=True).ticket = hers
        external_worker = await asyncio.to_thread(Trainer, ticket, Board(), "w3")
        try:
            await scene.until(lambda: "w3" in scene.server.coordinator.workers)
            async with subscribe(ticket, m.Hello(kind="observer")) as observer:
                await observer.receive()
                await issue(scene, eve, msgspec.structs.replace(bob, revoked=True))
                while await asyncio.wait_for(observer.receive(), 20) is not None:
                    pass  # until it is closed
            await scene.until(lambda: external_worker.client.instructions.exit)
            assert external_worker.client.instructions.exit is not None
            assert external_worker.client.instructions.exit.code == EXIT_BANNED
            assert re.search(r"\bbob\b", external_worker.client.instructions.exit.reason)
            await scene.in_view("w1", "w2")
            await asyncio.to_thread(declined, ticket, r"\bbob\b")
            with pytest.raises(UsageError, match=r"\bbob\b"):
                await asyncio.to_thread(Api(ticket).alive)
            assert [event["ticket"] for event in scene.events("ticket revoked")] == ["bob"]
            assert {event["worker"] for event in scene.events("lost")} <= {"w3"}
            await asyncio.to_thread(Api(hers).status)
        finally:
            await asyncio.to_thread(external_worker.stop)

    play(tmp_path, scenario)


def test_who_was_away_when_its_ticket_was_revoked_is_put_out_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = IssuedTicket(name="bob", secret=new_secret())
        ticket = await issue(scene, bob)
        scene.worker("w1", stay=True)
        external_worker = scene.worker("w2", stay=True)
        external_worker.ticket = ticket
        await scene.in_view("w1", "w2")
        write_tickets(scene.folder / TICKETS, (msgspec.structs.replace(bob, revoked=True),))
        external_worker.ticket = msgspec.structs.replace(ticket, address="http://127.0.0.1:1")  # nobody is there
        scene.server._workers["w2"].abort()
        await scene.until(lambda: not scene.server.coordinator.workers["w2"].connected)
        await asyncio.to_thread(scene.api.reread_tickets)
        external_worker.ticket = ticket
        assert await asyncio.wait_for(scene.tasks["w2"], 20) == EXIT_BANNED
        await scene.in_view("w1")

    play(tmp_path, scenario, heartbeat_timeout_s=10.0)


def test_what_has_become_of_them_is_in_the_journal_when_that_is_answered(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.serving.cancel()  # no ticks: nothing else writes the journal
        bob = IssuedTicket(name="bob", secret=new_secret())
        await issue(scene, bob)
        await issue(scene, msgspec.structs.replace(bob, revoked=True))
        with closing(sqlite3.connect(tmp_path / JOURNAL)) as journal:
            kept = journal.execute("SELECT event, detail FROM events WHERE event LIKE 'ticket%' ORDER BY id").fetchall()
        assert kept == [("ticket issued", '{"ticket":"bob"}'), ("ticket revoked", '{"ticket":"bob"}')]

    play(tmp_path, scenario)


def test_one_that_is_not_in_the_file_is_a_strangers(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = IssuedTicket(name="bob", secret=new_secret())
        ticket = await issue(scene, bob)
        async with subscribe(ticket, m.Hello(kind="observer")) as observer:
            await observer.receive()
            (scene.folder / TICKETS).write_bytes(b"[]")
            await asyncio.to_thread(scene.api.reread_tickets)
            while await asyncio.wait_for(observer.receive(), 20) is not None:
                pass
        with pytest.raises(NotTheCoordinator):
            await asyncio.to_thread(Api(ticket).status)
        await asyncio.to_thread(scene.api.status)

    play(tmp_path, scenario)


DAMAGED = [b"", b"{}", b"[{}]", b"\xff" * 50, b'[{"name":"a b","secret":"' + b"0" * 64 + b'"}]', b"[" * 100_000]


@pytest.mark.failure(
    "Files, disks and output",
    "the file `tickets` in the run's folder is damaged",
    seen="`THE ISSUED TICKETS ARE DAMAGED` when it is read",
    outcome="known tickets stay valid; after a restart of the coordinator only the owner's ticket is accepted",
)
def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    path, secret = tmp_path / TICKETS, new_secret()
    tickets = Tickets(secret, path)
    assert (tickets.reread(), len(tickets.secrets_by_id)) == ([], 1)
    bob = IssuedTicket(name="bob", secret=new_secret())
    write_tickets(path, (bob,))
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tickets.reread(), len(tickets.secrets_by_id)) == ([TicketIssuedEvent(ticket="bob")], 2)
    for content in (*DAMAGED, msgspec.json.encode((bob, bob))):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(str(path))) as raised:
            tickets.reread()
        assert bob.secret not in str(raised.value) + repr(bob)
        assert len(tickets.secrets_by_id) == 2
    path.unlink()
    assert (tickets.reread(), len(tickets.secrets_by_id)) == ([TicketRevokedEvent(ticket="bob")], 1)


@pytest.mark.failure("Files, disks and output", "the file `tickets` in the run's folder is damaged")
def test_a_damaged_file_is_an_event_and_ends_nothing(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        (scene.folder / TICKETS).write_bytes(b"{}")
        await asyncio.to_thread(scene.api.reread_tickets)
        await scene.until(lambda: scene.events("tickets damaged"))
        await asyncio.to_thread(scene.api.status)

    play(tmp_path, scenario)


def test_the_owners_secret_in_the_file_does_not_make_the_owner_an_external_worker(tmp_path: Path) -> None:
    secret = new_secret()
    write_tickets(tmp_path / TICKETS, (IssuedTicket(name="owner", secret=secret, revoked=True),))
    tickets = Tickets(secret, tmp_path / TICKETS)
    tickets.reread()
    [owner] = tickets.secrets_by_id
    assert tickets.forbids(owner, "/api/stop") == tickets.revoked(owner) == tickets.over(owner) == ""
    assert read_tickets(tmp_path / TICKETS)[0].revoked
