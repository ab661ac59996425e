"""A hosts file that somebody edits all the time, in every way: the run goes on, to the bits of a world of one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import sshd
from tests.support.harness import alone
from tests.support.rack import Rack
from tests.support.sshd import Sshd

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sshd.AVAILABLE, reason=sshd.WHY_NOT),
    pytest.mark.timeout(900),
]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"
HOSTS, SLOTS = 3, 2
STEPS_AN_EPOCH = 9


class Editor:
    """`slots` of each host are what the file says last, leaving aside what is a mistake."""

    def __init__(self, rack: Rack, seed: int) -> None:
        self.rack, self.rng = rack, random.Random(seed)
        self.slots = {0: 1}
        self.write()

    def write(self, *mistakes: str) -> None:
        lines = [self.rack.line(number, slots) for number, slots in self.slots.items()]
        self.rng.shuffle(lines)
        self.rack.write("# hosts", *lines, *mistakes)

    def edit(self) -> None:
        number = self.rng.randrange(HOSTS)
        match self.rng.choice(("add", "add", "delete", "delete", "slots", "order", "mistake")):
            case "add":
                self.slots.setdefault(number, self.rng.randint(1, SLOTS))
            case "delete" if len(self.slots) > 1:
                del self.slots[self.rng.choice([*self.slots])]
            case "slots":
                host = self.rng.choice([*self.slots])
                self.slots[host] = self.rng.randint(1, SLOTS)
            case "mistake":
                match self.rng.choice(("empty", "half", "folder")):
                    case "empty":
                        self.rack.file.write_text("")
                    case "half":
                        self.write("127.0.0.9 slots=tw")
                    case _:
                        self.rack.file.unlink()
                        self.rack.file.mkdir()
                return
            case _:
                pass
        if self.rack.file.is_dir():
            self.rack.file.rmdir()
        self.write()


@pytest.mark.parametrize(
    ("edits", "steps"),
    [pytest.param(10, 900, marks=pytest.mark.world), pytest.param(100, 9000, marks=pytest.mark.long)],
)
def test_random_edits_leave_the_bits_as_they_are(tmp_path: Path, edits: int, steps: int) -> None:
    job = (JOB, "--epochs", str(steps // STEPS_AN_EPOCH))
    with Sshd(tmp_path, HOSTS) as hosts:
        rack = Rack(hosts, tmp_path)
        editor = Editor(rack, edits)
        with rack.run(*job, pace="0.05", workers=HOSTS * SLOTS) as run:
            run.until_members(1)
            for _ in range(edits):
                editor.edit()
                run.until_step(run.step + editor.rng.randint(1, 60))
            if rack.file.is_dir():
                rack.file.rmdir()
            editor.write()
            run.until_members(sum(editor.slots.values()))
            assert run.step < steps, "it was still on"
            assert len(run.events("view")) > edits // 10
            assert not run.events("lost"), run.report()
            rack.pace.unlink()
            run.finish()
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"), *job[1:])
    assert rack.out.read_bytes() == (tmp_path / "alone.out").read_bytes()
