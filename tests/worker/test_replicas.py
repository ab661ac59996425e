"""Replicas that differ, with the real server and the real clients over loopback, in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farandole.protocol import messages as m
from farandole.worker.context import NoTraining
from tests.support.crew import crew
from tests.support.mentioned import mentions


class Drifted(NoTraining):
    """A training side whose replica is the others' but for one parameter."""

    def __init__(self, weight: int) -> None:
        self._weight = weight

    def digests(self) -> m.Digests:
        return m.Digests(step=0, names=("rate", "weight"), digests=(5, self._weight))


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "the script changes its replica on one worker alone: a learning rate, a forward pass in training mode, a "
        "scheduler's step"
    ),
)
def test_words_that_differ_end_the_run_and_the_answers_say_where(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, minimum=2, wanted=2) as it:
            for number, name in enumerate(("w1", "w2")):
                trainer = await it.join(name)
                trainer.client.set_training(Drifted(number))
            await it.in_view(1, "w1", "w2")
            for number, trainer in enumerate(it.trainers.values()):
                trainer.client.state_machine.digest = 3 + number
            await it.scene.until(lambda: all(t.client.instructions.exit for t in it.trainers.values()))
            exits = [t.client.instructions.exit for t in it.trainers.values()]
            assert [e.code for e in exits if e] == [1, 1]
            rounds = {t.client.state_machine.round for t in it.trainers.values()}
            assert len(rounds) == 1, "nobody has ended the round"
            for e in exits:
                assert e is not None
                assert mentions(e.reason, "w1's", "w2's", f"step {rounds.copy().pop()}", "weight")
            (saved,) = it.scene.events("saved")
            assert saved["whole"] is False
            assert [event["first"] for event in it.scene.events("replicas differ")] == ["", "weight"]

    asyncio.run(scenario())
