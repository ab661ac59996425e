"""Starts contestants, watches them under a hard time limit, and leaves nothing running behind.

A `Fleet` is one launch of one contestant in a fresh folder. Every process that it starts carries `BENCH_FOLDER`, that
folder's path, in its environment; on the way out the fleet kills, by pid, what it started, their descendants, and any
worker that wrote a record there and still carries the mark (a frozen one, or one whose parent is gone).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import records

Process = subprocess.Popen[bytes]
HERE = Path(__file__).resolve().parent
POLL_SECONDS = 0.25  # reading the records costs a few milliseconds of the cores that are measured


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: batch in samples a worker at the start, micro in samples a micro-batch, samples in the data.

    minimum: with fewer workers than this nobody trains. memory: watch the workers' memory, which slows them a little.
    """

    model: str
    workers: int
    batch: int
    micro: int
    samples: int
    epochs: int = 1
    minimum: int = 1
    memory: bool = False


class Fleet:
    """One launch of one contestant. Subclasses say how workers start, join and leave."""

    name = "?"
    needs: str | None = None
    elastic = True
    replaces = False  # whether a killed worker is replaced without being asked for

    def __init__(self, job: Job, *, limit_s: float) -> None:
        if self.needs is not None and find_spec(self.needs) is None:
            raise SystemExit(f"{self.name} is not installed; either install it or leave it out with --contestants")
        self.job = job
        self.folder = Path(tempfile.mkdtemp(prefix=f"bench-{self.name}-"))
        self.deadline = time.monotonic() + limit_s
        self.processes: list[Process] = []
        self.background: list[Process] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"{self.name}: logs and records are in {self.folder}", file=sys.stderr)

    def start(self) -> None:
        """Start the job's workers."""
        raise NotImplementedError

    def spawn(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Process:
        """Start one process with a session of its own; what it prints goes to `NAME.log` in the folder."""
        surroundings = {key: value for key, value in os.environ.items() if not key.startswith("FARANDOLE_")}
        paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        surroundings |= {"BENCH_FOLDER": str(self.folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        surroundings |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"} | (environment or {})
        if self.job.memory:
            # large blocks go back at once: the heap's history would add some 10 MB, up or down
            surroundings |= {"BENCH_MEMORY": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=surroundings, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def script(self) -> list[str]:
        job = self.job
        return [
            str(HERE / "contestants" / f"{self.name}_train.py"),
            *("--model", job.model, "--workers", str(job.workers), "--batch", str(job.batch)),
            *("--micro", str(job.micro), "--samples", str(job.samples), "--epochs", str(job.epochs)),
        ]

    def records(self) -> list[records.Record]:
        return records.read(self.folder)

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until `done`, looking every so often.

        Raises:
            TimeoutError: the limit, or the whole launch's, has passed; shows the ends of the logs.
        """
        until = min(self.deadline, time.monotonic() + limit_s)
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name}: no {what} within {limit_s:.0f} s\n{self.logs()}")
            time.sleep(POLL_SECONDS)

    def wait_end(self, limit_s: float) -> None:
        """Wait until the training is done and everything but the background has ended well.

        Raises:
            RuntimeError: something ended with another exit code than 0.
            TimeoutError: as in `wait`.
        """

        def ended() -> bool:
            codes = [process.poll() for process in self.processes if process not in self.background]
            if any(codes):
                raise RuntimeError(f"{self.name}: exit codes {codes}\n{self.logs()}")
            return None not in codes

        self.wait(ended, limit_s, "end")

    def logs(self) -> str:
        tails = (f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join(tails)

    def close(self) -> None:
        """Kill what this fleet started, and only that."""
        doomed: dict[int, psutil.Process] = {}
        starters = [process.pid for process in self.processes if process.poll() is None]
        workers = [record.pid for record in self.records()]
        for pid in starters + workers:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.environ().get("BENCH_FOLDER") == str(self.folder):
                    doomed |= {found.pid: found for found in (process, *process.children(recursive=True))}
        for process in doomed.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed.values(), timeout=10)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)

    # what only the elastic contestants can do

    def join(self) -> None:
        """Ask for one more worker; returns at once."""
        raise NotImplementedError

    def asked_in(self, joiner: records.Record, _since: float) -> float:
        """When the joiner, done with its start-up, asked in."""
        moment = joiner.marked_at("ready")
        assert moment is not None, "a worker that steps has been ready before"
        return moment

    def leave(self, worker: records.Record) -> None:
        """Ask one worker to leave gracefully."""
        os.kill(worker.pid, signal.SIGTERM)

    def proposed(self, since: float) -> float:
        """When the change that was asked for at `since` was proposed: for most, when it was asked for."""
        return since


class Ddp(Fleet):
    name = "ddp"
    elastic = False

    def start(self) -> None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.job.workers)}
        for rank in range(self.job.workers):
            self.spawn(f"rank{rank}", [sys.executable, *self.script()], shared | {"RANK": str(rank)})


class Torchft(Fleet):
    """A lighthouse with its README's settings (its heartbeat timeout is 5 s, as farandole's), and replica groups."""

    name = "torchft"
    needs = "torchft"

    def start(self) -> None:
        self.port = free_port()
        self.replicas = 0
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        settings = ["--min_replicas", str(self.job.minimum), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        self.background.append(self.spawn("lighthouse", [program, "--bind", f"127.0.0.1:{self.port}", *settings]))
        for _ in range(self.job.workers):
            self.join()

    def join(self) -> None:
        number, self.replicas = self.replicas, self.replicas + 1
        surroundings = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}", "REPLICA_GROUP_ID": str(number)}
        self.spawn(f"replica{number}", [sys.executable, *self.script()], surroundings)


class Farandole(Fleet):
    name = "farandole"
    needs = "farandole"
    replaces = True
    options: tuple[str, ...] = ()  # of `farandole run`, beside the job's

    def start(self) -> None:
        size = ["--workers", str(self.job.workers), "--min", str(self.job.minimum)]
        identity = ["--threads", "1", "--seed", "0", "--folder", str(self.run_folder())]
        self.spawn("run", [self.program(), "run", *size, *identity, *self.options, *self.script()])

    def program(self) -> str:
        return str(Path(sys.executable).with_name("farandole"))

    def run_folder(self) -> Path:
        return self.folder / "run"

    def api(self) -> Any:
        """The control API, asked from here: a command's own start-up and end would take the cores that train."""
        from farandole.control.api import Api
        from farandole.control.ticket import load

        return Api(load(str(self.run_folder() / "ticket")))

    def join(self) -> None:
        self.api().scale(sum(alive(record.pid) for record in self.records()) + 1)

    def leave(self, worker: records.Record) -> None:
        self.api().release(worker.label)

    def asked_in(self, _joiner: records.Record, since: float) -> float:
        return self.proposed(since)

    def proposed(self, since: float) -> float:
        """When the first view after `since` was proposed, by the run's own metrics."""
        lines = (self.run_folder() / "metrics.jsonl").read_text().split("\n")[:-1]
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        times = [event["time"] for event in events if event.get("event") == "proposed" and event["time"] >= since]
        assert times, "metrics.jsonl tells of no proposed view"
        return min(times)


FLEETS: dict[str, type[Fleet]] = {fleet.name: fleet for fleet in (Ddp, Torchft, Farandole)}


def alive(pid: int) -> bool:
    """Whether a process of that id is there and not a zombie."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
