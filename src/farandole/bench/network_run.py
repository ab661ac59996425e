"""The measurement of `farandole bench network`: an ordinary run of `network_train.py`, watched from outside.

So the links are those that training uses, with their authentication, and hosts come as to any run: from a pool, or by
`farandole join`. The run ends and its folder is deleted when enough steps were timed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from farandole.bench import child, network_train
from farandole.bench.network import CodecCost, NetworkLink, NetworkResult, codec_costs, predict, recommended
from farandole.collective.codec import CODECS
from farandole.control.api import Api
from farandole.control.run_folder import METRICS, TICKET, Tail
from farandole.control.status import Status
from farandole.control.ticket import load
from farandole.errors import FarandoleError
from farandole.platform import files
from farandole.platform.output import tell
from farandole.protocol.metrics import StepLine, parse_line

EVERY_S = 0.5
WARMUP = 3  # steps that are not timed
END_S = 30.0  # for the run to end
SCRIPT, FILES = "network_train.py", "files.txt"


def measure(hosts: int, mb: float, steps: int, compute_s: float, options: Sequence[str]) -> NetworkResult:
    """Return the result for this many hosts. `options`: further options of `farandole run`.

    Raises:
        FarandoleError: the run ended by itself, or a host left it; the message has the end of its output.
    """
    place = Path(tempfile.mkdtemp(prefix="farandole-network-"))
    job, folder, output = place / "job", place / "run", place / "output.txt"
    job.mkdir()
    shutil.copy(network_train.__file__, job / SCRIPT)
    (job / FILES).write_text(f"{SCRIPT}\n")  # so that other hosts get it, and nothing else
    command = [sys.executable, "-m", "farandole", "run", "--folder", str(folder), "--files", FILES]
    command += [*map(absolute, options), SCRIPT, "--mb", str(mb)]
    child.exit_on_sigterm()
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=job, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        watch = _Watch(process, folder, output)
        names, seconds, links = watch.until_measured(hosts, steps)
    finally:
        child.end(process, END_S)
        shutil.rmtree(place, ignore_errors=True)
    tell("timing the codecs on this machine")
    costs: tuple[CodecCost, ...] = codec_costs(
        name for name, codec in CODECS.items() if name != "none" and not codec.adapts
    )
    predictions = predict(mb, len(names), median(seconds), costs, compute_s)
    return NetworkResult(
        hosts=names, mb=mb, exchange_ms=1e3 * median(seconds), links=links, predictions=predictions,
        recommended=recommended(predictions),
    )  # fmt: skip


def absolute(option: str) -> str:
    """Return an option of `farandole run` with absolute paths, since the run has another working folder.

    A path is a part of the option between commas, or after an equals sign, that exists.
    """
    parts = [part.rpartition("=") for part in option.split(",")]
    return ",".join(
        f"{name}{equals}{os.path.abspath(value) if value and os.path.exists(value) else value}"
        for name, equals, value in parts
    )


class _Watch:
    """The run, seen through its status and its lines."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, output: Path) -> None:
        self._process = process
        self._folder = folder
        self._output = output
        self._tail = Tail(folder / METRICS)
        self._steps: list[StepLine] = []

    def until_measured(self, hosts: int, steps: int) -> tuple[tuple[str, ...], list[float], tuple[NetworkLink, ...]]:
        """Return the hosts' names, the seconds of the timed steps, and the links."""
        told = 0

        def all_there(status: Status) -> bool:
            nonlocal told
            there = _members(status)
            if len(there) != told:
                told = len(there)
                tell(f"{told} of {hosts} hosts: {', '.join(there)}")
            return told >= hosts

        tell("starting the run")
        self._until(lambda _: True)  # until there is a ticket, and somebody who answers to it
        tell(f"waiting for {hosts} hosts; a machine can join: farandole join {self._folder / TICKET}")
        names = _members(self._until(all_there))
        first = self._count()
        self._until(lambda _: self._count() > first + WARMUP)
        first = self._count()
        tell(f"timing {steps} steps")
        round_trips: dict[tuple[str, str], float] = {}

        def timed(status: Status) -> bool:
            for link in status.links:
                if link.rtt_ms is not None:
                    key = link.source, link.target
                    round_trips[key] = min(link.rtt_ms, round_trips.get(key, link.rtt_ms))
            return self._count() >= first + steps and len(status.links) >= hosts * (hosts - 1)

        status = self._until(timed)
        if (now := _members(status)) != names:
            raise FarandoleError(f"the hosts changed from {', '.join(names)} to {', '.join(now)}: measure again")
        links = tuple(
            NetworkLink(
                source=link.source, target=link.target,
                mbit_per_s=None if link.bytes_per_s is None else link.bytes_per_s * 8 / 1e6,
                rtt_ms=round_trips.get((link.source, link.target)),
            )
            for link in status.links
        )  # fmt: skip
        return names, [line.training_s for line in self._steps[first:]], links

    def _until(self, condition: Callable[[Status], bool]) -> Status:
        """Return the first status for which the condition holds."""
        while True:
            code = self._process.poll()
            if code is not None:
                words = self._output.read_text(errors="replace").splitlines()[-10:]
                raise FarandoleError("\n".join([f"the run ended with exit code {code}:", *words]))
            try:
                status = Api(load(str(self._folder / TICKET), files.opener)).status()
            except (FileNotFoundError, FarandoleError):
                status = None  # it is starting
            if status is not None and condition(status):
                return status
            time.sleep(EVERY_S)

    def _count(self) -> int:
        """Return how many steps have ended."""
        while lines := self._tail.lines():
            self._steps += [line for line in map(parse_line, lines) if isinstance(line, StepLine)]
        return len(self._steps)


def _members(status: Status) -> tuple[str, ...]:
    """Return the hosts of the members of the view."""
    return tuple(sorted({worker.host for worker in status.workers if worker.rank is not None}))
