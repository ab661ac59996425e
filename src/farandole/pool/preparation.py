"""What must have succeeded on a host before its workers may join.

    --prepare COMMAND   once a host and run, such as fetching the data
    --setup COMMAND     once a host and pack, in the folder of the run's code: installing what the code needs. If it
                        leaves a `.venv` there, the workers have that one's interpreter

Who comes first runs it, the others of that host wait for its end. Invariant: it never runs twice at the same time. The
lock is handed on to the command, so what a killed worker has begun is waited for, and then begun again, since nobody
saw it succeed. PYTHON is the interpreter that has farandole here. Its output is the worker's, or, of a setup, in a file
beside the folder.

That `--prepare` succeeded is remembered in `~/.cache/farandole/prepared`, under a name that tells nothing of the run's
secret; that `--setup` did, beside the folder, and for as long as that is there. Left out: undoing them. Imports nothing
heavy: the command may be what installs torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from farandole.code.pack import set_up_mark
from farandole.errors import HostNotPrepared
from farandole.platform import files
from farandole.platform.output import tell

FOLDER = Path("~/.cache/farandole/prepared")
ENVIRONMENT = ".venv"
HAS_US = "import importlib.util, sys; sys.exit(importlib.util.find_spec('farandole') is None)"
_NO_LOCKS = "two workers would prepare the host at once; have the user's home, or its ~/.cache, on one that does"
LAST_WORDS = 500  # characters of what it said


def prepare(command: str, *, run: str, host: str) -> None:
    """Return once `command`, a line for the shell, has succeeded on `host` for `run`, any text that only the run has.

    Raises:
        HostNotPrepared: it failed.
    """
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / _name(run, host, command)
    _do_once(command, "--prepare", done=mark.with_suffix(".done"), lock=mark.with_suffix(".lock"), host=host)


def set_up(command: str, folder: Path, *, host: str) -> Path | None:
    """The same for `--setup`, in a pack's `folder`, which is the working folder already. Returns the interpreter that
    it has made there, if that is another than this process's.

    Raises:
        HostNotPrepared: it failed, or workers can't begin with that interpreter.
    """
    if not command:
        return None
    done, lock = set_up_mark(folder, _name(host, command))
    _do_once(command, "--setup", done=done, lock=lock, host=host, log=done.with_suffix(".log"))
    environment = folder / ENVIRONMENT
    python = environment / "bin" / "python"
    if not python.exists() or Path(sys.prefix).resolve() == environment.resolve():
        return None
    left = f"--setup {command!r} has left {python} on {host}"
    try:
        has_us = subprocess.run([python, "-c", HAS_US], stdin=subprocess.DEVNULL, check=False).returncode == 0
    except OSError as error:
        raise HostNotPrepared(f"{left}, which does not run: {error.strerror}") from None
    if not has_us:
        raise HostNotPrepared(
            f"{left}, which has no farandole: let it install that, too, or install what the code needs with "
            f'"$PYTHON" -m pip'
        )
    return python


def _name(*of: str) -> str:
    return hashlib.sha256("\0".join(of).encode()).hexdigest()[:32]


def _do_once(command: str, option: str, *, done: Path, lock: Path, host: str, log: Path | None = None) -> None:
    """What it says goes to `log`, if there is one. Raises HostNotPrepared: it failed."""
    if done.exists():
        return
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not files.take(held, lock, _NO_LOCKS):
            tell(f"farandole: another worker prepares {host}; waiting for it")
            files.take(held, lock, _NO_LOCKS, wait=True)
        if done.exists():
            return
        tell(f"farandole: preparing {host}: {command}")
        environ = {**os.environ, "PYTHON": sys.executable}
        with open(log, "wb", opener=files.opener) if log else contextlib.nullcontext() as output:
            code = subprocess.run(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(held,),
                env=environ, check=False,
            ).returncode  # fmt: skip
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            where = f"{log} there{_last_words(log)}" if log else "this worker's output"
            raise HostNotPrepared(
                f"{option} {command!r} failed on {host} with {how}, so its workers can't join; what it said is in "
                f"{where}"
            )
        os.close(os.open(done, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        tell(f"farandole: {host} is prepared")
    finally:
        os.close(held)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {last[:LAST_WORDS]}" if last else ""
