"""Processes: forking from a server that has torch loaded, lifelines, ends with the parent, and bounded waiting.

A process can be forked from one that has loaded its modules, instead of a new interpreter; this is the client side.
The fork server (`worker/fork_server.py`) is a child of this process, and has the other end of a socket pair. It is
asked for one process at a time. The argument:

- The server forks twice, and the process in between ends at once. So the new process becomes the child of the nearest
  subreaper above it: this process, since it registers as one. From then on the server is not involved. The kernel
  reports exit codes to this process, as of any child, and a server that dies takes no other process with it.
- The server answers with the new process's number when the process is already our child, leads its own session, and is
  bound to its lifeline. So no other process can have reaped it, its number is not reused, and its group can be killed
  by it.
- A server that ends without an answer may have forked or not. Then the lifeline is cut: the kernel ends the forked
  process, or the process sees this itself before it runs any user code. So a repeated request gives one process, not
  two.
- The server is bound to a lifeline too. When this process ends, in any way, all of them end.

The settings that are fixed when torch loads (threads, instruction set, ...) come from the server's environment. An
existing server (`spare`) is used only if the requested settings are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from farandole.errors import UsageError

# --- lifeline ---------------------------------------------------------------------------------------------------------
#
# A process group that ends when this process ends, kill -9 included, or on request.
#
# The group's leader holds the read end of a pipe whose only write end is here. It has asked the kernel to send SIGKILL
# to the group for events of the pipe (fcntl(2), F_SETSIG). When the write end is closed in any way, the kernel ends the
# group. Systems other than Linux have no such signal: there the processes end by themselves (`die_with_parent`).


class Lifeline:
    """The pipe of one process group. `read_end` is for the group's leader; close ours with `handed_over`.

    It owns both ends, and closes each only once, because a number that is closed twice may belong to another file.

    Raises:
        OSError: there are no free descriptors.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    @property
    def read_end(self) -> int:
        assert self._read_end >= 0, "it was handed over"
        return self._read_end

    def handed_over(self) -> None:
        descriptor, self._read_end = self._read_end, -1
        if descriptor >= 0:
            os.close(descriptor)

    def cut(self) -> None:
        """End the group, if it is still there."""
        descriptor, self._write_end = self._write_end, -1
        if descriptor >= 0:
            os.close(descriptor)

    def abandon(self) -> None:
        """End the group, if there is one: it is unknown whether the read end was handed over."""
        self.handed_over()
        self.cut()


def hang_on(read_end: int, group: int) -> None:
    """Make the kernel end process group `group` when the lifeline is cut, as long as a member keeps it open."""
    if sys.platform == "linux":
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETOWN, -group)
        fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)


def is_cut(read_end: int) -> bool:
    poll = select.poll()
    poll.register(read_end, 0)  # only hang-ups
    return bool(poll.poll(0))


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of a group of zombies
        os.killpg(group, signal.SIGKILL)


# --- forking ----------------------------------------------------------------------------------------------------------

SUPPORTED = sys.platform == "linux"
LOADED_WITH = (  # read by libraries when they are loaded, or by the interpreter when it starts
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "ATEN_", "DNNL_", "ONEDNN_", "TORCH", "PYTORCH_",
    "CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_", "GLOO_", "NPY_", "MALLOC_", "GLIBC_", "LD_", "PYTHON",
    "LC_", "LANG",
)  # fmt: skip
_LATER = ("PYTHONUNBUFFERED", "CUBLAS_WORKSPACE_CONFIG")  # can be set later; the second is read at cuBLAS's first use
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A child of this process, with the part of `subprocess.Popen`'s interface that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
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
    """The command of a process: `words` follow the interpreter, "-m MODULE ..." or "SCRIPT ...".

    spare: the process gets its own fork server, because it will need one.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    spare: bool = False


class ForkServer:
    """A fork server that loads or serves. `receive` first reports if it can fork; then each `ask` has one answer."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, channel: socket.socket, lifeline: Lifeline) -> None:
        self.pid = process.pid
        self._process = process
        self._channel = channel
        self._lifeline = lifeline
        become_subreaper()

    @staticmethod
    def start(server: str, modules: Sequence[str], environ: Mapping[str, str]) -> ForkServer:
        """Start the module `server`, which loads `modules` beside torch. Raises OSError."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            failed = stack.enter_context(contextlib.ExitStack())  # closes these if the start fails
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
        """Request a process with these standard streams. Raises OSError: the server is gone."""
        request = {"words": [*command.words], "environ": dict(command.environ), "folder": command.folder}
        send(self._channel, {**request, "spare": command.spare}, (*streams, lifeline.read_end))

    def receive(self) -> dict[str, Any] | None:
        """The next message, None if it is gone. `unfit`: why it can't fork, "" if it can. Later `pid`, or `error`."""
        with contextlib.suppress(OSError):
            return receive(self._channel)[0]
        return None

    def close(self) -> None:
        """End the server. Forked processes go on. Further calls do nothing."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._lifeline.cut()


_spare: tuple[ForkServer, dict[str, str]] | None = None


def keep_spare(server: ForkServer, environ: Mapping[str, str]) -> None:
    """Store a fork server that was started with `environ`, for later use in this process."""
    global _spare
    _spare = server, frozen(environ)


def has_spare() -> bool:
    return _spare is not None


def take_spare(environ: Mapping[str, str]) -> ForkServer | None:
    """The stored server, once, if it has loaded what a process with this environment would load."""
    global _spare
    spare, _spare = _spare, None
    if spare is None:
        return None
    server, loaded_with = spare
    if frozen(environ) != loaded_with:
        server.close()
        return None
    return server


def end_spare() -> None:
    """End the stored fork server if it was not used."""
    global _spare
    spare, _spare = _spare, None
    if spare is not None:
        spare[0].close()


def frozen(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that can't be changed once torch is loaded."""
    return {name: value for name, value in environ.items() if name.startswith(LOADED_WITH) and name not in _LATER}


