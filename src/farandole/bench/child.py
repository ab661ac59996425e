"""The child process of a bench that watches a run from outside."""

from __future__ import annotations

import signal
import subprocess
import sys


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in this process, so that its `finally` blocks end the child."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End the process with SIGTERM, and with SIGKILL if it has not ended `within_s` seconds later."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
