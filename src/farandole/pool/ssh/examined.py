"""What a host tells of itself, and tries, for `farandole hosts check`: the far end of `survey.py`.

    python -m farandole host

It says its facts, and then answers one line after the other of its standard input, until that ends:

    clock                      its Unix time
    listen ADDRESS             opens a port there, as a worker would; its number
    reach ADDRESS PORT         whether something sent there comes back

Each answer is one line of JSON behind `MARK`, so that whatever a login shell prints besides does no harm.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from farandole import __version__
from farandole.errors import FarandoleError
from farandole.platform import cpu
from farandole.platform.output import tell

MARK = "farandole-host "
WORD = b"farandole\n"
REACH_S = 5.0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`without`: why no worker could be there, "" where one could. `address`: at which this host was reached over SSH,
    "" on the same machine. `numerics`: see `control/status.py`. `free_bytes`: where agents have their folders.
    """

    python: str
    farandole: str
    cores: int
    free_bytes: int
    address: str = ""
    gpus: int = 0
    without: str = ""
    numerics: dict[str, str] = {}


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To one line: a number, or why not."""

    number: float = 0.0
    error: str = ""


def examine() -> None:
    """Until standard input ends."""
    _say(facts())
    for line in sys.stdin:
        _say(_answer(line.split()))


def facts() -> Facts:
    numerics, gpus, without = dict[str, str](), 0, ""
    try:
        cpu.set_for("same")
        from farandole.numerics import settings
        from farandole.training import run_state

        numerics, gpus = dict(run_state.here(1, "same", {})), settings.devices()
    except (ImportError, OSError, FarandoleError) as error:
        without = str(error)
    home = Path.home()
    return Facts(
        python=platform.python_version(),
        farandole=__version__,
        cores=os.cpu_count() or 1,
        free_bytes=shutil.disk_usage(home).free if home.exists() else 0,
        address=_reached_at(os.environ.get("SSH_CONNECTION", "")),
        gpus=gpus,
        without=without,
        numerics=numerics,
    )


def _reached_at(connection: str) -> str:
    """Of what sshd says: the client's address and port, then its own."""
    words = connection.split()
    return words[2] if len(words) == 4 else ""


def _say(answer: Facts | Answer) -> None:
    tell(MARK + msgspec.json.encode(answer).decode())
    sys.stdout.flush()


def _answer(words: list[str]) -> Answer:
    try:
        match words:
            case ["clock"]:
                return Answer(number=time.time())
            case ["listen", address]:
                return Answer(number=listen(address))
            case ["reach", address, port]:
                reach(address, int(port))
                return Answer()
            case _:
                return Answer(error=f"unknown question {' '.join(words)!r}")
    except (OSError, ValueError) as error:
        return Answer(error=(error.strerror if isinstance(error, OSError) else "") or str(error) or "no answer")


def listen(address: str) -> int:
    """A port there that answers what it is sent; it is open as long as this process. Raises OSError."""
    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return server.getsockname()[1]


def _serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(REACH_S)
            try:
                peer.sendall(peer.recv(len(WORD)))
            except OSError:
                continue


def reach(address: str, port: int) -> None:
    """Raises OSError: nothing comes back from there."""
    with socket.create_connection((address, port), REACH_S) as peer:
        peer.sendall(WORD)
        if not peer.recv(len(WORD)):
            raise OSError("somebody else answers there")
