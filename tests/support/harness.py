"""A whole elastic run as a test sees it: started by the command line, watched through metrics.jsonl, acted on from
outside, and ended for certain.

Only processes of this run are ever signalled: the ids come from its own events and are checked against its folder.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.forked import ENVIRON, popen, run

FARANDOLE = [sys.executable, "-m", "farandole"]


def members(folder: Path) -> tuple[str, ...]:
    """The members of the newest view of the run in a folder."""
    return next((tuple(line["members"]) for line in reversed(read_lines(folder)) if line.get("event") == "view"), ())


class Elastic:
    """`farandole run` on a script, as a context: on leaving it, nothing of the run is alive."""

    def __init__(
        self, folder: Path, script: Path, *arguments: str, workers: int, deadline_s: float = 200.0, options: list[str],
        on: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`on`: what to put before each command, to have it run elsewhere."""
        self.on = on
        self.folder = folder
        self.earlier = len(read_lines(folder))  # where the run was on before, and is resumed
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.output = folder.with_name(f"{folder.name}.out")
        command = [
            *on,
            *FARANDOLE,
            "run",
            "--workers",
            str(workers),
            "--folder",
            str(folder),
            *options,
            str(script),
            *arguments,
        ]
        with self.output.open("wb") as output:
            self.process = popen(command, env=ENVIRON, stdout=output, stderr=output)

    def __enter__(self) -> Elastic:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the kernel ends what it started
        self.process.wait()
        for event in self.events("ready"):
            self.signal(event["worker"], signal.SIGCONT)
            if not gone(lambda pid=event["pid"]: self._is_ours(pid)):
                self.signal(event["worker"], signal.SIGKILL)
        if error is None:
            assert open_to_others(self.folder) == [], "what is in a run's folder is its user's alone"

    # --- watching --------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.folder)[self.earlier :]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == name]

    def zones(self) -> dict[str, str]:
        """The zone of each worker, by the host that it reports, as `farandole status --json` shows them."""
        shown = run([*FARANDOLE, "status", "--run", str(self.folder), "--json"])
        return {worker["host"]: worker["zone"] for worker in json.loads(shown.stdout)["workers"]}

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines() if "event" not in line), default=-1)

    @property
    def members(self) -> tuple[str, ...]:
        views = self.events("view")
        return tuple(views[-1]["members"]) if views else ()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it; an AssertionError with the run's output if it ends or the deadline passes before."""
        while not condition():
            ended = self.process.poll() is not None
            if (ended and not condition()) or time.monotonic() > self.deadline:
                why = f"the run ended with {self.process.returncode}" if ended else "the deadline passed"
                raise AssertionError(f"{why} before: {what}\n{self.report()}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step, f"step {step}")

    def until_members(self, count: int, *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        """These; on a machine that stands still for a while, others may be there a moment later."""
        found: list[tuple[str, ...]] = []

        def there() -> bool:
            found.append(self.members)
            return len(found[-1]) == count and not set(without) & set(found[-1])

        self.until(there, f"a view of {count} without {without or 'nobody in particular'}; it is {self.members}")
        return found[-1]

    def report(self) -> str:
        events = [line for line in self.lines() if "event" in line]
        output = self.output.read_text(errors="replace")[-3000:]
        logs = "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n"
            for path in sorted((self.folder / "logs").glob("*.log"))
        )
        return "\n".join([*(json.dumps(event) for event in events), f"step {self.step}", output, logs])

    # --- acting ----------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> None:
        done = run([*self.on, *FARANDOLE, *arguments, "--run", str(self.folder)], env=ENVIRON, timeout=200)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}\n{self.report()}"

    def signal(self, worker: str, number: int) -> None:
        """To a worker's process, if it is still this run's."""
        pid = next(event["pid"] for event in self.events("ready") if event["worker"] == worker)
        if self._is_ours(pid):
            os.kill(pid, number)

    def finish(self) -> None:
        """Wait for the run's own good end."""
        self.until(lambda: self.process.poll() is not None, "the end")
        assert self.process.returncode == 0, self.report()

    def _is_ours(self, pid: int) -> bool:
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


@contextmanager
def external_worker(
    on: list[str], run: Path, log: Path, script: Path, *arguments: str, host: str = "there", zone: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that joins the run in a folder, as one of `host` in `zone`, by a command that begins with `on`."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [*on, *FARANDOLE, "join", str(run / "ticket"), str(script), *arguments],
            env={**ENVIRON, "FARANDOLE_HOST": host, "FARANDOLE_ZONE": zone},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def open_to_others(folder: Path) -> list[str]:
    """Whatever is at `folder`, or in it, and has another mode than 0700 (folders) or 0600 (files)."""
    found = [(path, path.lstat().st_mode) for path in (folder, *folder.rglob("*"))]
    return [
        f"{path}: {stat.filemode(mode)}"
        for path, mode in found
        if stat.filemode(mode) not in ("drwx------", "-rw-------")
    ]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def gone(alive: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alone(folder: Path, script: Path, *arguments: str, deadline_s: float = 200.0) -> None:
    """The same script as a world of one."""
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(folder), "FARANDOLE_LEDGER": "1"}
    done = run([sys.executable, str(script), *arguments], env=environ, timeout=deadline_s)
    assert done.returncode == 0, done.stdout + done.stderr
