"""What every kind of `WorkerContext` keeps, of which the training side relies on no more: one battery, three kinds."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.settings import Settings
from farandole.worker.connection import Connected
from farandole.worker.context import NoTraining, SingleProcess, WorkerContext
from farandole.worker.fake import FakeContext
from tests.support.metric_lines import stepped
from tests.support.stage import stage

SIGNATURE = m.Signature(facts=(("torch", "none"),))


class Prepares(NoTraining):
    def __init__(self) -> None:
        self.views: list[View] = []

    def prepare(self, view: View) -> None:
        self.views.append(view)


def battery(it: WorkerContext, propose: Callable[[], None]) -> Prepares:
    """In a run of one: asked in, let in, through one round, and out. `propose`: the coordinator's part, if any."""
    training = Prepares()
    it.set_training(training)
    assert (it.worker, it.terms.minimum, it.instructions.exit, it.instructions.save) == (
        it.state_machine.worker,
        1,
        None,
        None,
    )
    assert it.worker
    assert it.workers_at(5, 3) == 3
    it.tell(m.LoaderEnded(reason="it has died"))
    it.ask_in(SIGNATURE)
    propose()
    with it.condition:
        assert it.condition.wait_for(
            lambda: it.state_machine.pending and it.state_machine.prepared == it.state_machine.pending.number, 30
        )
        assert it.state_machine.pending is not None
        view = it.state_machine.pending.number
    assert not it.state_machine.enter_view(0, 0, view=view + 1), "another view"
    adopted = it.state_machine.enter_view(0, 0, view=view)
    assert adopted
    assert not it.state_machine.enter_view(0, 0, view=view), "once"
    begun = it.state_machine.begin_round(0, may_switch=True)
    assert begun is not None
    for message in (*adopted, *begun):
        it.tell(message)
    word = it.commit_message(view=view, round_=0, compute_us=5, shards=2)
    assert word is not None
    assert (word.view, word.round, word.compute_us, word.shards) == (view, 0, 5, 2)
    assert it.end_round([word])
    assert it.state_machine.round == 1
    assert it.commit_message(view=view, round_=0, compute_us=5, shards=2) is None, "that round is over"
    it.add_line(stepped(0, seconds=1.0, time=time.time()))
    it.report_script_end("fingerprint", m.StepTime(seconds=1.5, evaluation_s=0.5))
    it.close()
    return training


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", lambda *_: None)
    it = SingleProcess(str(tmp_path), lambda: True)
    battery(it, lambda: None)
    assert it.instructions.saves, "who else would"
    assert it._file is not None
    it._file.close()
    events = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "event" in line]
    assert [json.loads(line)["event"] for line in events] == ["run started", "loader replaced", "finished"]


def _cannot() -> bool:
    raise OSError("the store is gone")


@pytest.mark.failure(
    "The training loop",
    "a single-process run ends, and its state can't be saved",
    seen="an event `not saved`, with the reason",
    outcome="exit code 1, also if the script ran to its end",
)
@pytest.mark.parametrize(("save", "code"), [(lambda: True, 0), (lambda: False, 1), (_cannot, 1)])
def test_alone_has_exit_code_1_where_nothing_was_saved(save: Callable[[], bool], code: int, tmp_path: Path) -> None:
    """Also where saving raises: Python prints what an exit handler raises, and exits with code 0."""

    def ends() -> None:
        it = SingleProcess(str(tmp_path), save)
        it._end(os.getpid())
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=ends)
    child.start()
    child.join()
    assert child.exitcode == code


def test_fake() -> None:
    it = FakeContext()
    view = View(number=1, members=("w1",), group=1)
    training = battery(it, lambda: it.hear(m.Propose(view=view)))
    assert training.views == [view]
    assert [type(message) for message in it.messages] == [
        m.LoaderEnded, m.Ready, m.Prepared, m.Switched, m.Finished,
    ]  # fmt: skip
    assert [line.step for line in it.lines] == [0]
    it.lapsed = True
    it.state_machine.begin_round(1, may_switch=True)
    assert it.commit_message(view=1, round_=1, compute_us=0, shards=0) is None


def test_connected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, minimum=1, wanted=1) as scene:

            def play() -> Prepares:
                settings = Settings(worker="w1", host="here", pool="")
                it = Connected(scene.ticket, settings, leave=lambda *_, **__: None)
                return battery(it, lambda: None)

            training = await asyncio.to_thread(play)
            assert [view.number for view in training.views] == [1]
            await scene.until(lambda: scene.events("loader replaced"))

    asyncio.run(scenario())
