"""The exports of a run, as a process of their own: `python -m farandole.observe.exports.process FOLDER
[--tensorboard DIR] [--wandb PROJECT]`.

It lives as long as its standard input is open, which `farandole run` holds: when that is closed, by its will or by its
end, what is left of the lines is handed over, and it ends. So neither a tool that is slow, hangs, fills its memory or
crashes, nor its threads and hooks, are in a process of the run. What people should know it prints, a line at a time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from farandole.control.run_folder import METRICS, Observer
from farandole.errors import FarandoleError
from farandole.observe.exports.feed import END_S, Feed
from farandole.platform import output
from farandole.platform.output import guard, tell
from farandole.settings import verbosity

CLOSE_S = 5.0  # that a tool may take for its end, beyond what it takes for its lines


def main(arguments: Sequence[str]) -> int:
    guard()
    parser = argparse.ArgumentParser(prog="farandole.observe.exports.process", description="the exports of a run")
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
    from farandole.observe.exports.records import require_tensorboard
    from farandole.observe.exports.tensorboard import TensorBoard
    from farandole.observe.exports.wandb import WeightsAndBiases, require_wandb

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
