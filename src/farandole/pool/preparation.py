"""`--prepare COMMAND`: what must have succeeded on a host before its workers may join, such as fetching the data.

Once a host and run: the worker that comes first runs it, the others of that host wait for its end. Invariant: it never
runs twice at the same time. The lock is handed on to the command, so what a killed worker has begun is waited for,
and then begun again, since nobody saw it succeed. Its output is the worker's.

That it succeeded is remembered in `~/.cache/farandole/prepared`, under a name that tells nothing of the run's secret.
Left out: undoing it. Imports nothing heavy: the command may be what installs torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

from farandole.errors import HostNotPrepared
from farandole.platform.output import tell

FOLDER = Path("~/.cache/farandole/prepared")


def prepare(command: str, *, run: str, host: str) -> None:
    """Return once `command`, a line for the shell, has succeeded on `host` for `run`, any text that only the run has.

    Raises:
        HostNotPrepared: it failed.
    """
    run_once(command, "--prepare", key=(run, host, command), host=host)


def run_once(command: str, option: str, *, key: tuple[str, ...], host: str) -> None:
    """The same for what is to be done once for each `key`; `option` asked for it.

    Raises:
        HostNotPrepared: it failed.
    """
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    done = folder / f"{name}.done"
    if done.exists():
        return
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"farandole: another worker prepares {host}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        tell(f"farandole: preparing {host}: {command}")
        code = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, pass_fds=(lock,), check=False).returncode
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise HostNotPrepared(
                f"{option} {command!r} failed on {host} with {how}, so its workers can't join; what it said is in "
                f"this worker's output"
            )
        done.touch()
        tell(f"farandole: {host} is prepared")
    finally:
        os.close(lock)
