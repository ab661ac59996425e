"""Who holds the coordinator's address without the ticket gets nothing that opens anything, and is told apart."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from farandole.control import security as challenges
from farandole.control.api import Api
from farandole.control.client import dial
from farandole.control.security import Examination, TicketProof, ticket_id
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import NotTheCoordinator
from tests.support.stage import Stage, play
from tests.support.trainer import Board, Trainer

pytestmark = pytest.mark.timeout(60)


def ticket(port: int = 1) -> Ticket:
    return Ticket(address=f"http://127.0.0.1:{port}", secret=new_secret(), run="r")


# --- the challenge alone ---------------------------------------------------------------------------------------


def test_two_that_know_the_secret_admit_each_other() -> None:
    mine = ticket()
    other = new_secret()
    claim = TicketProof(mine)
    examination = Examination({ticket_id(other): other, ticket_id(mine.secret): mine.secret})
    assert examination.passed(claim.answer(examination.challenge(claim.opening))) == ticket_id(mine.secret)


def test_a_server_proves_itself_over_this_clients_nonce_and_ticket() -> None:
    mine = ticket()
    real = Examination({ticket_id(mine.secret): mine.secret})
    recorded = real.challenge(TicketProof(mine).opening)
    own = new_secret()
    forged = Examination({ticket_id(mine.secret): own}).challenge(TicketProof(mine).opening)
    another = Examination({ticket_id(own): own}).challenge(TicketProof(ticket()).opening)
    for answer in (None, "", "Basic realm=x", "Bearer", recorded, forged, another, recorded.swapcase(), recorded + " "):
        with pytest.raises(NotTheCoordinator) as raised:
            TicketProof(mine).answer(answer)
        assert mine.secret not in str(raised.value)


def test_a_proof_is_good_for_its_connection_and_once() -> None:
    mine = ticket()
    known = {ticket_id(mine.secret): mine.secret}
    first, second, claim = Examination(known), Examination(known), TicketProof(mine)
    proof = claim.answer(first.challenge(claim.opening))
    second.challenge(claim.opening)
    assert second.passed(proof) == "", "recorded on another connection, with the same opening"
    assert Examination(known).passed(proof) == "", "nothing was asked there"
    assert first.challenge(claim.opening) == "", "one question a connection"
    assert first.passed(proof) == ticket_id(mine.secret)
    assert first.passed(proof) == ""


def test_a_wrong_answer_spends_the_question() -> None:
    mine = ticket()
    examination, claim = Examination({ticket_id(mine.secret): mine.secret}), TicketProof(mine)
    proof = claim.answer(examination.challenge(claim.opening))
    assert examination.passed(f"Farandole proof={'0' * 64}") == ""
    assert examination.passed(proof) == ""


def test_a_servers_proof_is_no_clients() -> None:
    mine = ticket()
    examination, claim = Examination({ticket_id(mine.secret): mine.secret}), TicketProof(mine)
    theirs = examination.challenge(claim.opening).rpartition("proof=")[2]
    assert examination.passed(f"Farandole proof={theirs}") == ""


def test_of_a_ticket_nobody_is_told_whether_there_is_one() -> None:
    """The answers look alike, and even who knows the key of the unknown (nobody does) is not let in."""
    mine, unknown = ticket(), ticket()
    known = {ticket_id(mine.secret): mine.secret}
    shapes = {
        challenges.CHALLENGE.sub("same", Examination(known).challenge(TicketProof(each).opening))
        for each in (mine, unknown)
    }
    assert shapes == {"same"}
    examination = Examination(known)
    key, opening = challenges._no_key, TicketProof(unknown).opening
    question = examination.challenge(opening)
    name, theirs = challenges.OPENING.fullmatch(opening).groups()  # type: ignore[union-attr]
    ours = challenges.CHALLENGE.fullmatch(question)[1]  # type: ignore[index]
    assert examination.passed(f"Farandole proof={challenges._mac(key, 'client', name, theirs, ours)}") == ""


# --- a thief at the address ------------------------------------------------------------------------------------


def found(secret: str, heard: bytes) -> bool:
    raw = bytes.fromhex(secret)
    forms = (secret.encode(), secret.upper().encode(), raw, raw[::-1], base64.b64encode(raw)[:40])
    return any(form in heard for form in forms)


class Thief:
    """Holds an address, keeps all that it hears, and answers every head with what `answer` makes of it."""

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.answer = answer
        self.heard = b""
        self.gone = asyncio.Event()  # whoever has come is
        self._server: asyncio.Server

    async def hold(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", port)
        return self._server.sockets[0].getsockname()[1]

    def let_go(self) -> None:
        self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heard += head
                writer.write(await self.answer(head))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self.gone.set()


def reply(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "Content-Length: 0", "", "")).encode()


def asks(value: str) -> bytes:
    return reply("401 Unauthorized", f"WWW-Authenticate: {value}")


def said(head: bytes) -> str:
    return head.decode().partition("Authorization: ")[2].partition("\r\n")[0]


ANSWERS: dict[str, Callable[[bytes], bytes]] = {
    "lets everybody in": lambda _: reply("200 OK"),
    "asks for the old kind": lambda _: asks("Bearer"),
    "asks for a password": lambda _: asks('Basic realm="farandole"'),
    "sends elsewhere": lambda _: reply("307 Temporary Redirect", "Location: /api/stop"),
    "makes a proof up": lambda _: asks(f"Farandole nonce={'1' * 64}, proof={'2' * 64}"),
    "says back what it heard": lambda head: asks(f"Farandole nonce={'1' * 64}, proof={said(head)[-64:]}"),
    "has a secret of its own": lambda head: asks(
        Examination({said(head)[13:77]: new_secret()}).challenge(said(head)) or "too late"
    ),
    "switches protocols": lambda _: reply("101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"),
}


async def by_rest(ticket: Ticket) -> None:
    await asyncio.to_thread(Api(ticket).stop, "thief", 1)


async def by_websocket(ticket: Ticket) -> None:
    async with dial(ticket):
        raise AssertionError("it was let in")


@pytest.mark.parametrize("reach", [by_rest, by_websocket])
def test_a_thief_hears_nothing_that_opens_anything(reach: Callable[[Ticket], Awaitable[None]]) -> None:
    async def meet(answer: Callable[[bytes], bytes], mine: Ticket) -> bytes:
        async def answers(head: bytes) -> bytes:
            return answer(head)

        thief = Thief(answers)
        address = f"http://127.0.0.1:{await thief.hold()}"
        with pytest.raises(NotTheCoordinator):
            await reach(msgspec.structs.replace(mine, address=address))
        await asyncio.wait_for(thief.gone.wait(), 20)
        thief.let_go()
        return thief.heard

    for name, answer in ANSWERS.items():
        mine = ticket()
        heard = asyncio.run(meet(answer, mine))
        assert b"Farandole id=" in heard, name
        assert not found(mine.secret, heard), name
        assert b"proof=" not in heard, f"{name}: nothing proved itself, and so nothing was proved to it"


@pytest.mark.parametrize("reach", [by_rest, by_websocket])
def test_what_a_coordinator_has_said_to_a_thief_proves_nothing(
    tmp_path: Path, reach: Callable[[Ticket], Awaitable[None]]
) -> None:
    """It asks the coordinator in the ticket's name, and passes on what it hears."""

    async def scenario(scene: Stage) -> None:
        recorded = ""

        async def answers(head: bytes) -> bytes:
            nonlocal recorded
            if not recorded:  # the first time, for the client's nonce before
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(scene.ticket.address, headers={"Authorization": said(head)}) as asked,
                ):
                    recorded = asked.headers["WWW-Authenticate"]
                return reply("500 Oops")
            return asks(recorded)

        thief = Thief(answers)
        mine = msgspec.structs.replace(scene.ticket, address=f"http://127.0.0.1:{await thief.hold()}")
        for _ in range(2):
            with pytest.raises(NotTheCoordinator):
                await reach(mine)
        thief.let_go()
        assert not found(mine.secret, thief.heard)
        assert b"proof=" not in thief.heard

    play(tmp_path, scenario)


