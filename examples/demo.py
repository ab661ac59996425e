"""The main job, before your eyes: workers join, leave and are killed, and the weights come out the same bit for bit.

    make demo

1. `farandole run` trains the digits with two workers; meanwhile this script does to them what the world would:
   a third joins, one leaves gracefully, one is killed with `kill -9` (and the pool sends a replacement).
2. The same script trains undisturbed, alone, without any coordinator.
3. It compares: test accuracy, the fingerprints of model, optimizer and schedule, every delivered sample counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farandole.data.ledger import count
from farandole.observe.summary import pauses
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, StepLine, parse_lines

EPOCHS = 40
JOB = [str(Path(__file__).with_name("digits.py")), "--epochs", str(EPOCHS), "--width", "48"]
FARANDOLE = [sys.executable, "-m", "farandole"]
STEPS_BETWEEN = 40
LIMIT_S = 600


def main() -> int:
    folder = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    print("1. Two workers; one joins, one leaves, one is killed.\n", flush=True)
    command = [*FARANDOLE, "run", "--workers", "2", "--ledger", "--folder", str(folder), *JOB]
    run = subprocess.Popen(command)
    try:
        act(folder, run)
        code = run.wait(LIMIT_S)
    except (KeyboardInterrupt, TimeoutError, subprocess.TimeoutExpired) as error:
        run.send_signal(signal.SIGINT)
        run.wait(60)
        print(f"demo: {error or 'interrupted'}", file=sys.stderr)
        return 1
    if code != 0:
        print(f"demo: the run ended with exit code {code}; its folder is {folder}", file=sys.stderr)
        return 1

    print("\n2. The same job, undisturbed, a world of one.\n", flush=True)
    alone = undisturbed()
    return report(folder, alone)


def act(folder: Path, run: subprocess.Popen[bytes]) -> None:
    """What the world does to a run, at steps rather than at times."""
    wait(run, lambda: size(folder) == 2, "two workers")
    for deed in (join, leave, kill):
        reached = step(folder) + STEPS_BETWEEN
        wait(run, lambda reached=reached: step(folder) >= reached, f"step {reached}")
        before = views(folder)
        deed(folder)
        wait(run, lambda before=before: views(folder) > before, deed.__doc__ or "")


def join(folder: Path) -> None:
    """a third worker joins"""
    subprocess.run([*FARANDOLE, "scale", "3", "--run", str(folder)], check=True, stdout=subprocess.DEVNULL)


def leave(folder: Path) -> None:
    """rank 0 leaves gracefully"""
    first = member(folder, 0)["id"]
    subprocess.run([*FARANDOLE, "release", first, "--run", str(folder)], check=True, stdout=subprocess.DEVNULL)


def kill(folder: Path) -> None:
    """the last worker is killed with kill -9"""
    os.kill(member(folder, -1)["pid"], signal.SIGKILL)


def undisturbed() -> str:
    """The fingerprint of the same job alone."""
    environment = {**os.environ, "FARANDOLE_SEED": "0", "FARANDOLE_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    printed = ""
    with subprocess.Popen([sys.executable, *JOB], stdout=subprocess.PIPE, text=True, env=environment) as alone:
        assert alone.stdout is not None
        for line in alone.stdout:
            print(f"alone | {line}", end="", flush=True)
            printed += line
    return printed.rsplit("fingerprint ", 1)[-1].strip()


def report(folder: Path, alone: str) -> int:
    lines = read(folder)
    elastic = next(line.fingerprint for line in lines if isinstance(line, events.FinishedEvent))
    accuracy = [float(str(line.fields["accuracy"])) for line in lines if isinstance(line, LogLine)][-1]
    counts = count(folder / "ledger")
    samples = sum(line.samples for line in lines if isinstance(line, StepLine) and line.epoch == 0)
    expected = samples * EPOCHS
    lost = expected - len(counts)
    repeated = sum(n - 1 for n in counts.values())

    print("\n3. What came of it.\n")
    print(f"test accuracy        {accuracy:.4f}")
    print(f"fingerprint elastic  {elastic}")
    print(f"fingerprint alone    {alone}")
    print(f"the same bits        {'yes' if elastic == alone else 'NO'}")
    print(f"samples              {expected} expected, {lost} lost, {repeated} repeated")
    print("pauses beyond the median step")
    for pause in pauses(lines):
        print(f"  {pause.kind:<6} {pause.pause_ms:7.1f} ms  {pause.cause}")
    print(f"run folder           {folder}")
    good = elastic == alone and lost == 0 and repeated == 0 and accuracy >= 0.97
    print("\nEverything as promised." if good else "\nNOT as promised.")
    return 0 if good else 1


# --- looking at the run ------------------------------------------------------------------------------------


def wait(run: subprocess.Popen[bytes], there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        if run.poll() is not None:
            raise TimeoutError(f"the run ended before: {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.05)


def read(folder: Path) -> list[Line]:
    try:
        return parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())[0]
    except FileNotFoundError:
        return []


def step(folder: Path) -> int:
    return max((line.step for line in read(folder) if isinstance(line, StepLine)), default=-1)


def views(folder: Path) -> int:
    return sum(isinstance(line, events.ViewEvent) for line in read(folder))


def size(folder: Path) -> int:
    members = [line.members for line in read(folder) if isinstance(line, events.ViewEvent)]
    return len(members[-1]) if members else 0


def member(folder: Path, rank: int) -> dict[str, Any]:
    text = subprocess.check_output([*FARANDOLE, "status", "--json", "--run", str(folder)])
    workers = [worker for worker in json.loads(text)["workers"] if worker["rank"] is not None]
    return sorted(workers, key=lambda worker: worker["rank"])[rank]


if __name__ == "__main__":
    sys.exit(main())
