"""Another local user who is after the coordinator's port, and after what is then sent to it."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from attack.base import STRANGER, USER, Attack, NotMade, Succeeded
from attack.live import Live
from chaos.launched import FARANDOLE
from farandole.control.run_folder import RECORD, TICKET

KEPT_S = 3.0  # that the thief keeps a port that it has got
POLL_S = 0.002
AGAIN = b"\n--- said again\n"
ANSWERS = (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def poll(address: tuple[str, int], seconds: float) -> bytes:
    """Bind the port as soon as it is free, in every way; what was said to it then, with BOUND in front."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with contextlib.suppress(OSError), socket.socket() as listener:
                if option is not None:
                    listener.setsockopt(socket.SOL_SOCKET, option, 1)
                listener.bind(address)
                listener.listen(64)
                return b"BOUND " + serve(listener, KEPT_S)
        time.sleep(POLL_S)
    return b""


def serve(listener: socket.socket, seconds: float) -> bytes:
    """As the coordinator, to whoever comes; what they say."""
    deadline = time.monotonic() + seconds
    heard = b""
    number = 0
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(0.5)
            with contextlib.suppress(OSError):
                heard += connection.recv(65536)
                connection.sendall(ANSWERS[number % len(ANSWERS)])
                heard += connection.recv(65536)
            connection.close()
            number += 1
    return heard


def killed(live: Live) -> str:
    """The coordinator dies (the kernel may choose it), and the thief is there before the next one."""
    pid = live.run.watch.coordinator()
    with live.stranger(poll, live.address, 3.0) as thief:
        live.run.kill(pid)
        live.until(lambda: live.run.watch.coordinator() not in (None, pid), 30, "another coordinator")
    if thief.got(0).startswith(b"BOUND"):
        raise Succeeded(f"it bound the port and was sent {len(thief.got(0)) - 6} bytes")
    return "the port was never free; another coordinator serves it"


def impostor(live: Live) -> str:
    """A ticket that leads to somebody else: a tunnel that is gone, a machine whose address was given away."""
    with _elsewhere(live) as (listener, folder), live.stranger(serve, listener, 5.0) as thief:
        code = _status(live, folder)
    if not thief.got(0):
        raise NotMade("nobody came to the impostor")
    if code == 0:
        raise Succeeded("`farandole status` believed the impostor")
    return f"`farandole status` said {len(thief.got(0))} bytes to it, and believed it nothing"


def relayed(live: Live) -> str:
    """Who passes all on has that one connection, and nothing from it: said again, it is worth nothing."""
    with _elsewhere(live) as (listener, folder), live.stranger(relay, listener, live.address, 5.0) as between:
        code = _status(live, folder)
    heard, _, again = between.got(0).partition(AGAIN)
    if code != 0 or b" 200 " not in heard:
        raise NotMade("nothing got through the relay")
    if b" 200 " in again or b" 101 " in again:
        raise Succeeded("what was heard, said again on another connection, was let in")
    return f"{len(heard)} bytes heard between the two; said again: refused"


def relay(listener: socket.socket, address: tuple[str, int], seconds: float) -> bytes:
    """Pass one conversation on; what both sides said, and what came of the client's part said again."""
    listener.settimeout(seconds)
    here, _ = listener.accept()
    said = heard = again = b""
    with here, socket.create_connection(address, 5) as there, selectors.DefaultSelector() as selector:
        selector.register(here, selectors.EVENT_READ, there)
        selector.register(there, selectors.EVENT_READ, here)
        while True:
            for key, _ in selector.select(seconds):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(65536)
                if key.fileobj is here:
                    said += data
                else:
                    heard += data
                if data:
                    key.data.sendall(data)
                    continue
                break
            else:
                continue
            break
    with socket.create_connection(address, 5) as connection:
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.sendall(said)
            while data := connection.recv(65536):
                again += data
    return said + heard + AGAIN + again


@contextmanager
def _elsewhere(live: Live) -> Iterator[tuple[socket.socket, Path]]:
    """A listener, and a folder with a copy of the ticket that leads to it."""
    with socket.socket() as listener, tempfile.TemporaryDirectory(dir=live.place) as folder:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        address = f"{urlsplit(live.ticket.address).scheme}://127.0.0.1:{listener.getsockname()[1]}"
        msgspec.structs.replace(live.ticket, address=address).save(Path(folder, TICKET))
        Path(folder, RECORD).write_text(json.dumps({"pid": 1, "address": address}))
        yield listener, Path(folder)


def _status(live: Live, folder: Path) -> int | None:
    status = live.run.start([*FARANDOLE, "status", "--run", str(folder)])
    live.until(lambda: status.poll() is not None, 20, "an end of `farandole status`")
    return status.returncode


ATTACKS = (
    Attack(name="thief: the port of a killed coordinator", who=USER, act=killed, kills_coordinator=True, short=True),
    Attack(name="thief: an impostor at the ticket's address", who=STRANGER, act=impostor),
    Attack(name="thief: what a relay heard, said again", who=STRANGER, act=relayed),
)
