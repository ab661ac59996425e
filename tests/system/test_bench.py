"""`farandole bench steps` on a real script with two workers: what is shown, that the contestants are what they say they
are, and what is said where it can't be done.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_worker import gone, until
from tests.support.forked import ENVIRON, Process, popen
from tests.support.harness import FARANDOLE
from tests.support.lines import naming

JOB = Path(__file__).parents[1] / "jobs" / "ending.py"
SHORT = ("--steps", "2", "--rounds", "2")
FIRST, BLOCK = 4, 5  # steps: to get ready, and a contestant's, with those that are not timed
ALONE, OURS, DDP = ("PlainStep", False), ("Step", True), ("PlainStep", True)
CONTESTANTS = ("alone", "farandole", "ddp")
pytestmark = pytest.mark.processes


class Bench:
    """`farandole bench steps` on the job, with `options` and the job's `arguments`."""

    def __init__(self, folder: Path, *arguments: str, options: tuple[str, ...] = SHORT) -> None:
        self.folder, self.written = folder, folder / "written"
        self.written.mkdir()
        job = [str(JOB), str(self.written / "out"), "--record", "--samples", "320", "--epochs", "1000", *arguments]
        command = [*FARANDOLE, "bench", "steps", *options, *job]
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.process: Process = popen(command, cwd=folder, env=ENVIRON, stdout=out, stderr=out)

    def ended(self) -> tuple[int, str]:
        """Exit code and output; all workers have ended."""
        code = self.process.wait(120)
        until(lambda: all(gone(pid) for pid in self.pids().values()))
        return code, self.out.read_text()

    def pids(self) -> dict[str, int]:
        return {path.stem: int(path.suffix[1:]) for path in self.written.iterdir()}

    def steps(self) -> dict[str, list[tuple[str, str]]]:
        """Of each worker, each step's kind and the digest of its gradient."""
        return {
            path.stem: [(kind, digest) for kind, digest in map(str.split, path.read_text().splitlines()[1:])]
            for path in self.written.iterdir()
        }

    def blocks(self) -> list[tuple[str, bool]]:
        """What comes first, and each contestant's block: the kind of its steps, and whether gradients were equal."""
        one, other = self.steps().values()
        steps = [(mine[0], mine == theirs) for mine, theirs in zip(one, other, strict=True)]
        parts = [steps[:FIRST], *(steps[n : n + BLOCK] for n in range(FIRST, len(steps), BLOCK))]
        return [next(iter(kinds)) if len(kinds := set(part)) == 1 else ("mixed", False) for part in parts]

    @property
    def place(self) -> Path:
        """The folder of its run."""
        [place] = {path.read_text().splitlines()[0] for path in self.written.iterdir()}
        return Path(place)


Start = Callable[..., Bench]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A bench with these of the job's arguments, and `options` of its own."""
    started: list[Bench] = []

    def begin(*arguments: str, options: tuple[str, ...] = SHORT) -> Bench:
        started.append(Bench(tmp_path, *arguments, options=options))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()  # the rest dies with it
        each.process.wait()
        if each.pids():
            shutil.rmtree(each.place, ignore_errors=True)


@pytest.mark.long
def test_the_contestants_take_turns_and_are_what_they_say(start: Start, tmp_path: Path) -> None:
    """With farandole and ddp both workers have the same gradient. Alone each has its own: nothing is exchanged."""
    bench = start(options=(*SHORT, "--json", str(tmp_path / "figures.json")))
    code, out = bench.ended()
    assert code == 0, out
    assert bench.blocks()[1:] == [ALONE, OURS, DDP, OURS, DDP, ALONE]

    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], len(row)) for row in rows if row and row[0] in CONTESTANTS] == [
        *zip(CONTESTANTS, (4, 6, 6), strict=True)
    ]
    assert naming(out, "2 of 2", *CONTESTANTS)
    assert "optimizer.step()" in out
    assert "Gloo" in out
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {name: len(each["ms"]) for name, each in found["contestants"].items()} == dict.fromkeys(CONTESTANTS, 2)
    assert all(0 <= part <= 1 for part in found["hidden"])
    assert not bench.place.exists()
    assert not (tmp_path / "runs").exists(), "nothing is kept"


@pytest.mark.long
@pytest.mark.failure(
    "Command line",
    "a script for `farandole bench` can't train under DistributedDataParallel",
    seen="a line says why",
    outcome="the others are measured without it; exit code 0",
)
def test_a_script_that_can_not_be_under_ddp_is_measured_without(start: Start) -> None:
    bench = start("--models", "2")
    code, out = bench.ended()
    assert code == 0, out
    assert naming(out, "ddp", "2 models", "model, other")
    assert naming(out, "2 of 2", CONTESTANTS[0])
    assert bench.blocks()[1:] == [ALONE, OURS, OURS, ALONE]


@pytest.mark.long
@pytest.mark.failure(
    "Command line",
    "a script for `farandole bench` has a loop that is too short, leaves it early, or raises",
    seen="one line with the number of its steps; the traceback",
    outcome="exit code 1; the logs of the workers are kept, and their folder is named",
)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--epochs", "1"),
            ("20 steps", "68"),
        ),
        pytest.param(("--break-at", "4"), ("5 steps",), marks=pytest.mark.long),
        pytest.param(("--fail-at", "1"), ("ZeroDivisionError: mine",), marks=pytest.mark.long),
    ],
)
def test_what_a_script_does_wrong_is_said_and_its_logs_are_kept(
    start: Start, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    bench = start(*arguments, options=())
    code, out = bench.ended()
    assert code == 1
    assert naming(out, *says)
    assert str(bench.place) in out
    assert [*(bench.place / "logs").glob("w*.log")]


def begun(bench: Bench) -> bool:
    """Both workers are at a contestant's block."""
    return len(bench.pids()) == 2 and all(len(steps) > FIRST for steps in bench.steps().values())


@pytest.mark.long
def test_the_first_interrupt_ends_all_of_it(start: Start) -> None:
    bench = start(options=("--steps", "500"))
    until(lambda: begun(bench))
    os.kill(bench.process.pid, signal.SIGINT)
    code, out = bench.ended()
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in out
    assert not bench.place.exists()


@pytest.mark.long
@pytest.mark.failure(
    "Command line",
    "a worker of `farandole bench` dies",
    seen="one line, at the latest when the next block starts",
    outcome="exit code 1, because the rest could not be compared",
)
def test_a_worker_that_is_lost_ends_it(start: Start) -> None:
    bench = start(options=("--steps", "500"))
    until(lambda: begun(bench))
    os.kill(bench.pids()["w2"], signal.SIGKILL)
    code, out = bench.ended()
    assert code == 1
    assert "Traceback" not in out
    assert naming(out, "farandole: ", bench.place)
    assert not [line for line in out.splitlines() if line.split()[:1] == ["ddp"]], "nothing is compared"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rounds", "0", str(JOB)), "--rounds 0: "),
        (("none.py",), "script none.py: "),
        (("--json", "no/such.json", str(JOB)), "--json no/such.json: "),
    ],
)
def test_what_can_not_be_asked_is_one_line(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    command = [*FARANDOLE, "bench", "steps", *options]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"farandole: error: {says}")
    assert len(done.stderr.splitlines()) == 1
