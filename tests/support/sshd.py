"""Real sshd processes on loopback addresses, each a host, with keys of their own. Needs openssh-server."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.fake_worker import until

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
AVAILABLE = SSHD is not None and shutil.which("ssh") is not None and os.geteuid() == 0
WHY_NOT = "real hosts need openssh-server, and root to make /run/sshd"
CONFIG = """
ListenAddress {address}:{port}
HostKey {folder}/host-{address}
AuthorizedKeysFile {folder}/known
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv {environ}
"""


class Sshd:
    """Hosts at 127.0.0.2 and so on, `count` of them; `ssh` is the command that reaches them.
    `environ`: their variables.

    With SHLVL set, bash does not read the .bashrc of the user who runs the tests: two that begin at once may disturb
    each other there, and what they print would be in the commands' output.
    """

    def __init__(self, folder: Path, count: int, environ: Mapping[str, str] | None = None) -> None:
        self._folder, self.port = folder, _free_port()
        self._environ = " ".join(f'"{name}={value}"' for name, value in {"SHLVL": "1", **(environ or {})}.items())
        self.addresses = [f"127.0.0.{number + 2}" for number in range(count)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Sshd:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._key("mine")
        shutil.copy(self._folder / "mine.pub", self._folder / "known")
        (self._folder / "config").write_text(
            f"Host *\n IdentityFile {self._folder}/mine\n IdentitiesOnly yes\n "
            f"UserKnownHostsFile {self._folder}/hosts-known\n StrictHostKeyChecking accept-new\n LogLevel ERROR\n"
        )
        for address in self.addresses:
            self._key(f"host-{address}")
            self.begin(address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in tuple(self._processes):
            self.end(address)

    @property
    def ssh(self) -> str:
        return shlex.join(["ssh", "-F", str(self._folder / "config"), "-o", "BatchMode=yes"])

    def begin(self, address: str) -> None:
        config = self._folder / f"sshd-{address}"
        config.write_text(CONFIG.format(address=address, port=self.port, folder=self._folder, environ=self._environ))
        assert SSHD is not None
        self._processes[address] = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: _answers(address, self.port))

    def end(self, address: str) -> None:
        process = self._processes.pop(address)
        process.kill()
        process.wait()

    def other_key(self, address: str) -> None:
        """That host is another one from now on."""
        self.end(address)
        (self._folder / f"host-{address}").unlink()
        self._key(f"host-{address}")
        self.begin(address)

    def forbid(self) -> None:
        """Nobody's key is taken any more."""
        (self._folder / "known").write_text("")

    def _key(self, name: str) -> None:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        return free.getsockname()[1]
