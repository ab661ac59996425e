"""Promises 1 and 2: every model with every optimizer comes through every history of the run with the same bits, and
every sample is used exactly once an epoch.

Each history is one run of `jobs/table.py`, which trains the whole table side by side. What each of its 24
combinations ends in is compared with a world of one, and so are the loss of every step and every evaluation; the
ledgers of all workers, dead ones included, are counted.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from farandole.data.ledger import count
from tests.jobs.table import EPOCHS, MODELS, SAMPLES, STEPS, UPDATES
from tests.support.harness import Elastic, alone, read_lines
from tests.support.shared import once

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]

JOB = Path(__file__).parents[1] / "jobs" / "table.py"
EVERY_SAMPLE_ONCE = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))


@dataclass
class Outcome:
    """What a run leaves: a hash of each combination, and the lines of losses and evaluations, each as often as told."""

    hashes: dict[str, str]
    told: Counter[tuple[int, str, float]]

    @staticmethod
    def of(out: Path, folder: Path) -> Outcome:
        lines = read_lines(folder)
        losses = ((line["step"], "loss", line["loss"]) for line in lines if "event" not in line)
        logs = ((line["step"], "accuracy", line["accuracy"]) for line in lines if line.get("event") == "log")
        return Outcome(json.loads(out.read_text()), Counter([*losses, *logs]))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A world of one."""

    def train(folder: Path) -> Outcome:
        alone(folder, JOB, str(folder / "out.json"))
        assert count(folder / "ledger") == EVERY_SAMPLE_ONCE
        outcome = Outcome.of(folder / "out.json", folder)
        assert len(outcome.hashes) == len(set(outcome.hashes.values())) == len(MODELS) * len(UPDATES)
        assert outcome.told.total() == len(outcome.told) == STEPS + EPOCHS
        return outcome

    return once(tmp_path_factory, "table", train)


class History:
    """What happens to a run. `start` workers, then `play`; the pace is slow until that is over."""

    def __init__(self, start: int, play: Callable[[Elastic], None], *arguments: str) -> None:
        self.start = start
        self.play = play
        self.arguments = arguments


def nothing(run: Elastic) -> None:
    run.until_members(2)


def grow(run: Elastic) -> None:
    """Three do not divide the four shards of a step, and are more than the two of an epoch's last."""
    run.until_step(2)
    run.command("scale", "3")
    run.until_members(3)
    run.until_step(run.step + 11)  # an epoch's end among them


def leave(run: Elastic) -> None:
    """First rank 0, then the last."""
    run.until_members(3)
    run.until_step(run.step + 2)
    first = run.members[0]
    run.command("release", first)
    run.until_members(2, without=(first,))
    run.until_step(run.step + 2)
    last = run.members[-1]
    run.command("release", last)
    run.until_members(1, without=(last,))
    assert not run.events("lost"), "a leave is not a loss"


def kill(run: Elastic) -> None:
    """Rank 0; then, with its replacement there, two of three in quick succession."""
    run.until_members(3)
    run.until_step(run.step + 2)
    victim = run.members[0]
    run.signal(victim, signal.SIGKILL)
    members = run.until_members(3, without=(victim,))
    run.until_step(run.step + 2)
    victims = (members[0], members[2])  # even if a busy machine has let one of them look dead meanwhile
    for each in victims:
        run.signal(each, signal.SIGKILL)
    run.until(lambda: not set(victims) & set(run.members), "a view without the two")
    assert {event["worker"] for event in run.events("lost")} >= {victim, *victims}


def freeze(run: Elastic) -> None:
    """No heartbeat for longer than is usual: it is taken for dead, killed and replaced."""
    run.until_members(2)
    run.until_step(run.step + 2)
    frozen = run.members[1]
    run.signal(frozen, signal.SIGSTOP)
    run.until(lambda: bool(run.members) and frozen not in run.members, "a view without the frozen one")
    (lost,) = run.events("lost")
    assert lost["worker"] == frozen


def notice(run: Elastic) -> None:
    """SIGTERM to a worker, as a spot market or a batch system sends it: it leaves, another comes."""
    run.until_members(2)
    run.until_step(run.step + 2)
    leaving_worker = run.members[0]
    run.signal(leaving_worker, signal.SIGTERM)
    run.until_members(2, without=(leaving_worker,))
    assert not run.events("lost")
    assert leaving_worker in {event["worker"] for event in run.events("left")}


HISTORIES = {
    "two workers with loader processes, undisturbed": History(2, nothing, "--loaders", "2"),
    "one grows to three": History(1, grow),
    "rank 0 leaves, then the last": History(3, leave),
    "kill -9 of rank 0, then of two at once": History(3, kill),
    "one of two freezes": History(2, freeze),
    "one of two has notice, with loader processes": History(2, notice, "--loaders", "1"),
}


OFTEN = "kill -9 of rank 0, then of two at once"  # who dies is replaced: it has losses and joins


@pytest.mark.parametrize(
    "history",
    [pytest.param(each, id=name, marks=[pytest.mark.long] * (name != OFTEN)) for name, each in HISTORIES.items()],
)
def test_the_same_bits_and_every_sample_once(history: History, undisturbed: Outcome, tmp_path: Path) -> None:
    pace, out = tmp_path / "pace", tmp_path / "out.json"
    pace.write_text("0.4")
    job = [str(out), "--pace", str(pace), *history.arguments]
    with Elastic(tmp_path / "run", JOB, *job, workers=history.start, options=["--ledger"]) as run:
        history.play(run)
        assert run.step < STEPS - 1, "it was to happen in the middle of the run"
        pace.unlink()
        run.finish()
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE
        outcome = Outcome.of(out, run.folder)
        different = [name for name, bits in undisturbed.hashes.items() if outcome.hashes[name] != bits]
        assert not different, f"{len(different)} of {len(undisturbed.hashes)} differ: {different}\n{run.report()}"
        assert [event["equal"] for event in run.events("finished")] == [True], "all workers hold the same state"
        assert outcome.told == undisturbed.told, "every step's loss and every evaluation, each told once"


@pytest.mark.long
def test_everyone_dies_and_the_run_goes_on_from_a_checkpoint(undisturbed: Outcome, tmp_path: Path) -> None:
    pace, out = tmp_path / "pace", tmp_path / "out.json"
    pace.write_text("0.2")
    options = ["--ledger", "--checkpoint-every", "3steps"]
    with Elastic(tmp_path / "run", JOB, str(out), "--pace", str(pace), workers=2, options=options) as run:
        run.until_members(2)
        run.until(lambda: bool(run.events("checkpoint")), "a checkpoint")
        for worker in run.members:
            run.signal(worker, signal.SIGSTOP)  # so that neither sees the other go
        for worker in run.members:
            run.signal(worker, signal.SIGKILL)
        pace.unlink()
        run.finish()
        assert len(run.events("state lost")) == len(run.events("resumed")) == 1
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE
        assert Outcome.of(out, run.folder).hashes == undisturbed.hashes, run.report()
