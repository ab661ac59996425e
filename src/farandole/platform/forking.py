"""A process that is forked from one that has loaded what it needs, in place of a new interpreter: who asks for it.

The fork server (`worker/fork_server.py`) is a child of ours, and has the other end of a socket pair. It is asked for
one process at a time. The argument, who knows what when:

- The server forks twice, and the process in between ends at once. So the new process becomes the child of the nearest
  subreaper above it: ours, since we ask to be one. From then on the server has nothing to do with it. Exit codes come
  from the kernel to us who wait for them, as of any child, and a server that dies takes nobody with it.
- The server answers with the new process's number when that is our child already, leads a session of its own, and hangs
  on its lifeline. So nobody else can have reaped it, its number is not another's, and its group can be killed by it.
- A server that ends without an answer may have forked or not. Then the lifeline is cut: what has been forked is ended
  by the kernel, or sees it itself before it runs a line of anybody's. So whoever asks again has one process, not two.
- The server hangs on a lifeline too. When we end, however that happens, everybody does.

What is frozen when torch loads (threads, instruction set, ...) comes from the environment that the server began with.
One that is there already (`spare`) serves only who wants the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.platform.lifeline import Lifeline, hang_on

SUPPORTED = sys.platform == "linux"
LOADED_WITH = (  # read by libraries when they are loaded, or by the interpreter when it starts
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "ATEN_", "DNNL_", "ONEDNN_", "TORCH", "PYTORCH_",
    "CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_", "GLOO_", "NPY_", "MALLOC_", "GLIBC_", "LD_", "PYTHON",
    "LC_", "LANG",
)  # fmt: skip
_LATER = ("PYTHONUNBUFFERED", "CUBLAS_WORKSPACE_CONFIG")  # can be made up for; read when cuBLAS is first used
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A child of this process; like `subprocess.Popen`, as far as it goes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after so many seconds."""
        if timeout is not None and self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                poll = select.poll()  # select.select takes no descriptor beyond 1023
                poll.register(ended, select.POLLIN)
                if not poll.poll(1000 * timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            finally:
                os.close(ended)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a process does: `words` follow the interpreter, "-m MODULE ..." or "SCRIPT ...".

    spare: it gets a fork server of its own, for a process that will want one.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    spare: bool = False


class ForkServer:
    """One that is loading, or serves. `receive` first says whether it can; then each `ask` has one answer."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, channel: socket.socket, lifeline: Lifeline) -> None:
        self.pid = process.pid
        self._process = process
        self._channel = channel
        self._lifeline = lifeline
        become_subreaper()

    @staticmethod
    def start(server: str, modules: Sequence[str], environ: Mapping[str, str]) -> ForkServer:
        """One of the module `server`, which loads `modules` beside torch. Raises OSError."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            failed = stack.enter_context(contextlib.ExitStack())  # what is closed where no server comes of it
            failed.callback(ours.close)
            lifeline = Lifeline()
            failed.callback(lifeline.abandon)
            process = subprocess.Popen(
                [sys.executable, "-m", server, str(theirs.fileno()), str(lifeline.read_end), *modules],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=dict(environ), start_new_session=True, pass_fds=(theirs.fileno(), lifeline.read_end),
            )  # fmt: skip
            failed.pop_all()
            hang_on(lifeline.read_end, process.pid)
            lifeline.handed_over()
            return ForkServer(process, ours, lifeline)

    def fileno(self) -> int:
        return self._channel.fileno()

    def ask(self, command: Command, streams: tuple[int, int, int], lifeline: Lifeline) -> None:
        """For a process with these standard streams. Raises OSError where the server has gone."""
        said = {"words": [*command.words], "environ": dict(command.environ), "folder": command.folder}
        send(self._channel, {**said, "spare": command.spare}, (*streams, lifeline.read_end))

    def receive(self) -> dict[str, Any] | None:
        """Its next word, None if it has gone. `unfit`: why nothing can be forked from it. `pid`, or `error`."""
        with contextlib.suppress(OSError):
            return receive(self._channel)[0]
        return None

    def close(self) -> None:
        """End it; what has been forked is not concerned. More than once is once."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._lifeline.cut()


_spare: tuple[ForkServer, dict[str, str]] | None = None


def keep_spare(server: ForkServer, environ: Mapping[str, str]) -> None:
    """A fork server that was started with `environ`, for whoever will want one in this process."""
    global _spare
    _spare = server, frozen(environ)


def has_spare() -> bool:
    return _spare is not None


def take_spare(environ: Mapping[str, str]) -> ForkServer | None:
    """It, once, if it has loaded what a process of this environment would load."""
    global _spare
    spare, _spare = _spare, None
    if spare is None:
        return None
    server, loaded_with = spare
    if frozen(environ) != loaded_with:
        server.close()
        return None
    return server


def frozen(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment can't be made up for once torch is loaded."""
    return {name: value for name, value in environ.items() if name.startswith(LOADED_WITH) and name not in _LATER}


def become_subreaper() -> None:
    """Descendants whose parent has ended become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """A message is one line of JSON; descriptors come with its first bytes. Raises OSError."""
    said = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(channel, [said], descriptors) if descriptors else channel.send(said)
    channel.sendall(said[sent:])


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, None where there is none any more, and its descriptors. Raises OSError."""
    said, descriptors = b"", list[int]()
    while not said.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(channel, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        descriptors += more
        if not part:
            return None, descriptors
        said += part
    return json.loads(said), descriptors
