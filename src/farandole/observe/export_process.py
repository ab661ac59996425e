"""Feeds an exporter from metrics.jsonl on a thread of its own, and isolates the run from its failures.

    it raises            reported once; retried from the exporter's mark after 1 s, 2 s, ... a minute; recovery reported
    it is slow           it lags behind: the lines wait in the file
    it has much to do    it pauses four times as long as it works, so it takes a fifth of a core at most
    the run is over      it has `END_S` to process the rest; an exporter that fails has `FAILING_S`

Only the lines of one read are in memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.control.run_folder import METRICS, Observer
from farandole.errors import FarandoleError
from farandole.observe.export_common import Cursor
from farandole.platform import output
from farandole.platform.output import guard, tell
from farandole.settings import verbosity

# --- feed -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger("farandole.observe.export_process")
EVERY_S = 1.0  # how often the file is looked at
IDLE_FACTOR = 4.0  # times what a turn took
RETRY_S, RETRY_MOST_S = 1.0, 60.0
END_S, FAILING_S = 10.0, 2.0
REASON = 200  # characters


class Feed:
    """The feed of one exporter. Call `run` on a thread; it ends when `over` is set and no lines are left.

    `tell` prints messages for people.

    Attributes:
        done: True if the exporter has processed all lines and is closed.
    """

    def __init__(self, observer: Observer, path: Path, tell: Callable[[str], None], over: threading.Event) -> None:
        self._observer, self._path, self._tell, self._over = observer, path, tell, over
        self._cursor: Cursor | None = None  # None: the exporter must begin
        self._failures = 0  # failures since the last success
        self._failed = False  # True if the last turn failed
        self._damaged = 0
        self.done = False

    def run(self) -> None:
        """Feeds the exporter until all is done, at most `END_S` after the run's end, unless the exporter hangs."""
        until = 0.0
        while not self.done:
            if self._over.is_set():
                until = until or time.monotonic() + (FAILING_S if self._failed else END_S)
                if time.monotonic() > until:
                    self._tell(f"{self._observer.name} lacks the end of the run")
                    return
            began = time.monotonic()
            more = self.turn()
            took, pause = time.monotonic() - began, self._pause_s(more)
            if self._over.is_set():
                time.sleep(min(pause, RETRY_S) if self._failed else 0.0)
            else:
                self._over.wait(max(IDLE_FACTOR * took, pause))

    def turn(self) -> bool:
        """Passes on the next lines. Returns True if there were any. Closes the exporter after the last ones."""
        over = self._over.is_set()  # checked before the file is read, so that no line is missed
        try:
            more = self._hand_over()
            if over and not more:
                self._observer.close()
                self.done = True
        except Exception as error:  # noqa: BLE001  a library may raise anything; an exporter must not end the run
            self._fail(error)
            return False
        self._failed = False
        if self._failures and more:
            self._failures = 0
            self._tell(f"{self._observer.name} works again")
        return more

    def _hand_over(self) -> bool:
        if self._cursor is None:
            self._cursor = Cursor(self._path, self._observer.begin())
        lines = self._cursor.read()
        for at, line in lines:
            self._observer.take(line, at)
        if lines:
            self._observer.flush()
        if self._cursor.damaged and not self._damaged:
            self._tell(f"{self._observer.name} lacks the damaged lines of {self._path.name}")
        self._damaged = self._cursor.damaged
        return bool(lines)

    def _fail(self, error: Exception) -> None:
        _log.warning("%s failed", self._observer.name, exc_info=error)
        self._cursor, self._failed = None, True
        self._failures += 1
        if self._failures == 1:
            why = f"{str(error) or type(error).__name__}"[:REASON]
            self._tell(f"{self._observer.name} can't be written ({why}); farandole retries, training continues")

    def _pause_s(self, more: bool) -> float:
        if self._failed:
            return min(RETRY_S * 2.0 ** (self._failures - 1), RETRY_MOST_S)
        return 0.0 if more else EVERY_S


# --- process ----------------------------------------------------------------------------------------------------------
#
# The process of a run's exports: `python -m farandole.observe.export_process FOLDER [--tensorboard DIR]
# [--wandb PROJECT]`.
#
# `farandole run` holds the other end of its standard input. When that closes, on purpose or because `farandole run`
# ended, this process exports the remaining lines and ends. So a tool that is slow, hangs, fills its memory or crashes,
# and its threads and hooks, never are in a process of the run. Messages for people are printed, one per line.

CLOSE_S = 5.0  # time that a tool may take to close, after its lines


def main(arguments: Sequence[str]) -> int:
    guard()
    parser = argparse.ArgumentParser(prog="farandole.observe.export_process", description="the exports of a run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensorboard", metavar="DIR")
    parser.add_argument("--wandb", metavar="PROJECT")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `farandole run`
    os.umask(0o077)
    output.show(verbosity())
    try:
        exporters = observers(options.folder / METRICS, options.tensorboard, options.wandb)
    except FarandoleError as error:
        tell(str(error))
        return 2
    return export(exporters, options.folder / METRICS)


def observers(metrics: Path, tensorboard: str | None, wandb: str | None) -> list[Observer]:
    """Returns the requested exporters. Raises UsageError if the package of one is not installed."""
    from farandole.observe.tensorboard import TensorBoard, require_tensorboard
    from farandole.observe.wandb import WeightsAndBiases, require_wandb

    exporters: list[Observer] = []
    if tensorboard:
        require_tensorboard()
        exporters.append(TensorBoard(Path(tensorboard), metrics))
    if wandb:
        require_wandb()
        exporters.append(WeightsAndBiases(wandb, metrics))
    return exporters


def export(exporters: Sequence[Observer], metrics: Path) -> int:
    """Exports until standard input ends. Returns 1 if an exporter hangs, and leaves its thread behind, else 0."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    for observer in exporters:
        threads.append(threading.Thread(target=Feed(observer, metrics, tell, over).run, daemon=True))
        threads[-1].start()
    while os.read(sys.stdin.fileno(), 4096):
        pass
    over.set()
    for thread in threads:
        thread.join(END_S + CLOSE_S)
    return 1 if any(thread.is_alive() for thread in threads) else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for a tool's hanging thread or its exit hooks
