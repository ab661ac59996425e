"""The dashboard's server: who may see it, who may act, and that nothing of it is anybody else's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from farandole.control.run_folder import LOGS, METRICS
from farandole.errors import UsageError
from farandole.observe import report as page
from farandole.observe.dashboard import LINK_S, MOST, DashboardServer, Login, RunWatch
from tests.support.mentioned import mentions
from tests.support.told_run import RUN, STATUS, written

PLACES = ["/", "/ticks", "/log?worker=w1", *(f"/{name}" for name in (*page.STYLES, *page.LIVE))]


class Coordinator:
    """Keeps what it was asked to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def status(self) -> Any:
        return STATUS

    def scale(self, wanted: int) -> None:
        self.asked.append(wanted)

    def release(self, name: str) -> None:
        if name == "w9":
            raise UsageError("no worker or host w9")
        self.asked.append(name)

    def stop(self, reason: str, code: int) -> None:
        self.asked.append((reason, code))


class Looked:
    """The server of a run that is on, and a browser."""

    def __init__(self, folder: Path, browser: aiohttp.ClientSession) -> None:
        self.coordinator = Coordinator()
        self.watch = RunWatch(folder, lambda: self.coordinator, lambda: True)  # type: ignore[arg-type, return-value]
        self.server = DashboardServer(self.watch, lambda: self.coordinator)  # type: ignore[arg-type, return-value]
        self.browser = browser

    async def get(self, path: str, **more: Any) -> tuple[int, str]:
        async with self.browser.get(self.server.address + path, **more) as answer:
            return answer.status, "" if path == "/ticks" and answer.status == 200 else await answer.text()

    async def act(self, doing: Any, **headers: str) -> int:
        given = {"Origin": self.server.address, "Content-Type": "application/json", **headers}
        data = doing if isinstance(doing, bytes) else json.dumps(doing).encode()
        async with self.browser.post(self.server.address + "/act", data=data, headers=given) as answer:
            return answer.status


def looked(tmp_path: Path, visit: Callable[[Looked], Awaitable[None]]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / METRICS).write_bytes(b"".join(written(RUN)))
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / "w1.log").write_text("one\x1b[31m\ntwo\n")
    (tmp_path / "secret.log").write_text("nobody's business")

    async def all_of_it() -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            there = Looked(tmp_path, browser)
            await there.server.start()
            following = asyncio.create_task(there.watch.follow())
            try:
                await visit(there)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await there.server.close()

    asyncio.run(all_of_it())


def test_a_link_works_once_and_is_not_the_cookie(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        link = there.server.link()
        async with there.browser.get(link, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert link.rpartition("=")[2] not in cookie
        assert (await there.get("/"))[0] == 200
        async with aiohttp.ClientSession() as another, another.get(link, allow_redirects=False) as answer:
            assert answer.status == 401
            assert mentions(await answer.text(), "farandole dashboard")
        async with there.browser.get(link, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/"), "who is in already goes on"

    looked(tmp_path, visit)


def test_without_a_cookie_there_is_nothing(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        for path in PLACES:
            status, words = await there.get(path)
            assert status == 401, path
            assert mentions(words, "farandole dashboard")
        assert await there.act({"do": "stop"}) == 401
        assert (await there.get("/", cookies={"farandole-1": "x"}))[0] == 401
        assert there.coordinator.asked == []

    looked(tmp_path, visit)


def test_other_sites_and_other_names_get_nowhere(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        await there.get(there.server.link().removeprefix(there.server.address))
        stop = {"do": "stop"}
        assert await there.act(stop, Origin="http://evil.example") == 403
        assert await there.act(stop, Origin="http://127.0.0.1:1") == 403
        assert await there.act(stop, Origin="") == 403
        assert await there.act(stop, Origin="null") == 403
        assert await there.act(stop, **{"Content-Type": "text/plain"}) == 403, "what a form of another site can send"
        assert (await there.get("/", headers={"Host": "evil.example"}))[0] == 403, "a name that was made to point here"
        assert there.coordinator.asked == []
        async with there.browser.get(there.server.address) as answer:
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert "unsafe" not in answer.headers["Content-Security-Policy"]

    looked(tmp_path, visit)


def test_what_is_asked_for_is_done_and_what_can_not_be_is_said(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        await there.get(there.server.link().removeprefix(there.server.address))
        assert await there.act({"do": "scale", "wanted": 3}) == 200
        assert await there.act({"do": "release", "name": "w2"}) == 200
        assert await there.act({"do": "stop"}) == 200
        assert there.coordinator.asked == [3, "w2", ("farandole dashboard", 0)]
        assert await there.act({"do": "release", "name": "w9"}) == 409
        for wrong in (
            {"do": "fly"},
            {"do": "scale", "wanted": -1},
            {"do": "scale", "wanted": 10**9},
            [],
            b"{",
            b"\xff",
        ):
            assert await there.act(wrong) == 400
        assert await there.act(b"x" * 100_000) in (400, 413)

    looked(tmp_path, visit)


def test_logs_are_those_of_workers_and_nothing_else(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        await there.get(there.server.link().removeprefix(there.server.address))
        status, text = await there.get("/log?worker=w1")
        assert status == 200
        assert "one" in text
        assert "\x1b" not in text
        for wrong in ("w7", "../secret", "", "/etc/passwd", "w1.log", "%00"):
            assert (await there.get(f"/log?worker={wrong}"))[0] == 404, wrong

    looked(tmp_path, visit)


async def events(answer: aiohttp.ClientResponse) -> Any:
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:-1].decode()
            data = (await answer.content.readline())[6:-1]
            yield name, json.loads(data) if name != "reading" else data


def test_ticks_bring_what_is_new(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        await there.get(there.server.link().removeprefix(there.server.address))
        seen: list[Any] = []
        async with there.browser.get(there.server.address + "/ticks") as answer:
            async for name, data in events(answer):
                if name == "run":
                    assert data == tmp_path.name
                if name == "tick":
                    seen.append(data)
                    if len(seen) == 1:
                        with (tmp_path / METRICS).open("ab") as file:
                            file.write(b"".join(written([{"step": 20, "time": 130.0}])))
                    if any(data["series"] for data in seen[1:]):
                        break
        assert seen[0]["series"]["step/loss"]["at"] == 0
        assert len(seen[0]["series"]["step/loss"]["x"]) == 40
        assert seen[-1]["series"]["step/loss"] == {"at": 40, "x": [20, 20], "y": [0.5, 0.5]}
        assert there.watch.status is not None, "the coordinator is asked while somebody looks"

    looked(tmp_path, visit)


def test_links_end_and_are_few() -> None:
    now = [0.0]
    login = Login(lambda: now[0])
    old = login.link()
    now[0] = LINK_S + 1
    assert login.enter(old) == ""
    links = [login.link() for _ in range(MOST + 1)]
    assert login.enter(links[0]) == "", "the oldest is forgotten"
    value = login.enter(links[1])
    assert login.knows(value)
    assert login.enter(links[1]) == ""
    assert not login.knows("")
    assert not login.knows(links[1])


def test_a_port_that_is_taken_is_an_error_in_words(tmp_path: Path) -> None:
    async def visit(there: Looked) -> None:
        port = int(there.server.address.rpartition(":")[2])
        other = DashboardServer(there.watch, lambda: None)
        with pytest.raises(UsageError, match=f"--port {port}"):
            await other.start(port)
        await other.close()

    looked(tmp_path, visit)
