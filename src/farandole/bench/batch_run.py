"""The trainings of `farandole bench batch`: each is a `farandole rehearse` in a process of its own, without a network.

Its folder is a temporary one, which is removed. The process ends when the target is reached, or with the script.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.bench import child
from farandole.bench.batch import BatchRow, Target, TargetWatch
from farandole.control.run_folder import METRICS, Tail
from farandole.errors import FarandoleError
from farandole.protocol.metrics import parse_line

EVERY_S = 0.5  # interval at which the lines are read
END_S = 10.0
SHOWN_LINES = 15  # of a script that has failed


def train(
    command: Sequence[str], workers: int, target: Target, window: int, seed: int, threads: int,
    show: Callable[[TargetWatch], None],
) -> TargetWatch:  # fmt: skip
    """Train the script as if it had `workers` workers, until the target is reached or the script ends.

    `show` is called twice a second with what there is.

    Raises:
        FarandoleError: the script failed.
    """
    child.exit_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    watch = TargetWatch(target, window)
    try:
        history = folder / "history"
        history.write_text(f"0 {workers}\n")
        place, output = folder / "run", folder / "output"
        words = ("--history", history, "--folder", place, "--seed", str(seed), "--threads", str(threads))
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "farandole", "rehearse", *words, *command], stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                code = _follow(process, Tail(place / METRICS), watch, show)
            finally:
                child.end(process, END_S)
        if code and watch.reached is None:
            lines = output.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            raise FarandoleError("\n".join([f"the script failed with exit code {code}:", *lines]))
        return watch
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(
    process: subprocess.Popen[bytes], tail: Tail, watch: TargetWatch, show: Callable[[TargetWatch], None]
) -> int | None:
    """Read the lines until the target is reached or the process ends. Returns its exit code; None: it runs."""
    while True:
        code = process.poll()  # before the lines: so the last ones are read
        while lines := tail.lines():
            for line in filter(None, map(parse_line, lines)):
                watch.add(line)
        if watch.reached is not None or code is not None:
            return code
        show(watch)
        time.sleep(EVERY_S)


def measured(
    command: Sequence[str], workers: int, target: Target, window: int, seeds: int, threads: int,
    show: Callable[[TargetWatch], None],
) -> tuple[BatchRow, set[str]]:  # fmt: skip
    """Return what trainings with the batch of so many workers come to, and the metrics that the script logs."""
    watches, seconds = list[TargetWatch](), list[float]()
    for seed in range(seeds):
        started = time.monotonic()
        watches.append(train(command, workers, target, window, seed, threads, show))
        seconds.append(round(time.monotonic() - started, 3))
    row = BatchRow(
        workers=workers, batch=max(watch.batch for watch in watches), samples=tuple(each.reached for each in watches),
        best=tuple(target.best(each.values) for each in watches), seconds=tuple(seconds), target=target.text,
    )  # fmt: skip
    return row, set[str]().union(*(watch.names for watch in watches))