def test_a_worker_that_trains_is_not_ended_by_a_thief_at_the_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has no listener handed on: a coordinator somebody started by hand, or one on another machine."""

    async def scenario(scene: Stage) -> None:
        board = Board()
        trainer = await asyncio.to_thread(Trainer, scene.ticket, board, "w1")
        try:
            await scene.in_view("w1")
            listener = scene.server._listener
            assert listener is not None
            assert listener._socket is not None
            listener.close()
            scene.server._workers["w1"].abort()

            async def answers(head: bytes) -> bytes:
                return ANSWERS["makes a proof up"](head)

            thief = Thief(answers)
            await thief.hold(int(scene.ticket.address.rpartition(":")[2]))
            await scene.until(lambda: thief.heard.count(b"Farandole id=") >= 3)
            step = trainer.step
            await scene.until(lambda: trainer.step > step + 3)
            thief.let_go()
            assert trainer.client.instructions.exit is None
            assert not found(scene.ticket.secret, thief.heard)
        finally:
            await asyncio.to_thread(trainer.stop)

    play(tmp_path, scenario)
    told = [record for record in caplog.records if isinstance(record.args, tuple)]
    told = [record for record in told if any(isinstance(each, NotTheCoordinator) for each in record.args or ())]
    assert [record.levelno for record in told] == [logging.WARNING], caplog.text
