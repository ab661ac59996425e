"""`farandole run` whole, with fake workers in real processes; `launch` of tests/conftest.py starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import forked
from tests.support.fake_worker import gone, until
from tests.support.harness import read_lines

FAKE = Path(__file__).parents[1] / "support" / "fake_worker.py"


def farandole(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farandole", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


class Launched:
    """A `farandole run` of fake workers, in `folder`."""

    def __init__(self, cwd: Path, *options: str, arguments: tuple[str, ...] = ()) -> None:
        self.cwd = cwd
        self.folder = cwd / "runs" / "r"
        self.out = cwd / "out"
        self.err = cwd / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = forked.popen(
                [sys.executable, "-m", "farandole", "run", "--folder", str(self.folder), *options, str(FAKE),
                 str(self.folder), *arguments],
                cwd=cwd, stdout=out, stderr=err,
            )  # fmt: skip
        self.pids: set[int] = set()

    def events(self, name: str) -> list[dict[str, object]]:
        return [line for line in read_lines(self.folder) if line.get("event") == name]

    def members(self) -> list[object]:
        """Of the newest view."""
        return [*self.events("view")[-1]["members"]] if self.events("view") else []  # type: ignore[misc]

    def wait_for(self, *members: str) -> None:
        until(lambda: self.members() == list(members))
        self.note_processes()

    def note_processes(self) -> None:
        self.pids.add(json.loads((self.folder / "coordinator.json").read_text())["pid"])
        self.pids |= {int(str(event["pid"])) for event in self.events("ready")}
        self.pids |= {int(path.read_text()) for path in self.folder.glob("child-of-*")}

    def ended(self) -> tuple[int, str, str]:
        """Exit code, output, errors; everything that it had started has ended."""
        code = self.process.wait(200)
        if self.folder.joinpath("coordinator.json").exists():
            self.note_processes()
        assert [pid for pid in self.pids if not gone(pid)] == []
        return code, self.out.read_text(), self.err.read_text()


def kill_coordinator(run: Launched) -> int:
    """Once it serves, kill -9. Returns the process that it was."""
    pid: int = json.loads((run.folder / "coordinator.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    return pid
