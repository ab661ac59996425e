"""Programs of tests as processes that are forked from one that has loaded torch: a tenth of a second instead of three.

Each process that runs tests has a fork server of its own, the product's (`farandole.platform.process`), from its first
use to its end. `popen` and `run` are subprocess's as far as they go, and are subprocess's themselves where forking is
not the same: another interpreter, flags, `-c`, variables that are read when torch loads. A `farandole run` gets a fork
server with it, for its workers. Tests about starting start as users do: by subprocess.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from farandole.platform.process import SUPPORTED, Command, Forked, ForkServer, Lifeline, frozen
from farandole.pool.local import LOADED, SERVER

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
ENVIRON["OMP_NUM_THREADS"] = "1"  # as a run's workers have it, so that they can be forked from the same process
ALSO = (*LOADED, "farandole.cli.commands", "farandole.cli.supervisor")

Process = subprocess.Popen[bytes] | Forked
_servers: list[ForkServer] = []
_lifelines: dict[Forked, Lifeline] = {}  # they end with the tests, kill -9 included


def popen(
    command: Sequence[str], *, env: Mapping[str, str] = ENVIRON, cwd: Path | None = None,
    stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None,
) -> Process:  # fmt: skip
    """A process that leads a session of its own. None: nothing to read from, nobody to write to."""
    words = command[1:]
    can = command[0] == sys.executable and (words[0] == "-m" or not words[0].startswith("-"))
    if not (SUPPORTED and can and frozen(env) == frozen(ENVIRON)):
        return subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=stdin or subprocess.DEVNULL, stdout=stdout or subprocess.DEVNULL,
            stderr=stderr or subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    asked = Command(
        words=words, environ=env, folder=str(cwd or Path.cwd()), spare=words[:3] == ["-m", "farandole", "run"]
    )
    lifeline = Lifeline()
    with Path(os.devnull).open("r+b") as nothing:
        streams = [stream.fileno() if stream else nothing.fileno() for stream in (stdin, stdout, stderr)]
        server = _server()
        server.ask(asked, (streams[0], streams[1], streams[2]), lifeline)
        answer = server.receive()
    lifeline.handed_over()
    assert answer is not None
    assert "pid" in answer, answer
    process = Forked(answer["pid"])
    for ended in [each for each in _lifelines if each.returncode is not None]:
        _lifelines.pop(ended).cut()
    _lifelines[process] = lifeline
    return process


def run(
    command: Sequence[str], *, env: Mapping[str, str] = ENVIRON, cwd: Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """To its end, with what it has written."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = popen(command, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        said: list[str] = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
        return subprocess.CompletedProcess([*command], code, *said)


def _server() -> ForkServer:
    if not _servers:
        hangups = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be ignoring them
        try:
            server = ForkServer.start(SERVER, ALSO, ENVIRON)
        finally:
            signal.signal(signal.SIGHUP, hangups)
        word = server.receive()
        assert word == {"unfit": ""}, word
        _servers.append(server)
        atexit.register(server.close)
    return _servers[0]