def become_subreaper() -> None:
    """Make descendants whose parent has ended children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message as one line of JSON; descriptors come with its first bytes. Raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    sent_bytes = socket.send_fds(channel, [data], descriptors) if descriptors else channel.send(data)
    channel.sendall(data[sent_bytes:])


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, None at the end, and its descriptors. Raises OSError."""
    data, descriptors = b"", list[int]()
    while not data.endswith(b"\n"):
        part, received, _, _ = socket.recv_fds(channel, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        descriptors += received
        if not part:
            return None, descriptors
        data += part
    return json.loads(data), descriptors


# --- forked children --------------------------------------------------------------------------------------------------
#
# A training script may fork a child and let it run on. The run's objects are of no use in the child, and must do no
# harm.
#
# The child has copies of the worker's sockets and none of its threads. If it acted as a worker it would write into the
# worker's messages to its peers, whose processes Gloo then ends, or wait for ever. So in a child all objects that a
# script may hold (the run, the loop behind `run.steps`, a step), and all their parts, raise a UsageError on any access
# except `run.device`. Each of them is `guarded` where it is created. Objects of `data/` are excluded: loader processes
# are children too. `script.py` handles the end of such a child.

T = TypeVar("T")
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_PLAIN = ("device",)


class OfTheParent:
    """The class that the objects of a run get in a forked child."""

    def __getattribute__(self, name: str) -> Any:
        if name in _PLAIN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        raise _refusal(name)

    def __iter__(self) -> Iterator[Any]:
        raise _refusal("iteration")


def guarded(target: T) -> T:
    """Returns `target`. Forked children can use neither it nor its parts: they would use this process's sockets."""
    _guarded.add(target)
    return target


def _in_child() -> None:
    for target in list(_guarded):
        for part in (target, *vars(target).values()):
            package, *subpackages = type(part).__module__.split(".")
            if package == "farandole" and subpackages[:1] != ["data"]:
                with suppress(TypeError):  # a value without a __dict__, which is harmless
                    object.__setattr__(part, "__class__", OfTheParent)


def _refusal(operation: str) -> UsageError:
    return UsageError(
        f"{operation}: this process ({os.getpid()}) was forked by a worker, and only that worker can use the run; do "
        f"in the child only work that does not need the run, and end it there with os._exit or sys.exit"
    )


os.register_at_fork(after_in_child=_in_child)


# --- parent -----------------------------------------------------------------------------------------------------------
#
# A process that ends when the process that started it ends, in any way (kill -9 included).
#
# On Linux the kernel does it (PR_SET_PDEATHSIG); elsewhere a thread checks the parent's id every half second. The
# signal is SIGKILL, which ends a frozen process too. Linux sends it when the *thread* that started the process ends, so
# the starter does so from its main thread. Children of the process are not covered: a DataLoader's workers check for
# themselves (within 5 s), and the pool kills a dead worker's whole process group.

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when process `parent`, which started it, is gone; at once if it is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), name="farandole-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


# --- age --------------------------------------------------------------------------------------------------------------
#
# The age of this process as the system knows it, including the time before its interpreter could read a clock.

START = 19  # index of the start time in /proc/PID/stat, counted after the name: in ticks since boot


def age_s() -> float:
    """The age in seconds; 0.0 if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[START]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


# --- waiting ----------------------------------------------------------------------------------------------------------
#
# Waiting with a limit, in tasks that others may cancel.
#
# `asyncio.wait_for` (until Python 3.12) loses a cancellation that comes just when the awaited task has ended: the task
# goes on, and the task that cancelled it waits for it for ever. These functions do not.


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, within `seconds`.

    Raises:
        asyncio.TimeoutError: it took longer; it was cancelled, and has ended.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # so that it counts as retrieved


async def up_to(seconds: float, event: asyncio.Event) -> None:
    """Wait until the event is set, at most `seconds`."""
    with contextlib.suppress(asyncio.TimeoutError):
        await within(seconds, event.wait())


async def beside(awaitable: Awaitable[T], other: Awaitable[object]) -> T:
    """The result of `awaitable`. `other` runs meanwhile, and is cancelled then."""
    task = asyncio.ensure_future(other)
    try:
        return await awaitable
    finally:
        task.cancel()
        await asyncio.wait({task})


def on_new_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `call`, run in its own thread, which does not keep the process from ending: use it for a file on a
    disk that may not answer. Cancel the future if the result is no longer needed; the thread goes on until the call
    ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, failure: BaseException | None) -> None:
        if future.done():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(cast("T", value))

    def work() -> None:
        value, failure = None, None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=work, name="aside", daemon=True).start()
    return future
