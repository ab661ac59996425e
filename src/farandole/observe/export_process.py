"""One observer, fed from metrics.jsonl on a thread of its own, and kept from doing harm.

    it raises            told once; tried again from where it says, after 1 s, 2 s, ... a minute; told when it goes on
    it is slow           it is behind: the lines wait in the file
    it has much to do    it rests four times as long as it works, so it takes a fifth of a core at most
    the run is over      it has `END_S` to take what is left, one that fails `FAILING_S`

Nothing is kept in memory but what was read at a time.
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
REST = 4.0  # times what a turn took
RETRY_S, RETRY_MOST_S = 1.0, 60.0
END_S, FAILING_S = 10.0, 2.0
REASON = 200  # characters


class Feed:
    """Of one observer. `tell` is for people. `run` it on a thread, until `over` is set and the lines come to an end.

    Attributes:
        done: it has taken everything, and was closed.
    """

    def __init__(self, observer: Observer, path: Path, tell: Callable[[str], None], over: threading.Event) -> None:
        self._observer, self._path, self._tell, self._over = observer, path, tell, over
        self._cursor: Cursor | None = None  # none: it is to begin
        self._failures = 0  # since it last took anything
        self._failed = False  # the last turn
        self._damaged = 0
        self.done = False

    def run(self) -> None:
        """To its end, which is `END_S` after the run's at most, unless the observer hangs."""
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
                self._over.wait(max(REST * took, pause))

    def turn(self) -> bool:
        """Hand over the next lines. Returns whether there were any; in the end, when there are none, it is closed."""
        over = self._over.is_set()  # before it is read, so that all is there
        try:
            more = self._hand_over()
            if over and not more:
                self._observer.close()
                self.done = True
        except Exception as error:  # noqa: BLE001  whatever a library raises: it only watches
            self._fail(error)
            return False
        self._failed = False
        if self._failures and more:
            self._failures = 0
            self._tell(f"{self._observer.name} goes on")
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
            self._tell(f"{self._observer.name} lacks what is damaged in {self._path.name}")
        self._damaged = self._cursor.damaged
        return bool(lines)

    def _fail(self, error: Exception) -> None:
        _log.warning("%s failed", self._observer.name, exc_info=error)
        self._cursor, self._failed = None, True
        self._failures += 1
        if self._failures == 1:
            why = f"{str(error) or type(error).__name__}"[:REASON]
            self._tell(f"{self._observer.name} can't be written ({why}); it is tried again, and the training goes on")

    def _pause_s(self, more: bool) -> float:
        if self._failed:
            return min(RETRY_S * 2.0 ** (self._failures - 1), RETRY_MOST_S)
        return 0.0 if more else EVERY_S


# --- process ----------------------------------------------------------------------------------------------------------
#
# The exports of a run, as a process of their own: `python -m farandole.observe.export_process FOLDER
# [--tensorboard DIR] [--wandb PROJECT]`.
#
# It lives as long as its standard input is open, which `farandole run` holds: when that is closed, by its will or by
# its end, what is left of the lines is handed over, and it ends. So neither a tool that is slow, hangs, fills its
# memory or crashes, nor its threads and hooks, are in a process of the run. What people should know it prints, a line
# at a time.

CLOSE_S = 5.0  # that a tool may take for its end, beyond what it takes for its lines


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
        wanted = observers(options.folder / METRICS, options.tensorboard, options.wandb)
    except FarandoleError as error:
        tell(str(error))
        return 2
    return export(wanted, options.folder / METRICS)


def observers(metrics: Path, tensorboard: str | None, wandb: str | None) -> list[Observer]:
    """Raises UsageError where one's package is not installed."""
    from farandole.observe.tensorboard import TensorBoard, require_tensorboard
    from farandole.observe.wandb import WeightsAndBiases, require_wandb

    wanted: list[Observer] = []
    if tensorboard:
        require_tensorboard()
        wanted.append(TensorBoard(Path(tensorboard), metrics))
    if wandb:
        require_wandb()
        wanted.append(WeightsAndBiases(wandb, metrics))
    return wanted


def export(wanted: Sequence[Observer], metrics: Path) -> int:
    """Until standard input ends. Returns 1 where one of them hangs; its threads are left behind."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    for observer in wanted:
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
    os._exit(code)  # a tool's thread that hangs, or a hook of its at the interpreter's end, keeps nobody waiting
