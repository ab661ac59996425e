"""The server on loopback: what workers, pools, observers and the command line get of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farandole.control.client import subscribe
from farandole.coordinator.journal import read_state
from farandole.coordinator.listener import LINES
from farandole.errors import CoordinatorUnreachable
from farandole.protocol import messages as m
from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.coordinator.state import Worker
from tests.support.fake_worker import FakeWorker
from tests.support.mentioned import mentions
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)


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


def test_a_closed_connection_is_no_death(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        first = scene.worker("w1")
        second = scene.worker("w2", stay=True)
        await scene.in_view("w1", "w2")
        await second.socket.close()
        await scene.until(lambda: first.got(m.Resume) and second.got(m.Resume))
        await scene.in_view("w1", "w2")
        assert scene.server.coordinator.view
        assert scene.server.coordinator.view.number > 1, "its return has stopped the view"
        assert len(second.got(m.Welcome)) == 2
        assert scene.events("lost") == []

    play(tmp_path, scenario)


def test_what_a_worker_hears_is_in_the_journal_by_then(tmp_path: Path) -> None:
    """A coordinator that is killed right after it has spoken is followed by one that knows what was said."""
    heard: Counter[tuple[str, bool]] = Counter()

    def note(worker: FakeWorker, message: m.Message) -> None:
        state = read_state(tmp_path) or Durable(fixed_targets={})
        match message:
            case m.Propose(view=view) | m.Resume(view=view):
                known = view in [issued.view for issued in state.issued]
            case m.Stop(stop=number):
                known = state.stops == number
            case m.Goodbye():
                known = state.over is not None or worker.id in state.departed
            case _:
                return
        heard[(type(message).__name__, known)] += 1

    async def scenario(scene: Stage) -> None:
        scene.serving.cancel()  # no ticks: nothing else writes the journal
        for name in ("w1", "w2"):
            worker = scene.worker(name, stay=True)
            worker.on_message = partial(note, worker)
        await scene.in_view("w1", "w2")
        await scene.workers["w2"].socket.close()
        await scene.until(lambda: scene.workers["w1"].got(m.Resume) and scene.workers["w2"].got(m.Resume))
        await scene.workers["w2"].tell(m.LeaveRequest(reason="SIGTERM"))
        assert await scene.tasks["w2"] == 0
        await asyncio.to_thread(scene.api.stop, "enough", 5)
        assert await scene.tasks["w1"] == 1
        assert {known for _, known in heard} == {True}
        assert {kind for kind, _ in heard} == {"Propose", "Stop", "Resume", "Goodbye"}

    play(tmp_path, scenario)


def test_a_process_that_has_ended_stops_the_view_for_the_others_at_once(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        first = scene.worker("w1")
        scene.worker("w2", pool="local")
        await scene.in_view("w1", "w2")
        async with subscribe(scene.ticket, m.Hello(kind="pool", pool="local", host="here")) as pool:
            scene.tasks["w2"].cancel()
            await pool.send(m.WorkerProcessExited(worker="w2", reason="killed by signal 9"))
            await scene.in_view("w1")
        assert [type(x) for x in (*first.got(m.Stop), *first.got(m.Resume))] == [m.Stop, m.Resume]
        assert [e["worker"] for e in scene.events("lost")] == ["w2"]

    play(tmp_path, scenario, heartbeat_timeout_s=500.0)


def test_a_connection_that_was_replaced_says_nothing_any_more(tmp_path: Path) -> None:
    """A worker may be back before its old connection is seen to break."""

    async def scenario(scene: Stage) -> None:
        first = scene.worker("w1")
        second = scene.worker("w2")
        await scene.in_view("w1", "w2")
        old = second.socket
        again = asyncio.create_task(second.converse())
        await scene.in_view("w1", "w2")
        await scene.until(lambda: len(second.got(m.Welcome)) == 2 and first.got(m.Resume))
        await scene.until(lambda: old.closed or old.exception())
        await scene.until(lambda: not again.done() and scene.server.coordinator.workers["w2"].connected)
        assert scene.events("lost") == []
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    play(tmp_path, scenario)


def test_evicted_worker_is_told_and_closed(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        second = scene.worker("w2")
        await scene.in_view("w1", "w2")
        await second.tell(m.Hello(kind="worker"))  # a second Hello is not in the protocol
        await scene.in_view("w1")
        assert await scene.tasks["w2"] == 5, "the code of Goodbye to one that is not to come back"
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
            assert await pool.receive() == m.Roster(wanted=0, over=5, reason="enough", present=("w1",))
            assert await scene.tasks["w1"] == 1, "5 is the run's code; the worker's own codes have meanings"
            await scene.server.close()
            assert await pool.receive() is None

    play(tmp_path, scenario)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "workers die before they have joined (a broken installation, no memory for one more)",
)
def test_processes_that_die_before_hello_end_a_run_that_never_began(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        async with subscribe(scene.ticket, m.Hello(kind="pool", pool="local", host="here")) as pool:
            for number in range(5):
                await pool.send(m.WorkerProcessExited(worker=f"w{number}", reason="exited with code 1"))
            await scene.until(scene.serving.done)
        assert len(scene.events("exited")) == 5
        over = scene.server.coordinator.over
        assert over is not None
        assert over.code == 1
        assert mentions(over.reason, 5)

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
                    seen.append(json.loads(note.line))

            await until("view")
            await until(None)  # a step
            await asyncio.to_thread(scene.api.scale, 3)
            await until("scale")

        def written() -> list[dict[str, Any]]:
            return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)]

        await scene.until(lambda: len(written()) >= len(seen))
        assert written()[: len(seen)] == seen, "the same lines, in the same order"

    play(tmp_path, scenario)


class Broken(Worker):
    """No heartbeat mends it."""

    heartbeat = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]


def test_an_error_of_our_own_ends_the_server_loudly(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        scene.server.coordinator.workers["w1"].__class__ = Broken  # a bug, planted
        scene.server.coordinator.fixed_targets = {"": "many"}  # type: ignore[dict-item]
        with pytest.raises(CoordinatorUnreachable, match=r"\b500\b"):
            await asyncio.to_thread(scene.api.scale, 2)
        with pytest.raises(TypeError):
            await asyncio.wait_for(asyncio.shield(scene.serving), 10)

    play(tmp_path, scenario)


@pytest.mark.failure(
    "Command line",
    "a status can't be computed (a bug in farandole)",
    seen="an answer 500, and an event",
    outcome="the run continues; the traceback is in `coordinator.log`",
)
def test_an_error_of_our_own_where_something_is_only_told_costs_that_answer(tmp_path: Path) -> None:
    """... and is on record a few times a minute, with its traceback in the coordinator's log."""

    async def scenario(scene: Stage) -> None:
        first = scene.worker("w1")
        await scene.in_view("w1")
        scene.server.coordinator.workers["w1"].__class__ = Broken
        for _ in range(20):
            with pytest.raises(CoordinatorUnreachable, match=r"\b500\b.*/api/status\b.*\(AttributeError\)"):
                await asyncio.to_thread(scene.api.status)
        await asyncio.to_thread(scene.api.alive)
        step = first.step
        await scene.until(lambda: first.step > step + 5 and len(scene.events("not told")) == LINES)
        assert not scene.serving.done()

    play(tmp_path, scenario)


def test_an_observer_that_can_not_be_told_costs_nobody_else_anything(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        scene.server._observers.recent.append(object())  # type: ignore[arg-type]
        async with subscribe(scene.ticket, m.Hello(kind="observer")) as observer:
            line: dict[str, Any] = {}
            while line.get("event") != "not told":  # and all before and after it
                note = await asyncio.wait_for(observer.receive(), 10)
                assert isinstance(note, m.Note)
                line = json.loads(note.line)
        assert not scene.serving.done()

    play(tmp_path, scenario)
