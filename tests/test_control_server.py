"""The server on loopback, with fake workers in the same event loop. Every wait is for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_worker import FakeWorker

from farandole.control import connection as connection_module
from farandole.control.api import Api
from farandole.control.journal import Journal
from farandole.control.server import Server
from farandole.control.subscription import subscribe
from farandole.control.ticket import Ticket, new_secret
from farandole.control.tls import Certificate
from farandole.errors import CoordinatorUnreachable, UsageError
from farandole.membership import messages as m
from farandole.membership.records import RunSettings

pytestmark = pytest.mark.timeout(60)
Scenario = Callable[["Stage"], Awaitable[None]]


class Stage:
    """A server, its ticket, and the fake workers that a test lets in."""

    def __init__(self, server: Server, ticket: Ticket, folder: Path) -> None:
        self.server = server
        self.ticket = ticket
        self.folder = folder
        self.serving = asyncio.create_task(server.serve())
        self.workers: dict[str, FakeWorker] = {}
        self.tasks: dict[str, asyncio.Task[int]] = {}
        self.api = Api(ticket)

    def worker(self, name: str, **options: Any) -> FakeWorker:
        worker = FakeWorker(self.ticket, worker=name, **options)
        self.workers[name] = worker
        self.tasks[name] = asyncio.create_task(worker.run())
        return worker

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), timeout_s)

    async def in_view(self, *names: str) -> None:
        coordinator = self.server.coordinator
        await self.until(
            lambda: (
                coordinator.view
                and set(coordinator.view.members) == set(names)
                and not coordinator.proposed
                and not coordinator.stopping
            )
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("event") == name]


@asynccontextmanager
async def stage(
    folder: Path, *, certificate: Certificate | None = None, **settings: Any
) -> AsyncGenerator[Stage, None]:
    secret = new_secret()
    with closing(Journal(folder)) as journal:
        server = Server(RunSettings(run="r", **settings), secret=secret, journal=journal)
        address = await server.start(certificate=certificate)
        pin = certificate.fingerprint if certificate else ""
        ticket = Ticket(address=address, secret=secret, run="r", fingerprint=pin)
        scene = Stage(server, ticket, folder)
        try:
            yield scene
        finally:
            for task in (scene.serving, *scene.tasks.values()):
                task.cancel()
            await asyncio.gather(scene.serving, *scene.tasks.values(), return_exceptions=True)
            await server.close()


def play(folder: Path, scenario: Scenario, **settings: Any) -> None:
    async def perform() -> None:
        async with stage(folder, **settings) as scene:
            await scenario(scene)

    asyncio.run(perform())


def test_workers_join_train_and_finish(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1", folder=tmp_path)
        scene.worker("w2", folder=tmp_path)
        await scene.in_view("w1", "w2")
        await scene.until(lambda: scene.server.status().step > 3)
        (tmp_path / "finish").touch()
        await scene.until(scene.serving.done)
        assert [await task for task in scene.tasks.values()] == [0, 0]
        assert scene.server.status().state == "over"
        assert [(e["equal"]) for e in scene.events("finished")] == [True]
        assert scene.events("state lost") == []

    play(tmp_path, scenario)


def test_status_tells_everything_that_was_promised(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        assert (await asyncio.to_thread(scene.api.status)).state == "starting"
        scene.worker("w1", pool="local")
        scene.worker("")
        await scene.in_view("w1", "guest-1")
        await scene.until(lambda: scene.server.status().samples_per_s)
        status = await asyncio.to_thread(scene.api.status)
        assert (status.run, status.state, status.view.size) == ("r", "training", 2)
        assert (status.wanted, status.minimum, status.maximum, status.total) == (2, 1, 3, 1000)
        assert status.step > 0
        assert status.loss is not None
        assert {(w.id, w.rank, w.state) for w in status.workers} == {("w1", 0, "member"), ("guest-1", 1, "member")}

    play(tmp_path, scenario, wanted=2, maximum=3)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer 00"}, {"Authorization": "Bearer é"}])
@pytest.mark.parametrize("path", ["/control", "/api/status", "/nothing"])
def test_nobody_gets_anything_without_the_secret(tmp_path: Path, header: dict[str, str], path: str) -> None:
    async def scenario(scene: Stage) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{scene.ticket.address}{path}", headers=header) as response,
        ):
            assert response.status == 401

    play(tmp_path, scenario)


BAD_FRAMES = [
    pytest.param(b"\xc1", "malformed", id="not msgpack"),
    pytest.param(b"", "malformed", id="empty"),
    pytest.param(m.encode(m.Prepared(view=1)), "malformed", id="no Hello first"),
    pytest.param(m.encode(m.Hello(kind="king")), "malformed", id="unknown kind"),
    pytest.param(m.encode(m.Stop(stop=1)), "malformed", id="a coordinator's message"),
    pytest.param(b"\x00" * (m.MAX_MESSAGE_BYTES + 1), "malformed", id="too large"),
]


@pytest.mark.parametrize(("frame", "event"), BAD_FRAMES)
def test_what_breaks_the_protocol_is_closed_and_recorded_and_the_run_goes_on(
    tmp_path: Path, frame: bytes, event: str
) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        headers = {"Authorization": scene.ticket.authorization}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{scene.ticket.address}/control", headers=headers) as socket,
        ):
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(frame)
            await asyncio.wait_for(socket.receive(), 10)
            await scene.until(lambda: scene.events(event))
            assert socket.closed or (await socket.receive()).type is not aiohttp.WSMsgType.BINARY
        step = scene.server.status().step
        await scene.until(lambda: scene.server.status().step > step)
        assert scene.events("lost") == []

    play(tmp_path, scenario)


def test_a_members_malformed_message_is_its_loss_and_not_the_runs(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        broken = scene.worker("w2")
        await scene.in_view("w1", "w2")
        await broken.socket.send_str("text")
        await scene.in_view("w1")
        assert [e["source"] for e in scene.events("malformed")] == ["worker w2"]
        assert [e["worker"] for e in scene.events("lost")] == ["w2"]

    play(tmp_path, scenario)


def test_a_closed_connection_stops_the_view_for_the_others(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        first = scene.worker("w1")
        scene.worker("w2")
        await scene.in_view("w1", "w2")
        scene.tasks["w2"].cancel()
        await scene.in_view("w1")
        assert [type(x) for x in (*first.got(m.Stop), *first.got(m.Resume))] == [m.Stop, m.Resume]

    play(tmp_path, scenario)


def test_a_peer_that_never_reads_costs_its_connection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LIMIT_BYTES", 1_000_000)

    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        host, port = scene.ticket.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        handshake = (
            f"GET /control HTTP/1.1\r\nHost: x\r\nAuthorization: {scene.ticket.authorization}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        writer.write(handshake.encode())
        await reader.readuntil(b"\r\n\r\n")
        hello = m.encode(m.Hello(kind="worker", worker="deaf"))
        masked = bytes([0x82, 0x80 | len(hello), 0, 0, 0, 0]) + hello  # a frame with a mask of zeros
        writer.write(masked)
        await scene.until(lambda: "deaf" in scene.server.coordinator.workers)
        huge = m.Leave(reason="x" * 500_000)
        connection = scene.server._workers["deaf"]
        for _ in range(40):
            connection.send(m.encode(huge))
        await scene.until(lambda: "deaf" not in scene.server.coordinator.workers)
        writer.close()
        assert scene.server.coordinator.view

    play(tmp_path, scenario)


def test_evicted_worker_is_told_and_closed(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        second = scene.worker("w2")
        await scene.in_view("w1", "w2")
        await second.tell(m.Hello(kind="worker"))  # a second Hello is not in the protocol
        await scene.in_view("w1")
        assert await scene.tasks["w2"] == 3, "the code of Goodbye to an evicted worker"
        assert scene.server.coordinator.roster().evicted == ("w2",)

    play(tmp_path, scenario)


def test_pools_get_the_roster_at_connect_and_at_each_change(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1", pool="local")
        await scene.in_view("w1")
        async with subscribe(scene.ticket, m.Hello(kind="pool", pool="local")) as pool:
            assert await pool.receive() == m.Roster(wanted=1)
            await asyncio.to_thread(scene.api.scale, 2)
            assert await pool.receive() == m.Roster(wanted=2)
            await asyncio.to_thread(scene.api.stop, "enough", 5)
            ending = await pool.receive()
            assert ending == m.Roster(wanted=0)
            assert await pool.receive() == m.Roster(wanted=0, over=5, reason="enough")
            assert await scene.tasks["w1"] == 5
            await scene.server.close()
            assert await pool.receive() is None

    play(tmp_path, scenario)


def test_processes_that_die_before_hello_end_a_run_that_never_began(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        async with subscribe(scene.ticket, m.Hello(kind="pool", pool="local", host="here")) as pool:
            for number in range(5):
                await pool.send(m.Suspect(view=0, peer=f"w{number}", reason="exited with code 1"))
            await scene.until(scene.serving.done)
        assert len(scene.events("exited")) == 5
        over = scene.server.coordinator.over
        assert over is not None
        assert over.code == 1
        assert "5 workers in a row died before they could join" in over.reason

    play(tmp_path, scenario)


def test_observers_get_what_was_and_what_comes(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        async with subscribe(scene.ticket, m.Hello(kind="observer")) as observer:
            seen: list[dict[str, Any]] = []

            async def until(name: str | None) -> None:
                while not any(line.get("event") == name for line in seen):
                    note = await asyncio.wait_for(observer.receive(), 10)
                    assert isinstance(note, m.Note)
                    seen.append(note.line)

            await until("view")
            await until(None)  # a step
            await asyncio.to_thread(scene.api.scale, 3)
            await until("scale")
        written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert written[: len(seen)] == seen, "the same lines, in the same order"

    play(tmp_path, scenario)


def test_requests_that_cannot_be_met_answer_with_the_reason(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        with pytest.raises(UsageError, match="below the run's --min 1"):
            await asyncio.to_thread(scene.api.scale, 0)
        with pytest.raises(UsageError, match=r"release w9: no such worker or host; there are: w1 on here"):
            await asyncio.to_thread(scene.api.release, "w9")
        headers = {"Authorization": scene.ticket.authorization}
        async with aiohttp.ClientSession(headers=headers) as session:
            for body in (b"", b"[]", b'{"wanted": "many"}', b'{"wanted": 2, "more": 3}'):
                async with session.post(f"{scene.ticket.address}/api/scale", data=body) as response:
                    assert response.status == 400
                    assert "/api/scale" in (await response.json())["error"]

    play(tmp_path, scenario)


def test_strange_secret_and_dead_address_are_unreachable(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        other = Ticket(address=scene.ticket.address, secret=new_secret(), run="old")
        with pytest.raises(CoordinatorUnreachable, match="answers 401"):
            await asyncio.to_thread(Api(other).status)
        with pytest.raises(CoordinatorUnreachable, match="401"):
            async with subscribe(other, m.Hello(kind="observer")):
                pass
        dead = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="old")
        with pytest.raises(CoordinatorUnreachable, match="nobody answers at http://127"):
            await asyncio.to_thread(Api(dead).status)
        with pytest.raises(CoordinatorUnreachable, match="no answer at"):
            async with subscribe(dead, m.Hello(kind="observer")):
                pass

    play(tmp_path, scenario)


def test_only_loopback_is_served(tmp_path: Path) -> None:
    async def start() -> None:
        with closing(Journal(tmp_path)) as journal:
            await Server(RunSettings(run="r"), secret="s", journal=journal).start("0.0.0.0")

    with pytest.raises(UsageError, match=r"coordinator on 0\.0\.0\.0: .* TLS"):
        asyncio.run(start())


def test_an_error_of_our_own_ends_the_server_loudly(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        scene.server.coordinator.workers["w1"].beat = None  # type: ignore[assignment]  # a bug, planted
        with pytest.raises(CoordinatorUnreachable, match="answers 500"):
            await asyncio.to_thread(scene.api.status)
        with pytest.raises(AttributeError):
            await asyncio.wait_for(asyncio.shield(scene.serving), 10)

    play(tmp_path, scenario)


def test_a_request_cut_short_is_no_error_of_ours(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        host, port = scene.ticket.address.removeprefix("http://").split(":")
        for body in (b"", b"{", b"5\r\n{", b"zz\r\n{"):
            for kind in (b"Content-Length: 100", b"Transfer-Encoding: chunked"):
                _, writer = await asyncio.open_connection(host, int(port))
                head = f"POST /api/stop HTTP/1.1\r\nHost: x\r\nAuthorization: {scene.ticket.authorization}\r\n"
                writer.write(head.encode() + kind + b"\r\n\r\n" + body)
                await writer.drain()
                await asyncio.to_thread(scene.api.status)  # what came is being worked on
                writer.transport.abort()
        await asyncio.to_thread(scene.api.scale, 2)
        assert not scene.serving.done()
        assert scene.server.status().state == "starting"

    play(tmp_path, scenario)
