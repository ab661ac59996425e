"""The run's code and what to do with it, asked of the coordinator: by whoever may join, and by nobody else."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.code import pack
from farandole.control.api import Api
from farandole.control.client import unpacked as fetched
from farandole.control.run_folder import PACK, TICKETS
from farandole.control.security import IssuedTicket, write_tickets
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import FarandoleError, NotTheCoordinator, UsageError
from farandole.protocol.messages import Job
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pack.Pack:
    """A pack of half a megabyte, and a home to unpack it in."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("TRAIN = 1\n")
    (project / "table").write_bytes(os.urandom(500_000))
    (tmp_path / "run").mkdir()
    return pack.pack(project, str(project / "train.py"))


def job(made: pack.Pack) -> Job:
    return Job(script=made.script, arguments=("--epochs", "3"), pack=made.hash, setup="make")


def with_pack(tmp_path: Path, made: pack.Pack) -> dict[str, Any]:
    (tmp_path / "run" / PACK).write_bytes(made.content)
    return {"folder": str(tmp_path / "run"), "job": job(made)}


async def issue(scene: Stage, issued: IssuedTicket) -> Ticket:
    write_tickets(scene.folder / TICKETS, (issued,))
    await asyncio.to_thread(scene.api.reread_tickets)
    return msgspec.structs.replace(scene.ticket, secret=issued.secret)


def test_who_may_join_gets_it(made: pack.Pack, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bob = await issue(scene, IssuedTicket(name="bob", secret=new_secret()))
        for ticket in (scene.ticket, bob):
            assert await asyncio.to_thread(Api(ticket).job) == job(made)
            assert await asyncio.to_thread(Api(ticket).code) == made.content
        place = await asyncio.to_thread(fetched, bob, made.hash)
        assert (place / "train.py").read_text() == "TRAIN = 1\n"

    play(tmp_path / "run", scenario, **with_pack(tmp_path, made))


def test_a_dozen_at_once_get_it(made: pack.Pack, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(12) as threads:  # the loop's own ones are the server's
            got = await asyncio.gather(*(loop.run_in_executor(threads, Api(scene.ticket).code) for _ in range(12)))
        assert set(got) == {made.content}

    play(tmp_path / "run", scenario, **with_pack(tmp_path, made))


def test_nobody_else_does(made: pack.Pack, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        over = await issue(scene, IssuedTicket(name="bob", secret=new_secret(), expires=time.time() - 1))
        for ask in (Api(over).job, Api(over).code):
            with pytest.raises(UsageError, match=r"\bbob\b"):
                await asyncio.to_thread(ask)
        wrong = msgspec.structs.replace(scene.ticket, secret=new_secret())
        with pytest.raises(NotTheCoordinator, match=re.escape(scene.ticket.address)):
            await asyncio.to_thread(Api(wrong).code)
        assert await asyncio.to_thread(plainly, scene.ticket, "/api/code") == (401, b"")

    play(tmp_path / "run", scenario, **with_pack(tmp_path, made))


def plainly(ticket: Ticket, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(ticket.address.partition("://")[2], timeout=200)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_run_that_has_none_says_so_and_goes_on(made: pack.Pack, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        for ask in (scene.api.job, scene.api.code):
            with pytest.raises(UsageError, match="--files"):
                await asyncio.to_thread(ask)

    play(tmp_path / "run", scenario, folder=str(tmp_path / "run"))

    async def gone(scene: Stage) -> None:
        with pytest.raises(UsageError, match=re.escape(str(tmp_path / "run" / PACK))):
            await asyncio.to_thread(scene.api.code)
        await asyncio.to_thread(scene.api.alive)

    play(tmp_path / "run", gone, folder=str(tmp_path / "run"), job=job(made))


def test_a_file_that_is_another_one_now_is_not_unpacked(made: pack.Pack, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        (tmp_path / "run" / PACK).write_bytes(made.content[: len(made.content) // 2])
        with pytest.raises(FarandoleError, match=rf"\b{len(made.content) // 2}\b.*{made.hash}"):
            await asyncio.to_thread(fetched, scene.ticket, made.hash)
        assert not pack.place_of(made.hash).exists()

    play(tmp_path / "run", scenario, **with_pack(tmp_path, made))
