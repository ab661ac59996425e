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
# A process group that ends when this process ends, kill -9 included, or when it is told to.
#
# The group's leader holds the read end of a pipe whose only write end is here, and has asked the kernel to send SIGKILL
# to the group for what happens to it (fcntl(2), F_SETSIG). Whatever closes the write end, the kernel ends the group.
# Other systems than Linux have no such signal: there the processes see to their own end (`process.py`).


class Lifeline:
    """`read_end` is for the group's leader; close ours with `handed_over`. Raises OSError: there are no descriptors.

    It owns both ends, and closes each once, however often it is asked: a number that is closed twice is another's.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    @property
    def read_end(self) -> int:
        assert self._read_end >= 0, "it was handed over"
        return self._read_end

    def handed_over(self) -> None:
        ours, self._read_end = self._read_end, -1
        if ours >= 0:
            os.close(ours)

    def cut(self) -> None:
        """End the group, if it is still there."""
        ours, self._write_end = self._write_end, -1
        if ours >= 0:
            os.close(ours)

    def abandon(self) -> None:
        """Nobody has said whether it was handed over: end the group, if there is one."""
        self.handed_over()
        self.cut()


def hang_on(read_end: int, group: int) -> None:
    """Have the kernel end process group `group` when the lifeline is cut, as long as somebody in it keeps it open."""
    if sys.platform == "linux":
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETOWN, -group)
        fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)


def is_cut(read_end: int) -> bool:
    poll = select.poll()
    poll.register(read_end, 0)  # hang-ups alone
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


def end_spare() -> None:
    """End a fork server that nobody has taken."""
    global _spare
    spare, _spare = _spare, None
    if spare is not None:
        spare[0].close()


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


# --- forked -----------------------------------------------------------------------------------------------------------
#
# A child that a training script forks and lets run on: what it has of the run is of no use to it, and must do no harm.
#
# The child has copies of the worker's sockets and none of its threads. As a worker it would speak in the middle of
# what the worker says to its peers, whose processes Gloo then ends, or wait for ever. So in a child whatever a script
# may have in hand (the run, the loop behind `run.steps`, a step), and all that these are made of, raise a UsageError,
# whatever is asked of them, but for `run.device`. Each of them is `guarded` where it is made. What is of `data/` is
# left out: loader processes are children, too. How such a child ends is in `script.py`.

T = TypeVar("T")
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_PLAIN = ("device",)


class OfTheParent:
    """What the objects of a run become in a forked child."""

    def __getattribute__(self, name: str) -> Any:
        if name in _PLAIN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        raise _refusal(name)

    def __iter__(self) -> Iterator[Any]:
        raise _refusal("iteration")


def guarded(held: T) -> T:
    """`held`, which forked children can't use, nor what it is made of."""
    _guarded.add(held)
    return held


def _in_child() -> None:
    for held in list(_guarded):
        for part in (held, *vars(held).values()):
            house, *rooms = type(part).__module__.split(".")
            if house == "farandole" and rooms[:1] != ["data"]:
                with suppress(TypeError):  # a value without a __dict__, which does nothing
                    object.__setattr__(part, "__class__", OfTheParent)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what}: this process ({os.getpid()}) was forked by a worker, and the run is that worker's alone; do in the "
        f"child only what needs nothing of the run, and end it there with os._exit or sys.exit"
    )


os.register_at_fork(after_in_child=_in_child)


# --- parent -----------------------------------------------------------------------------------------------------------
#
# A process that ends when the one that started it ends, however that happens (kill -9 included).
#
# On Linux the kernel does it (PR_SET_PDEATHSIG); elsewhere a thread looks at the parent's id every half second. The
# signal is SIGKILL, which a frozen process obeys too. Linux sends it when the *thread* that started us ends, so
# whoever starts such a process does so from its main thread. Children of ours are not covered: a DataLoader's
# workers watch for themselves (within 5 s), and the pool kills a dead worker's whole process group.

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when process `parent`, which started it, is gone; at once if it is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), name="farandole-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


# --- age --------------------------------------------------------------------------------------------------------------
#
# How long this process has been there, as the system knows it: also before its interpreter could look at a clock.

START = 19  # of the fields after the name, in /proc/PID/stat: when the process began, in ticks since boot


def age_s() -> float:
    """In seconds; 0.0 where the system does not say."""
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
# `asyncio.wait_for` takes a cancellation away (until Python 3.12) that comes just when what it waits for has ended: the
# task goes on, and who has cancelled it waits for it for ever. What is here does not.


async def within(seconds: float, what: Awaitable[T]) -> T:
    """What comes of it.

    Raises:
        asyncio.TimeoutError: it took longer; it was cancelled, and is over.
    """
    task = asyncio.ensure_future(what)
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
            task.exception()  # so that it counts as heard


async def up_to(seconds: float, event: asyncio.Event) -> None:
    """Until it is set, at most so long."""
    with contextlib.suppress(asyncio.TimeoutError):
        await within(seconds, event.wait())


async def beside(what: Awaitable[T], other: Awaitable[object]) -> T:
    """What comes of `what`; `other` runs meanwhile, and is over then."""
    task = asyncio.ensure_future(other)
    try:
        return await what
    finally:
        task.cancel()
        await asyncio.wait({task})


def aside(call: Callable[[], T]) -> asyncio.Future[T]:
    """What comes of `call`, made in a thread of its own, which keeps no process from ending: a file on a disk that does
    not answer is waited for there. Who no longer wants it cancels the future; the thread goes on for as long as it
    takes.
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
        except Exception as error:  # noqa: BLE001  it is raised where it is waited for
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=work, name="aside", daemon=True).start()
    return future
